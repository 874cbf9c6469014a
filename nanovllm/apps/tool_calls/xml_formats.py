"""Calls whose arguments are written between tags: those of Qwen3-Coder and its kin, GLM-4.5 and MiniMax-M2."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from nanovllm.apps.tool_calls.reader import Parser, Steps, Tools
from nanovllm.apps.tool_calls.values import dumped, escaped, property_types, typed


@dataclass(frozen=True)
class Tags:
    """What stands around a call, its name, and the names and values of its arguments.

    Spaces may stand between the tags. Without name_end a name ends at a line end or the next tag, and without call_end
    a call ends where all calls end. has_lines: a line end after the tag before a value and one before the tag behind
    it are none of the value, and models
    leave the tag behind it out before another argument. may_lack_begin: they leave the first tag out.
    """

    begin: str
    name: str
    name_end: str
    key: str
    key_end: str
    value: str
    value_end: str
    call_end: str
    end: str
    has_lines: bool = False
    may_lack_begin: bool = False

    @property
    def all(self) -> tuple[str, ...]:
        """Every tag."""
        tags = (self.begin, self.name, self.name_end, self.key, self.key_end, self.value, self.value_end)
        return (*tags, self.call_end, self.end)


QWEN3 = Tags(
    *("<tool_call>", "<function=", ">", "<parameter=", ">", "", "</parameter>", "</function>", "</tool_call>"),
    has_lines=True,
    may_lack_begin=True,
)
SEED = Tags(
    *("<seed:tool_call>", "<function=", ">", "<parameter=", ">", "", "</parameter>", "</function>"),
    end="</seed:tool_call>",
)
GLM = Tags(*("<tool_call>", "", "", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "", "</tool_call>"))
MINIMAX = Tags(
    *("<minimax:tool_call>", '<invoke name="', '">', '<parameter name="', '">', "", "</parameter>", "</invoke>"),
    end="</minimax:tool_call>",
)


class XmlCalls(Parser):
    """Reads calls between the given tags. A value takes the type that the tool's schema gives it."""

    def __init__(self, tools: Tools, tags: Tags) -> None:
        super().__init__(tools)
        self._tags = tags
        self.BEGINS = (tags.begin, tags.name) if tags.may_lack_begin else (tags.begin,)

    def calls(self) -> Steps[bool]:
        tags = self._tags
        reader = self.reader
        if tags.may_lack_begin and reader.text.startswith(tags.name, self._begin):
            reader.position = self._begin
        while True:
            yield from reader.spaces()
            if not (yield from reader.takes(tags.name)) or not (yield from self._call()):
                return False
            if not tags.call_end:
                return True
            yield from reader.spaces()
            if not (yield from reader.first_of((tags.name,))):
                yield from self.closing(tags.end)
                return True

    def _call(self) -> Steps[bool]:
        """Take a call after the tag before its name."""
        tags = self._tags
        reader = self.reader
        name = yield from self.tool_name((tags.name_end,) if tags.name_end else ("\n", "<"))
        if name is None:
            return False
        yield from reader.takes(tags.name_end)
        yield from reader.spaces()
        ends = tuple(mark for mark in (tags.call_end, tags.end) if mark)
        if not (yield from reader.first_of((tags.key, *ends))):
            return False
        self.call(name)
        before = "{"
        while (yield from reader.takes(tags.key)):
            if not (yield from self._argument(name, before)):
                return False
            before = ", "
            yield from reader.spaces()
        end = yield from reader.first_of(ends)
        if not end:
            return False
        self.arguments("{}" if before == "{" else "}")
        if end == tags.call_end or not tags.call_end:
            reader.position += len(end)
        self.end()
        return True

    def _argument(self, name: str, before: str) -> Steps[bool]:
        """Take a name and its value. `before` stands before them in JSON."""
        tags = self._tags
        reader = self.reader
        parts: list[str] = []
        if not (yield from reader.copy_until((tags.key_end,), parts.append)):
            return False
        key = "".join(parts).strip()
        if tags.value:
            yield from reader.spaces()
            if not (yield from reader.takes(tags.value)):
                return False
        types = property_types(self.tools[name], key)
        if types == {"string"}:
            self.arguments(f'{before}{dumped(key)}: "')
            is_complete = yield from self._value(name, lambda text: self.arguments(escaped(text)))
            if is_complete:
                self.arguments('"')
            return is_complete
        parts.clear()
        is_complete = yield from self._value(name, parts.append)
        if is_complete:
            self.arguments(f"{before}{dumped(key)}: {typed(''.join(parts), types)}")
        return is_complete

    def _value(self, name: str, write: Callable[[str], None]) -> Steps[bool]:
        """Take a value and the tag behind it, which counts only where another tag or the end follows."""
        tags = self._tags
        reader = self.reader
        ends = [tags.value_end]
        without_end = tuple[str, ...]()
        if tags.has_lines:
            yield from reader.takes("\n")
            ends = [f"\n{tags.value_end}", tags.value_end]
            without_end = self._next_keys(name)
        while mark := (yield from reader.copy_until((*ends, *without_end), write)):
            if mark in without_end:
                reader.position -= len(mark)
                return True
            position = reader.position
            yield from reader.spaces()
            follows = yield from reader.first_of((tags.key, tags.call_end, tags.end))
            is_end = bool(follows) or reader.position >= len(reader.text)
            reader.position = position
            if is_end:
                return True
            write(mark)
        return False

    def _next_keys(self, name: str) -> tuple[str, ...]:
        """The lines that begin the tool's arguments."""
        properties = self.tools[name].get("properties")
        keys = properties if isinstance(properties, Mapping) else ()
        return tuple(f"\n{self._tags.key}{key}{self._tags.key_end}" for key in keys)
