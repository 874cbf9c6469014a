"""Calls whose arguments are written as JSON: those of Hermes, Llama 3, Mistral and Phi-4-mini, and forced ones."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from nanovllm.apps.tool_calls.reader import WHITESPACE, Parser, Reader, Steps, Tools
from nanovllm.apps.tool_calls.values import encodable, escaped, loaded

PART = re.compile(r'[^"\\{}\[\]\x00-\x1f]+|[\s\S]')
ARGUMENTS = ("arguments", "parameters")
KEYS = ("name", "id", "type", *ARGUMENTS)  # of a call; an object with others is an answer in JSON


def json_value(reader: Reader, write: Callable[[str], object] = bool) -> Steps[str | None]:
    """Take a JSON value. Returns its text, or None if it is incomplete or wrong. `write` gets the text as it comes.

    Line ends and the like within strings, which JSON does not have but models write, become escapes.
    """
    first = yield from reader.char()
    if not first or first not in '{["':
        return (yield from _json_word(reader, write))
    whole: list[str] = []
    depth = 0
    in_string = False
    after_backslash = False
    while True:
        if not (yield from reader.char()):
            return None
        match = PART.match(reader.text, reader.position)
        assert match is not None
        part = match[0]
        reader.position = match.end()
        if after_backslash:
            after_backslash = False
        elif in_string:
            in_string = part != '"'
            after_backslash = part == "\\"
            part = escaped(part) if part < " " else part
        else:
            in_string = part == '"'
            depth += (part in "{[") - (part in "}]")
        whole.append(part)
        write(part)
        if depth == 0 and not in_string:
            break
    text = "".join(whole)
    return text if _is_json(text) else None


def _json_word(reader: Reader, write: Callable[[str], object]) -> Steps[str | None]:
    """Take a number, true, false or null."""
    text = ""
    while (next_one := (yield from reader.char())) and next_one not in ",}]:;<" + WHITESPACE:
        text += next_one
        reader.position += 1
    if not _is_json(text):
        return None
    write(text)
    return text


def _is_json(text: str) -> bool:
    try:
        loaded(text)
    except ValueError:
        return False
    return True


class JsonCalls(Parser):
    """Reads objects with `name`, and `arguments` or `parameters`."""

    NEEDS_ARGUMENTS = False  # an object without them is no call
    ONLY_KEYS = False  # an object with other keys than a call's is none

    def json_call(self) -> Steps[bool]:
        """Take one object, and make a call of it if it is one."""
        reader = self.reader
        members = dict[str, Any]()
        is_sent = False
        if not (yield from reader.takes("{")):
            return False
        while True:
            key = yield from self._key()
            if key is None or (self.ONLY_KEYS and key not in KEYS):
                return False
            may_send = key in ARGUMENTS and "name" in members and not is_sent
            if may_send and (yield from reader.char()) == "{":
                self.call(members["name"])
                is_sent = True
                if (yield from json_value(reader, self.arguments)) is None:
                    return False
            else:
                text = yield from json_value(reader)
                if text is None:
                    return False
                members.setdefault(key, loaded(text) if key == "name" else text)
                if members.get("name", "") not in self.tools and key == "name":
                    return False
            yield from reader.spaces()
            if not (yield from reader.takes(",")):
                break
        return (yield from reader.takes("}")) and (is_sent or self._sends(members))

    def _key(self) -> Steps[str | None]:
        """Take a key with its colon and the spaces around it."""
        reader = self.reader
        yield from reader.spaces()
        text = (yield from json_value(reader)) if (yield from reader.char()) == '"' else None
        yield from reader.spaces()
        if text is None or not (yield from reader.takes(":")):
            return None
        yield from reader.spaces()
        return str(loaded(text))

    def _sends(self, members: dict[str, Any]) -> bool:
        """Send a call whose arguments were not sent as they came. Returns whether it is one."""
        texts = [members[key] for key in ARGUMENTS if key in members]
        if members.get("name") not in self.tools or (not texts and self.NEEDS_ARGUMENTS):
            return False
        text = texts[0] if texts else "{}"
        if text.startswith('"'):  # some models write the arguments as JSON text
            text = encodable(str(loaded(text))).strip()
        text = "{}" if text in ("null", "") else text
        if not _is_json(text) or not text.startswith("{"):
            return False
        self.call(members["name"])
        self.arguments(text)
        return True

    def json_calls(self) -> Steps[bool]:
        """Take objects, with or without commas or semicolons between them, or a list; make calls of them."""
        reader = self.reader
        yield from reader.spaces()
        if (yield from reader.takes("[")):
            return (yield from self._list())
        while True:
            if not (yield from self.json_call()):
                return False
            self.end()
            yield from reader.spaces()
            separator = yield from reader.first_of((",", ";"))
            reader.position += len(separator)
            yield from reader.spaces()
            next_one = yield from reader.char()
            if next_one != "{":
                reader.position = self._begin if next_one else len(reader.text)
                return True

    def _list(self) -> Steps[bool]:
        """Take what follows the bracket of a list of objects."""
        reader = self.reader
        while True:
            yield from reader.spaces()
            if not (yield from self.json_call()):
                return False
            yield from reader.spaces()
            goes_on = yield from reader.takes(",")
            is_closed = not goes_on and (yield from reader.takes("]"))
            self.end()
            if not goes_on:
                return is_closed


class MarkedJson(JsonCalls):
    """Calls after a mark, such as `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

    def __init__(self, tools: Tools, begin: str, end: str) -> None:
        """end: the mark behind the calls; empty for none."""
        super().__init__(tools)
        self.BEGINS = (begin,)
        self._end = end

    def calls(self) -> Steps[bool]:
        if not (yield from self.json_calls()):
            return False
        yield from self.closing(self._end)
        return True


class Llama3Json(JsonCalls):
    """An answer that begins with `{"name": ..., "parameters": {...}}`, or with a list of such objects.

    A `<|python_tag|>` may stand before them, also after other text.
    """

    BEGINS = ("<|python_tag|>",)
    NEEDS_ARGUMENTS = True
    ONLY_KEYS = True

    def opening(self) -> Steps[None]:
        yield from self.reader.spaces()
        if (yield from self.reader.first_of(("{", "["))):
            yield from self.attempt(self.reader.text[: self.reader.position], self.calls())
        else:
            self.reader.position = 0

    def calls(self) -> Steps[bool]:
        return (yield from self.json_calls())


class Mistral(JsonCalls):
    """`[TOOL_CALLS] [{"name": ..., "arguments": {...}}]`, and `[TOOL_CALLS]NAME[ARGS]{...}` of newer models."""

    BEGINS = ("[TOOL_CALLS]",)
    ARGS = "[ARGS]"
    ID = "[CALL_ID]"

    def calls(self) -> Steps[bool]:
        reader = self.reader
        yield from reader.spaces()
        if (yield from reader.first_of(("[", "{"))):
            return (yield from self.json_calls())
        name = yield from self.tool_name((self.ARGS, self.ID, "{"))
        if name is None:
            return False
        if (yield from reader.takes(self.ID)) and not (yield from reader.copy_until((self.ARGS,), lambda text: None)):
            return False
        yield from reader.takes(self.ARGS)
        yield from reader.spaces()
        if (yield from reader.char()) != "{":
            return False
        self.call(name)
        if (yield from json_value(reader, self.arguments)) is None:
            return False
        self.end()
        return True


class ForcedList(JsonCalls):
    """The list of calls that a `tool_choice` of `required` forces."""

    def opening(self) -> Steps[None]:
        yield from self.attempt("", self.json_calls())


class ForcedCall(Parser):
    """The arguments of the one function that a `tool_choice` forces."""

    def __init__(self, tools: Tools, name: str) -> None:
        super().__init__(tools)
        self._name = name

    def opening(self) -> Steps[None]:
        self.call(self._name)
        yield from self.reader.copy_until((), self.arguments)
        self.end()
