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
from decimal import Decimal
from typing import Any

import pytest
from fuzz.schema_cases import TEXTS, WHOLE, Maker
from schema_masks import BYTES, LONGEST, allows, compiled, drawn

from nanovllm.errors import RequestError
from nanovllm.features.structured_outputs import schemas
from nanovllm.features.structured_outputs.grammars import WHITESPACE, matcher_of

pytestmark = pytest.mark.slow
TIMES = int(os.environ.get("FUZZ_TIMES", "1"))


def refusal(error: RequestError) -> str:
    return re.sub(
        r"[=:'\"\[{/].*", "", re.sub(r"^at [0-9()]+: ", "", str(error)).split("<non-verbose/>")[0], flags=re.S
    )[:40].strip()


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
        counts["schemas"] += 1
        try:
            start, judge = compiled(text, WHITESPACE if seed % 2 else None)
        except RequestError as error:
            refused[refusal(error)] += 1
            continue
        counts["compiled"] += 1
        for _ in range(4):
            output = drawn(start, rng)
            if output is None:
                counts["outputs without an end"] += 1
                continue
            counts["outputs judged"] += 1
            error = judge(output.decode())
            if error is not None:
                wrong.append((seed, text, output, error))
    print(dict(counts), refused.most_common())
    assert not wrong, f"{len(wrong)}: {wrong[:4]}"
    assert counts["outputs judged"] > counts["schemas"]


def mutated(value: Any, rng: random.Random) -> Any:
    """The value with one of its parts replaced by another of the same kind."""
    if value == {}:
        return value  # it may be closed
    if isinstance(value, dict):
        name = rng.choice(list(value))
        return value | {name: mutated(value[name], rng)}
    if isinstance(value, list) and value and rng.random() < 0.8:
        index = rng.randrange(len(value))
        return [*value[:index], mutated(value[index], rng), *value[index + 1 :]]
    if isinstance(value, list):
        return [*value, 1]
    if isinstance(value, str):
        return rng.choice((*TEXTS, value + "a", value[:-1]))
    if isinstance(value, bool) or value is None:
        return rng.choice((True, False, None))
    shortest = value.normalize() if isinstance(value, Decimal) else value  # the library has no -0.70 from -1 on
    return rng.choice((*WHOLE[:10], shortest + 1, -shortest, Decimal("0.5"), Decimal("-2.75"), Decimal("99.99")))


UNJUDGED = re.compile(r'"(format|oneOf|pattern)"|-0\.0')  # the masks enforce more, or the judge knows less


def test_valid_values_are_allowed() -> None:
    """Outputs that have been changed, wherever the user's schema still allows them."""
    counts: Counter[str] = Counter()
    wrong = []
    for seed in range(200 * TIMES):
        rng = random.Random(seed + 1_000_000)
        schema = Maker(rng).document()
        text = json.dumps(schema)
        if UNJUDGED.search(text):
            continue
        try:
            start, judge = compiled(text)
        except RequestError:
            continue
        counts["schemas"] += 1
        outputs = [output for output in (drawn(start, rng) for _ in range(3)) if output is not None]
        for output in outputs:
            for _ in range(6):
                try:
                    value = mutated(exact(output), rng)
                    written = schemas.write_json(value)
                except ArithmeticError:
                    continue
                if len(written) < LONGEST and judge(written) is None:
                    counts["valid values"] += 1
                    if not allows(start, written):
                        wrong.append((seed, text, written))
    print(dict(counts))
    assert not wrong, f"{len(wrong)}: {wrong[:4]}"
    assert counts["valid values"] > counts["schemas"]


class Expression:
    """Random regular expressions that Python and Rust mean alike, the same as Lark and GBNF, and texts that match."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def make(self, depth: int) -> tuple[str, str, str]:
        """As a regular expression, in Lark and in GBNF."""
        kind = self.rng.randrange(7 if depth else 3)
        if kind == 0:
            text = self.rng.choice(("a", "b", "ab", "é", "0", "-", " "))
            return re.escape(text), json.dumps(text, ensure_ascii=False), json.dumps(text, ensure_ascii=False)
        if kind < 3:
            some = self.rng.choice(("[a-c]", "[0-9]", "[^a]", "[ab0-]", '[^"]', "[^-a]"))
            return some, f"/{some}/", some
        parts = [self.make(depth - 1) for _ in range(self.rng.randint(2, 3))]
        if kind == 3:
            pattern, lark, gbnf = (" | ".join(each) for each in zip(*parts, strict=True))
            return f"(?:{pattern.replace(' | ', '|')})", f"({lark})", f"({gbnf})"
        if kind == 4:
            low = self.rng.randrange(3)
            often = f"{{{low},{low + self.rng.randrange(3)}}}"
            pattern, lark, gbnf = parts[0]
            return f"(?:{pattern}){often}", f"({lark}){often}", f"({gbnf}){often}"
        if kind == 5:
            often = self.rng.choice("?*+")
            pattern, lark, gbnf = parts[0]
            return f"(?:{pattern}){often}", f"({lark}){often}", f"({gbnf}){often}"
        pattern, lark, gbnf = (" ".join(each) for each in zip(*parts, strict=True))
        return "".join(part[0] for part in parts), lark, gbnf


def test_outputs_of_patterns_and_grammars_match() -> None:
    """One language as a regular expression, in Lark and in GBNF: Python's `re` judges all three, both ways."""
    counts: Counter[str] = Counter()
    wrong = []
    for seed in range(150 * TIMES):
        rng = random.Random(seed + 2_000_000)
        pattern, lark, gbnf = Expression(rng).make(3)
        judge = re.compile(pattern)
        texts = ["".join(rng.choice('ab0-é 1"\n') for _ in range(rng.randrange(6))) for _ in range(20)]
        kinds = (("regex", pattern), ("grammar", f"start: {lark}"), ("grammar", f"root ::= {gbnf}"))
        for kind, text in kinds:
            try:
                start = matcher_of(BYTES, kind, text, {})
            except RequestError as error:
                counts[f"refused: {refusal(error)}"] += 1
                continue
            counts["compiled"] += 1
            outputs = [output.decode() for output in (drawn(start, rng) for _ in range(3)) if output is not None]
            counts["outputs judged"] += len(outputs)
            wrong += [(text, output) for output in outputs if not judge.fullmatch(output)]
            counts["texts compared"] += len(texts)
            wrong += [(text, each) for each in texts if allows(start, each) != bool(judge.fullmatch(each))]
    print(dict(counts))
    assert not wrong, f"{len(wrong)}: {wrong[:4]}"
    assert counts["outputs judged"] > 100


def test_outputs_of_patterns_in_schemas_match() -> None:
    """`re` judges the text of a string with a pattern that is found anywhere in it or anchored."""
    counts: Counter[str] = Counter()
    wrong = []
    for seed in range(100 * TIMES):
        rng = random.Random(seed + 3_000_000)
        pattern = rng.choice(("", "^")) + Expression(rng).make(2)[0] + rng.choice(("", "$"))
        judge = re.compile(pattern.replace("$", r"\Z"))
        try:
            start, _ = compiled({"type": "string", "pattern": pattern})
        except RequestError as error:
            counts[f"refused: {refusal(error)}"] += 1
            continue
        counts["compiled"] += 1
        for output in (drawn(start, rng) for _ in range(3)):
            if output is not None:
                counts["outputs judged"] += 1
                if not judge.search(json.loads(output)):
                    wrong.append((pattern, output))
        for _ in range(20):
            text = "".join(rng.choice('ab0-é 1"') for _ in range(rng.randrange(6)))
            counts["texts compared"] += 1
            if allows(start, json.dumps(text, ensure_ascii=False)) != bool(judge.search(text)):
                wrong.append((pattern, text))
    print(dict(counts))
    assert not wrong, f"{len(wrong)}: {wrong[:4]}"
    assert counts["outputs judged"] > 100
