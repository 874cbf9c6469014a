"""Calls that are written as in Python: those of Llama 4, Olmo 3 and LFM2."""

from __future__ import annotations

import re
from dataclasses import dataclass

from nanovllm.apps.tool_calls.reader import Parser, Steps, Tools
from nanovllm.apps.tool_calls.values import NoLiteral, dumped, property_types, python_value, typed

KEY = re.compile(r"\w", re.UNICODE)


@dataclass(frozen=True)
class Marks:
    """What stands around calls. is_alone: a list of calls may begin an answer without a mark."""

    begin: str
    end: str
    is_alone: bool = False


LLAMA = Marks("<|python_start|>", "<|python_end|>", is_alone=True)
OLMO = Marks("<function_calls>", "</function_calls>")
LFM = Marks("<|tool_call_start|>", "<|tool_call_end|>")


class PythonCalls(Parser):
    """Reads `[f(a="x", n=3), g()]`; between marks the brackets may be left out, and a line has one call."""

    def __init__(self, tools: Tools, marks: Marks) -> None:
        super().__init__(tools)
        self._marks = marks
        self.BEGINS = (marks.begin,)

    def opening(self) -> Steps[None]:
        yield from self.reader.spaces()
        if self._marks.is_alone and (yield from self.reader.takes("[")):
            yield from self.attempt(self.reader.text[: self.reader.position], self._calls(in_list=True))
        else:
            self.reader.position = 0

    def calls(self) -> Steps[bool]:
        yield from self.reader.spaces()
        in_list = yield from self.reader.takes("[")
        return (yield from self._calls(in_list))

    def _calls(self, in_list: bool) -> Steps[bool]:
        reader = self.reader
        end = self._marks.end
        while True:
            yield from reader.spaces()
            name = yield from self.tool_name(("(",))
            if name is None or not (yield from self._call(name)):
                return False
            self.end()
            yield from reader.spaces()
            is_last = (yield from reader.takes("]")) if in_list else bool((yield from reader.first_of((end,))))
            is_cut = reader.ended and end.startswith(reader.text[reader.position :])
            if is_last or is_cut or not (yield from reader.char()):
                self._begin = reader.position
                yield from self.closing(end)
                return True
            if not (yield from reader.takes(",")) and in_list:
                return False

    def _call(self, name: str) -> Steps[bool]:
        """Take a call's arguments with their parentheses."""
        reader = self.reader
        yield from reader.takes("(")
        self.call(name)
        before = "{"
        while True:
            yield from reader.spaces()
            if (yield from reader.takes(")")):
                self.arguments("{}" if before == "{" else "}")
                return True
            key = ""
            while KEY.match((yield from reader.char())):
                key += reader.text[reader.position]
                reader.position += 1
            yield from reader.spaces()
            if not key or not (yield from reader.takes("=")):
                return False
            text = _json((yield from self._literal()), property_types(self.tools[name], key))
            if text is None:
                return False
            self.arguments(f"{before}{dumped(key)}: {text}")
            before = ", "
            if not (yield from reader.takes(",")) and (yield from reader.char()) != ")":
                return False

    def _literal(self) -> Steps[str]:
        """Take the text up to the comma or parenthesis behind a value. Line ends within strings become escapes."""
        reader = self.reader
        parts = list[str]()
        depth = 0
        quote = ""
        after_backslash = False
        while next_one := (yield from reader.char()):
            if not quote and depth == 0 and next_one in ",)":
                break
            reader.position += 1
            if after_backslash:
                after_backslash = False
            elif quote:
                after_backslash = next_one == "\\"
                quote = "" if next_one == quote else quote
                next_one = {"\n": "\\n", "\r": "\\r"}.get(next_one, next_one)
            else:
                quote = next_one if next_one in "\"'" else ""
                depth += (next_one in "([{") - (next_one in ")]}")
            parts.append(next_one)
        return "".join(parts)


def _json(literal: str, types: frozenset[str]) -> str | None:
    """The JSON of a value; None if it is wrong. Templates quote all values, or none: then the type decides."""
    value = python_value(literal)
    if value is NoLiteral and not set("\"'([{") & set(literal):
        value = literal.strip()
    if isinstance(value, str) and "string" not in types:
        return typed(value, types)
    try:
        return None if value is NoLiteral else dumped(value)
    except (ValueError, TypeError, RecursionError):  # sets and the like
        return None
