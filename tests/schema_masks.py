"""Masks of schemas and grammars over a tokenizer of bytes: which texts they allow, and outputs drawn at random."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from nanovllm.features.structured_outputs.grammars import matcher_of, prepared

llguidance = pytest.importorskip("llguidance", reason="the package llguidance is not installed")
LONGEST = 400  # bytes of an output
BYTES = llguidance.LLTokenizer("byte")
ENDS = b'"}]0e'  # bytes that bring an output to its end


def compiled(schema: Any, whitespace: str | None = None) -> tuple[Any, Callable[[str], str | None]]:
    """The matcher of a schema before its first byte, and what judges outputs. Raises RequestError."""
    text, judge = prepared(schema if isinstance(schema, str) else json.dumps(schema), False)
    options: dict[str, Any] = {"whitespace_flexible": whitespace is not None, "coerce_one_of": True}
    if whitespace is not None:
        options["whitespace_pattern"] = whitespace
    return matcher_of(BYTES, "json", text, options), judge


def drawn(start: Any, rng: random.Random) -> bytes | None:
    """A random output that has ended; None if it has not by then."""
    matcher = start.deep_copy()
    output = bytearray()
    while len(output) < LONGEST:
        accepting = matcher.is_accepting()
        if accepting and (rng.random() < 0.4 or matcher.is_stopped()):
            return bytes(output)
        bits = matcher.compute_bitmask()
        allowed = [token for token in range(256) if bits[token // 8] >> token % 8 & 1]
        if not allowed:
            return bytes(output) if accepting else None
        ending = [token for token in allowed if token in ENDS]
        hurry = len(output) / LONGEST
        plain = [token for token in allowed if 32 <= token < 127] or allowed
        choice = ending if ending and rng.random() < 0.3 + hurry else plain if rng.random() < 0.7 else allowed
        output.append(rng.choice(choice))
        if not matcher.consume_token(output[-1]):
            return None
    return None


def allows(start: Any, text: str) -> bool:
    matcher = start.deep_copy()
    data = list(text.encode())
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()
