"""Documents for the recall network, the questions asked of them, and the only right answers."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from nanovllm.errors import RequestError
from nanovllm.recall.words import FIRST_WORD_ID


def make_document(vocab_size: int, length: int, seed: int = 0) -> list[int]:
    """`length` distinct token ids of ordinary words: the start of a random permutation of the vocabulary."""
    words = vocab_size - FIRST_WORD_ID
    if not 1 <= length <= words:
        raise RequestError(
            f"a document of {length} tokens: it must have between 1 and {words}, the distinct words of a"
            f" vocabulary of {vocab_size}"
        )
    return random.Random(seed).sample(range(FIRST_WORD_ID, vocab_size), length)


def make_prompt(document: Sequence[int], position: int) -> list[int]:
    """The prompt whose answer starts at `document[position]`: the document, then the token before there."""
    _check_position(document, position, 1)
    return [*document, document[position - 1]]


def expected_answer(document: Sequence[int], position: int, count: int) -> list[int]:
    """The `count` tokens that the network must generate for `make_prompt(document, position)`."""
    _check_position(document, position, count)
    return list(document[position : position + count])


def notable_positions(
    length: int, answer_tokens: int, pieces: Mapping[str, int], max_edges: int | None = None
) -> dict[int, str]:
    """Positions of a document of `length` tokens where a mistake would show, in order, with what is there.

    Position 1, the middle and the end; and for pieces of each named size ("block", "chunk") the last token
    before and the first after the edges between them: all edges, or `max_edges` evenly spread. Positions with
    less than `answer_tokens` tokens of document from there on are left out.
    Errors: RequestError for a document without room for any answer.
    """
    last = length - answer_tokens
    if last < 1:
        raise RequestError(
            f"a document of {length} tokens has no room for an answer of {answer_tokens}: it must"
            f" have at least {answer_tokens + 1}"
        )
    places = {1: "start", length // 2: "middle", last: "end"}
    for name, size in pieces.items():
        for edge in _spread((length - 1) // size, max_edges):
            places.setdefault(edge * size - 1, f"last token of {name} {edge - 1}")
            places.setdefault(edge * size, f"first token of {name} {edge}")
    return {position: places[position] for position in sorted(places) if 1 <= position <= last}


def _spread(count: int, limit: int | None) -> list[int]:
    """At most `limit` of 1..count, evenly spread, both ends included."""
    if limit is None or count <= limit:
        return list(range(1, count + 1))
    return [1 + round(i * (count - 1) / max(limit - 1, 1)) for i in range(limit)]


def _check_position(document: Sequence[int], position: int, count: int) -> None:
    last = len(document) - count
    if count < 1 or not 1 <= position <= last:
        raise RequestError(
            f"{count} tokens at position {position} of a document of {len(document)}: ask for at least one,"
            f" at a position from 1 to {last}; position 0 follows no token, and nothing follows the last one"
        )
