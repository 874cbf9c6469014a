"""Random requests with every feature, what they are to answer, and what an engine said of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from nanovllm import LLM, SamplingParams
from nanovllm.outputs import CompletionOutput, RequestOutput, RequestOutputKind

VOCAB = 300
MAX_MODEL_LEN = 160
LOGPROB_TOLERANCE = 1e-3
GRAMMARS: list[dict[str, Any]] = [
    {"regex": "[a-z]{3,30}"},
    {"choice": ["日本", "in the", "zz"]},
    {"json_object": True},
    {"grammar": 'start: "[" item ("," item)* "]"\nitem: /[a-e]/ | start'},
]
WORDS = ["a", "th", " a", "in", "é", "zz", "日本"]


@dataclass
class Asked:
    """A request: its prompt, its parameters, and all that its outputs said so far."""

    prompt: list[int]
    params: SamplingParams
    salt: str | None
    priority: int
    pieces: dict[int, CompletionOutput] = field(default_factory=dict)
    prompt_logprobs: list[Any] = field(default_factory=list)
    last: RequestOutput | None = None

    def hear(self, output: RequestOutput) -> None:
        """Take an output in, whatever its kind."""
        self.last = output
        is_delta = self.params.output_kind is RequestOutputKind.DELTA
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = [*self.prompt_logprobs * is_delta, *output.prompt_logprobs]
        for new in output.outputs:
            old = self.pieces.get(new.index)
            if is_delta and old is not None:
                logprobs = None if new.logprobs is None else [*(old.logprobs or []), *new.logprobs]
                new = replace(new, text=old.text + new.text, token_ids=old.token_ids + new.token_ids, logprobs=logprobs)
            self.pieces[new.index] = new

    @property
    def is_cut(self) -> bool:
        """Whether it was aborted or failed, and so has no more than a beginning."""
        return any(piece.finish_reason in ("abort", "error") for piece in self.pieces.values())


def random_request(random: Random, beginnings: list[list[int]]) -> Asked:
    """A prompt, often with the beginning of others, and parameters of any kind that go together."""
    prompt = [random.randrange(VOCAB - 20) for _ in range(random.choice([1, 3, 15, 16, 17, 33, 50]))]
    if random.random() < 0.5:
        beginning = random.choice(beginnings)
        prompt = beginning[: random.choice([15, 16, 23, 32, 40, len(beginning)])] + prompt[: random.choice([1, 5, 20])]
    return Asked(
        prompt[: MAX_MODEL_LEN - 1],
        _parameters(random),
        random.choice([None, None, None, "salt", "pepper"]),
        random.choice([0, 0, 0, 1, -1]),
    )


def _parameters(random: Random) -> SamplingParams:
    params: dict[str, Any] = {
        "max_tokens": random.choice([1, 2, 8, 20, 40, None]),
        "seed": random.randrange(10**6),
        "output_kind": random.choice(list(RequestOutputKind)),
        "ignore_eos": random.random() < 0.8,
    }
    kind = random.random()
    if kind < 0.12:
        params |= {"use_beam_search": True, "n": random.choice([2, 3]), "temperature": 0.0, "max_tokens": 10}
        params |= {"length_penalty": random.choice([0.5, 1.0, 2.0]), "early_stopping": random.choice([True, False])}
    elif kind < 0.4:
        params["temperature"] = 0.0
    else:
        params |= {"temperature": random.choice([0.3, 1.0, 2.0]), "top_k": random.choice([0, 0, 5, 50])}
        params |= {"top_p": random.choice([1.0, 0.9, 0.3]), "min_p": random.choice([0.0, 0.05])}
        params["n"] = random.choice([1, 1, 1, 2, 3])
        params["best_of"] = params["n"] + 1 if random.random() < 0.2 else None
    if not params.get("use_beam_search"):
        params |= _adjustments(random)
    if random.random() < 0.25:
        params["logprobs"] = random.choice([0, 1, 5])
    if random.random() < 0.2:
        params["prompt_logprobs"] = random.choice([0, 2])
    if random.random() < 0.1 and params.get("n", 1) == 1 and not params.get("best_of"):
        params |= {"max_tokens": 0, "prompt_logprobs": 1}
    if random.random() < 0.3:
        params["stop_token_ids"] = random.sample(range(VOCAB), random.choice([1, 40]))
    if random.random() < 0.2:
        most = params["max_tokens"]
        params["min_tokens"] = min(random.choice([1, 5]), 5 if most is None else most)
    return SamplingParams(**params)


def _adjustments(random: Random) -> dict[str, Any]:
    params: dict[str, Any] = {}
    if random.random() < 0.25:
        params["repetition_penalty"] = random.choice([0.8, 1.3])
    if random.random() < 0.25:
        params |= {"frequency_penalty": random.choice([-0.5, 0.7]), "presence_penalty": random.choice([0.0, 0.6])}
    if random.random() < 0.25:
        params["logit_bias"] = {random.randrange(VOCAB): random.choice([2.0, -5.0, -math.inf]) for _ in range(5)}
    if random.random() < 0.2:
        params["bad_words"] = random.sample(WORDS, 2)
    if random.random() < 0.1:
        params["allowed_token_ids"] = random.sample(range(VOCAB), 40)
    if random.random() < 0.15:
        params["structured_outputs"] = random.choice(GRAMMARS)
        params["ignore_eos"] = False
    if random.random() < 0.3:
        params["stop"] = random.sample(WORDS, 2)
        params["include_stop_str_in_output"] = random.random() < 0.5
    return params


# ---- what it should have said


def answer_alone(llm: LLM, asked: Asked) -> RequestOutput:
    """What an engine says that has nothing else to do, and no cache."""
    return llm.generate(asked.prompt, replace(asked.params), use_tqdm=False)[0]


def difference(asked: Asked, expected: RequestOutput) -> str | None:
    """What is wrong with what was heard, in a sentence; None if nothing is."""
    if asked.last is None or not asked.last.finished:
        return "the request never ended"
    if asked.is_cut and (asked.params.use_beam_search or asked.params.num_sequences > asked.params.n):
        return None  # which sequences are the best shows in the end only
    if not asked.is_cut and len(asked.pieces) != len(expected.outputs):
        return f"{len(asked.pieces)} sequences instead of {len(expected.outputs)}"
    for whole in expected.outputs:
        heard = asked.pieces.get(whole.index)
        if heard is not None and (wrong := _difference_of(heard, whole)) is not None:
            return f"sequence {whole.index}: {wrong}"
    return _difference_of_rows(asked.prompt_logprobs, expected.prompt_logprobs or [], "prompt_logprobs")


def _difference_of(heard: CompletionOutput, whole: CompletionOutput) -> str | None:
    count = len(heard.token_ids)
    is_cut = heard.finish_reason in ("abort", "error")
    if heard.token_ids != whole.token_ids[: count if is_cut else None]:
        return f"tokens {heard.token_ids} instead of {whole.token_ids}"
    if not is_cut and (heard.finish_reason, heard.stop_reason) != (whole.finish_reason, whole.stop_reason):
        return f"ended by {heard.finish_reason}, {heard.stop_reason} instead of {whole.finish_reason}"
    if not is_cut and heard.text != whole.text:
        return f"text {heard.text!r} instead of {whole.text!r}"
    return _difference_of_rows(heard.logprobs or [], whole.logprobs or [], "logprobs")


def _difference_of_rows(heard: list[Any], expected: list[Any], what: str) -> str | None:
    """Of what is there: a request that was cut has fewer rows."""
    for position, (row, other) in enumerate(zip(heard, expected, strict=False)):
        if (row is None) != (other is None) or (row is not None and not _is_like(row, other)):
            return f"{what} at {position}: {row} instead of {other}"
    return None


def _is_like(row: Mapping[int, Any], other: Mapping[int, Any]) -> bool:
    """The same values; of tokens that are as likely as each other, either may be named."""
    mine, others = (sorted(entry.logprob for entry in entries.values()) for entries in (row, other))
    return len(mine) == len(others) and all(
        math.isclose(a, b, rel_tol=0, abs_tol=LOGPROB_TOLERANCE) for a, b in zip(mine, others, strict=True)
    )
