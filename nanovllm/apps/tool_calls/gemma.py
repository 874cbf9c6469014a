"""Calls as Gemma 4 writes them: `<|tool_call>call:NAME{key:<|"|>text<|"|>,other:3}<tool_call|>`."""

from __future__ import annotations

import re

from nanovllm.apps.tool_calls.reader import Parser, Steps
from nanovllm.apps.tool_calls.values import dumped, loaded

QUOTE = '<|"|>'
BARE_KEY = re.compile(r"([{,]\s*)([^\s{}\[\],:\"][^{}\[\],:\"]*?)\s*:")


class GemmaCalls(Parser):
    """Reads calls between the marks of Gemma 4, whose strings have quotes of their own and whose keys have none."""

    BEGINS = ("<|tool_call>",)
    END = "<tool_call|>"

    def calls(self) -> Steps[bool]:
        reader = self.reader
        yield from reader.spaces()
        if not (yield from reader.takes("call:")):
            return False
        name = yield from self.tool_name(("{",))
        if name is None:
            return False
        yield from reader.takes("{")
        self.call(name)
        before = "{"
        yield from reader.spaces()
        while not (yield from reader.takes("}")):
            if not (yield from self._argument(before)):
                return False
            before = ", "
            yield from reader.spaces()
            if not (yield from reader.takes(",")) and (yield from reader.char()) != "}":
                return False
            yield from reader.spaces()
        self.arguments("{}" if before == "{" else "}")
        self.end()
        yield from self.closing(self.END)
        return True

    def _argument(self, before: str) -> Steps[bool]:
        """Take a key and its value."""
        reader = self.reader
        parts = list[str]()
        if not (yield from reader.copy_until((":",), parts.append)):
            return False
        start = f"{before}{dumped(''.join(parts).replace(QUOTE, '').strip())}: "
        yield from reader.spaces()
        text = as_json((yield from self._raw_value()))
        if text is not None:
            self.arguments(start + text)
        return text is not None

    def _raw_value(self) -> Steps[str]:
        """Take a value up to the comma or brace behind it."""
        reader = self.reader
        parts = list[str]()
        depth = 0
        is_quoted = False
        while next_one := (yield from reader.char()):
            if (yield from reader.takes(QUOTE)):
                is_quoted = not is_quoted
                parts.append(QUOTE)
                continue
            if not is_quoted and depth == 0 and next_one in ",}":
                break
            if not is_quoted:
                depth += (next_one in "{[") - (next_one in "}]")
            parts.append(next_one)
            reader.position += 1
        return "".join(parts)


def as_json(text: str) -> str | None:
    """The JSON of a value in Gemma's form; a word that is none of JSON's is a string. None for a broken structure."""
    parts = text.split(QUOTE)
    strings = [dumped(part) for part in parts[1::2]]
    if len(parts) % 2 == 0:
        return None
    written = ""
    for number, part in enumerate(parts[::2]):
        # A string before a colon is a key already.
        written += BARE_KEY.sub(lambda match: f"{match[1]}{dumped(match[2])}:", part)
        written += strings[number] if number < len(strings) else ""
    try:
        loaded(written)
    except ValueError:
        word = text.strip()
        return dumped(word) if word and word[:1] not in "{[" and not strings else None
    return written.strip()
