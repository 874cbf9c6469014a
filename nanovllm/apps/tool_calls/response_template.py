"""Answers that Transformers reads by the tokenizer's `response_template`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from nanovllm.apps.tool_calls.pieces import Arguments, Call, Ended, Piece, Reasoning, merged
from nanovllm.apps.tool_calls.reader import Parser
from nanovllm.apps.tool_calls.values import dumped

CALLS = "tool_calls"
CONTENT = "content"
FORM = "response_template"  # the name of this format


def has_calls(template: Mapping[str, Any] | None) -> bool:
    """Whether a response template says how calls are written."""
    fields = template.get("fields") if template is not None else None
    return isinstance(fields, Mapping) and CALLS in fields


class ResponseTemplateParser(Parser):
    """Content, reasoning and calls by Transformers' parser. A call comes in one piece when it is complete.

    Text that the response template leaves out, such as spaces around its marks, is left out. What it cannot read is
    content from there on.
    """

    def __init__(self, template: Mapping[str, Any], tools: Sequence[Mapping[str, Any]], prompt: str) -> None:
        """tools: as the request has them. prompt: its text, which may begin the answer."""
        from transformers.utils.chat_parsing import ResponseParser

        super().__init__({tool["function"]["name"]: {} for tool in tools})
        self._template = template
        try:
            self._parser = ResponseParser(dict(template), prefix=prompt, tools=[dict(tool) for tool in tools])
        except Exception:  # of a checkpoint's file
            self._parser = None
        self._fed = ""
        self._shown = 0  # up to where the text is in pieces
        self._region = 0  # where the region that is open begins, with its mark

    def feed(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        for letter in text:  # so that what comes before a fault is read, however the text comes
            self._fed += letter
            pieces += self._guarded(letter)
        return merged(pieces)

    def finish(self) -> list[Piece]:
        return self._guarded(None)

    def _guarded(self, letter: str | None) -> list[Piece]:
        """The pieces that the next letter completes, or that the end does."""
        try:
            if self._parser is not None:
                events = self._parser.finalize()[1] if letter is None else self._parser.feed(letter)
                return merged(piece for event in events for piece in self._read(event))
        except Exception:  # a value that is not in the form that the template names
            self._parser = None
            self._shown = self._region
        rest = self._fed[self._shown :]
        self._shown = len(self._fed)
        return merged([rest])

    def _read(self, event: Mapping[str, Any]) -> list[Piece]:
        name = event["field"]
        if event["type"] == "region_open":
            self._region = self._shown
            self._shown = self._after_mark(name, "open")
        elif event["type"] == "region_chunk":
            self._shown += len(event["text"])
            if name != CALLS:
                return [event["text"] if name == CONTENT else Reasoning(event["text"])]
        else:
            self._shown = self._after_mark(name, "close")
            if name == CALLS:
                return self._calls(event["value"], self._fed[self._region : self._shown])
        return []

    def _after_mark(self, name: str, kind: str) -> int:
        """Where the mark ends that opens or closes a region, if it is in the answer."""
        field = self._template["fields"][name]
        marks = field.get(kind, [])
        pattern = field.get(f"{kind}_pattern") or "|".join(map(re.escape, [marks] if isinstance(marks, str) else marks))
        match = re.compile(pattern, re.DOTALL).match(self._fed, self._shown) if pattern else None
        return self._shown if match is None else match.end()

    def _calls(self, value: Any, written: str) -> list[Piece]:
        """The calls of a region; its text if it calls anything but the request's tools."""
        calls: list[Piece] = []
        for call in value if isinstance(value, list) else [value]:
            function = call.get("function", call) if isinstance(call, Mapping) else {}
            name = function.get("name")
            arguments = function.get("arguments")
            arguments = {} if arguments in (None, "") else arguments
            if isinstance(arguments, str):
                arguments = json.loads(arguments)
            if not isinstance(name, str) or name not in self.tools or not isinstance(arguments, dict):
                return [written]
            calls += [Call(name), Arguments(dumped(arguments)), Ended()]
        return calls
