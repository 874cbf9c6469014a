"""What an answer is made of: content, reasoning, and calls, as they are written, and the message that they make."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

MISTRAL_ID = 9  # characters: templates of Mistral take no other identifiers


class Reasoning(NamedTuple):
    """Text of a model's thinking."""

    text: str


class Call(NamedTuple):
    """A call begins. The name is one of the request's tools."""

    name: str


class Arguments(NamedTuple):
    """The next part of a call's arguments. Those of a complete call, joined, are a JSON object."""

    text: str


class Ended(NamedTuple):
    """The call is complete."""


class Broken(NamedTuple):
    """The call turned out to be none. raw: all that was written of it; unsent: the part that no piece has shown."""

    raw: str
    unsent: str


Piece = str | Reasoning | Call | Arguments | Ended | Broken  # text is content


def merged(pieces: Iterable[Piece]) -> list[Piece]:
    """The pieces with neighbours of the same kind as one."""
    joined: list[Piece] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if isinstance(piece, str) and isinstance(last, str):
            joined[-1] = last + piece
        elif isinstance(piece, Arguments) and isinstance(last, Arguments):
            joined[-1] = Arguments(last.text + piece.text)
        elif isinstance(piece, Reasoning) and isinstance(last, Reasoning):
            joined[-1] = Reasoning(last.text + piece.text)
        else:
            joined.append(piece)
    return [piece for piece in joined if piece != ""]


@dataclass(slots=True)
class FoundCall:
    """A call of a finished answer. is_complete: its arguments are a JSON object."""

    name: str
    arguments: str = ""
    is_complete: bool = False


@dataclass(slots=True)
class Assembled:
    """A finished answer."""

    content: str = ""
    reasoning: str = ""
    calls: list[FoundCall] = field(default_factory=list)

    def fields(self, form: str | None) -> dict[str, Any]:
        """The fields of an assistant's message, as OpenAI's and vLLM's."""
        empty = bool(self.calls) and not self.content.strip()
        message: dict[str, Any] = {"role": "assistant", "content": None if empty else self.content, "refusal": None}
        if self.reasoning:
            message["reasoning"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [
                {
                    "id": new_call_id(form),
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in self.calls
            ]
        return message


def assembled(pieces: Iterable[Piece], *, only_first: bool = False, keeps_broken: bool = False) -> Assembled:
    """The answer that the pieces make. What is no complete call is content, as it was written.

    only_first: other calls are left out. keeps_broken: a call that ends before its arguments do is a call, as where
    `tool_choice` forces one.
    """
    answer = Assembled()
    call: FoundCall | None = None
    for piece in pieces:
        if isinstance(piece, str):
            answer.content += piece
        elif isinstance(piece, Reasoning):
            answer.reasoning += piece.text
        elif isinstance(piece, Call):
            call = FoundCall(piece.name)
        elif isinstance(piece, Arguments):
            assert call is not None
            call.arguments += piece.text
        elif call is not None and (isinstance(piece, Ended) or keeps_broken):
            call.is_complete = isinstance(piece, Ended)
            answer.calls += [] if only_first and answer.calls else [call]
        elif isinstance(piece, Broken):
            answer.content += piece.raw
    return answer


def new_call_id(form: str | None) -> str:
    """An identifier for a call; form: the format in which a template will write it."""
    return uuid.uuid4().hex[:MISTRAL_ID] if form == "mistral" else f"call_{uuid.uuid4().hex}"
