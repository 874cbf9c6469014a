"""Tool calls: how a request's tools constrain the text, and how calls are read from it while it is generated."""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

from nanovllm.apps import tool_choice
from nanovllm.apps.server.protocol import ChatRequest, NamedTool
from nanovllm.apps.server.responses import invalid
from nanovllm.text.prompts import open_end

WHITESPACE = " \t\n\r"


class Call(NamedTuple):
    """A call, complete: the name of the function, and its arguments as JSON text."""

    name: str
    arguments: str


Piece = str | Call  # text that is no call, or a call


class Parser:
    """Reads the text of one answer. The pieces, in order, hold all of it. This one finds no calls."""

    def __init__(self) -> None:
        self._text = ""  # what is held back

    def feed(self, text: str) -> list[Piece]:
        """The pieces that this text completes."""
        return [text] if text else []

    def finish(self) -> list[Piece]:
        """What is left, after the last text. A call that is incomplete stays text."""
        return [self._text] if self._text else []


class Hermes(Parser):
    """Calls as Hermes and Qwen write them: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

    BEGIN, END = "<tool_call>", "</tool_call>"

    _inside = False  # of a call
    _after_call = False  # spaces between calls are no content

    def feed(self, text: str) -> list[Piece]:
        self._text += text
        pieces: list[Piece] = []
        while self._take(pieces):
            pass
        return pieces

    def finish(self) -> list[Piece]:
        if not self._inside:
            return [] if self._after_call and not self._text.strip() else super().finish()
        call = as_call(_read(self._text))
        return [call] if call is not None else [self.BEGIN, *super().finish()]

    def _take(self, pieces: list[Piece]) -> bool:
        """Move what is complete from the text to `pieces`. Returns whether there may be more."""
        before, mark, after = self._text.partition(self.END if self._inside else self.BEGIN)
        if self._inside:
            if mark:
                pieces.append(as_call(_read(before)) or f"{self.BEGIN}{before}{mark}")
                self._text, self._inside, self._after_call = after, False, True
            return bool(mark)
        held = "" if mark else open_end(before, [self.BEGIN])
        content = before[: len(before) - len(held)]
        if self._after_call and not content.strip(WHITESPACE):
            self._text = after if mark else self._text
        else:
            pieces += [content] if content else []
            self._text, self._after_call = after if mark else held, False
        self._inside = bool(mark)
        return self._inside


class Llama3Json(Parser):
    """Calls as Llama 3 writes them: an answer that is nothing but `{"name": ..., "parameters": {...}}`.

    Several are separated by semicolons, and a `<|python_tag|>` may stand before them.
    """

    TAG = "<|python_tag|>"
    _is_text = False

    def feed(self, text: str) -> list[Piece]:
        self._text += text
        begin = self._text.lstrip(WHITESPACE)
        may_call = not begin or begin.startswith(("{", self.TAG)) or self.TAG.startswith(begin)
        if may_call and not self._is_text:
            return []
        self._is_text = True
        text, self._text = self._text, ""
        return [text] if text else []

    def finish(self) -> list[Piece]:
        calls = self._calls(self._text.strip(WHITESPACE).removeprefix(self.TAG).lstrip(WHITESPACE))
        return list(calls) or super().finish()

    def _calls(self, text: str) -> list[Call]:
        """All calls of the text; none if anything else is in it."""
        decoder, calls, position = json.JSONDecoder(), [], 0
        while position < len(text):
            try:
                value, position = decoder.raw_decode(text, position)
            except (ValueError, RecursionError):
                return []
            call = as_call(value)
            if call is None:
                return []
            calls.append(call)
            separator = re.compile(r"[\s;]*").match(text, position)
            position = separator.end() if separator else position
        return calls


class Forced(Parser):
    """The answer to a `tool_choice` that structured outputs enforce.

    It is the arguments of the function `name`, or, without a name, a JSON list of calls.
    """

    def __init__(self, name: str | None = None) -> None:
        super().__init__()
        self._name = name

    def feed(self, text: str) -> list[Piece]:
        self._text += text
        return []

    def finish(self) -> list[Piece]:
        if self._name is not None:
            return [Call(self._name, self._text)]
        values = _read(self._text)
        calls = [as_call(value) for value in values] if isinstance(values, list) else [None]
        return [self._text] if None in calls else [call for call in calls if call is not None]


def as_call(value: Any) -> Call | None:
    """The call that a JSON value is: an object with a name, and arguments or parameters."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # some models write the arguments as JSON text
        arguments = _read(arguments)
    if not isinstance(arguments, dict):
        return None
    # What JSON escapes and is no character, half of a surrogate pair, stays an escape.
    name, text = (
        part.encode("utf-8", "backslashreplace").decode()
        for part in (value["name"], json.dumps(arguments, ensure_ascii=False))
    )
    return Call(name, text)


def _read(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


# ---- which parser


def detect_format(template: str) -> str | None:
    """The format of tool calls that a chat template shows: "hermes", "llama3_json" or None."""
    if Hermes.BEGIN in template:
        return "hermes"
    return "llama3_json" if "python_tag" in template or "ipython" in template.lower() else None


def forced_schema(body: ChatRequest) -> dict[str, Any] | None:
    """The JSON schema that `tool_choice` forces the answer into; None for "auto" and "none"."""
    choice = body.tool_choice.model_dump() if isinstance(body.tool_choice, NamedTool) else body.tool_choice
    return tool_choice.forced_schema([tool.given for tool in body.tools or ()], choice, body.parallel_tool_calls)


def make_parser(body: ChatRequest, form: str | None) -> Parser:
    """A parser for one choice. form: "hermes", "llama3_json", or None if the template shows none of them."""
    if not body.tools or body.tool_choice == "none" or form == "none":
        return Parser()
    if isinstance(body.tool_choice, NamedTool):
        return Forced(body.tool_choice.function.name)
    if body.tool_choice == "required":
        return Forced()
    return Llama3Json() if form == "llama3_json" else Hermes()


def check_tools(body: ChatRequest, template: str, form: str | None) -> None:
    """Raise ApiError for a `tool_choice` that does not fit the tools, for tools that the model would not see, and for
    those whose calls could not be read."""
    tools, choice = body.tools or [], body.tool_choice
    if choice not in (None, "none") and not tools:
        raise invalid("tool_choice needs tools", "tool_choice")
    if isinstance(choice, NamedTool) and all(tool.function.name != choice.function.name for tool in tools):
        message = f"tool_choice names the function {choice.function.name!r:.100}, which is not in tools"
        raise invalid(message, "tool_choice")
    if not tools or choice == "none":
        return
    if "tools" not in template:
        raise invalid("tools: the model's chat template does not show tools to the model", "tools")
    if form is None and choice in (None, "auto"):
        raise invalid(
            "tools: the chat template shows no format of tool calls that the server knows; start it with "
            "--tool-call-parser hermes or llama3_json, or with none to get calls as text",
            "tools",
        )
