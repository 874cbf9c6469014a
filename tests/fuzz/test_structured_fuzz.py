"""Structured outputs by random schemas, patterns and grammars: what the masks let through, judged independently.

Each is compiled as a request's is, for a tokenizer of bytes; outputs are drawn at random among the tokens that the
masks allow, and valid texts that are written independently must be allowed. `FUZZ_TIMES` multiplies the examples; the
counts are printed with `-s`.
"""

from __future__ import annotations

import json
import os
import random
import re
from collections import Counter
from typing import Any

import pytest
from fuzz.schema_cases import Maker

from nanovllm.errors import RequestError
from nanovllm.features.structured_outputs import prepared, schemas

llguidance = pytest.importorskip("llguidance", reason="the package llguidance is not installed")
jsonschema = pytest.importorskip("jsonschema", reason="the package jsonschema is not installed")

TIMES = int(os.environ.get("FUZZ_TIMES", "1"))
LONGEST = 400  # bytes of an output
BYTES = llguidance.LLTokenizer("byte")
ENDS = b'"}]0e'  # bytes that bring an output to its end


def compiled(kind: str, text: str, options: dict[str, Any]) -> Any:
    library = llguidance.LLMatcher
    if kind == "json":
        grammar = library.grammar_from_json_schema(text, defaults=options)
    else:
        grammar = llguidance.grammar_from(kind, text)
    matcher = library(BYTES, grammar, log_level=0, limits=llguidance.LLParserLimits(max_lexer_states=20_000, verbose_errors=False))
    if matcher.is_error():
        raise RequestError(matcher.get_error())
    return matcher


def drawn(start: Any, rng: random.Random) -> bytes | None:
    """A random output that has ended; None if it has not by then."""
    matcher, output = start.deep_copy(), bytearray()
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
    matcher, data = start.deep_copy(), list(text.encode())
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


def refusal(error: RequestError) -> str:
    return re.sub(r"[=:'\"\[{/].*", "", str(error).split("<non-verbose/>")[0], flags=re.S)[:40].strip()


def exact(text: bytes) -> Any:
    return schemas.read_json(text)


def test_outputs_of_schemas_are_valid() -> None:
    counts: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    wrong = []
    for seed in range(400 * TIMES):
        rng = random.Random(seed)
        schema = Maker(rng).document()
        text = json.dumps(schema)
        options: dict[str, Any] = {"whitespace_flexible": seed % 2 == 0}
        if seed % 2 == 0:
            options["whitespace_pattern"] = r"[ \t\n\r]{1,64}"
        counts["schemas"] += 1
        try:
            ready = prepared.prepare_schema(text, False, options)
            start = compiled(ready.kind, ready.text, options)
        except RequestError as error:
            refused[refusal(error)] += 1
            continue
        counts[f"compiled as {ready.kind}"] += 1
        for _ in range(4):
            output = drawn(start, rng)
            if output is None:
                counts["outputs without an end"] += 1
                continue
            counts["outputs judged"] += 1
            error = ready.check.error(output.decode())
            if error is not None:
                wrong.append((seed, text, output, error))
    print(dict(counts), refused.most_common())
    assert not wrong, f"{len(wrong)}: {wrong[:4]}"
    assert counts["outputs judged"] > counts["schemas"]
