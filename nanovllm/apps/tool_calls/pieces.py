"""What an answer is made of: content, reasoning, and calls, in the order in which they are written."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


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
