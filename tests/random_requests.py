"""Random engines and requests of every kind, driven by steps with aborts and failures; what they should say."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import pytest
from block_helpers import check_blocks

from nanovllm import LLM, EngineClient, SamplingParams
from nanovllm.errors import EngineError, RequestError
from nanovllm.outputs import CompletionOutput, RequestOutput, RequestOutputKind
from nanovllm.text.prompts import PromptParts

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
BLOCK = 16
BLOCK_GIB = 2 * 2 * 2 * BLOCK * 16 * 4 / 2**30  # layers, K and V, heads, tokens, head size, float32


# ---- random requests


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
    salt = random.choice([None, None, None, "salt", "pepper"])
    priority = random.choice([0, 0, 0, 1, -1])
    return Asked(prompt[: MAX_MODEL_LEN - 1], _parameters(random), salt, priority)


def _beams(random: Random) -> dict[str, Any]:
    search = {"use_beam_search": True, "n": random.choice([2, 3]), "temperature": 0.0, "max_tokens": 10}
    return {**search, "length_penalty": random.choice([0.5, 2.0]), "early_stopping": random.choice([True, False])}


def _draws(random: Random) -> dict[str, Any]:
    n = random.choice([1, 1, 1, 2, 3])
    return {
        "temperature": random.choice([0.3, 1.0, 2.0]),
        "top_k": random.choice([0, 0, 5, 50]),
        "top_p": random.choice([1.0, 0.9, 0.3]),
        "min_p": random.choice([0.0, 0.05]),
        "n": n,
        "best_of": n + 1 if random.random() < 0.2 else None,
    }


# How often a request has these parameters. A beam search has none of ADJUSTMENTS.
ADJUSTMENTS: list[tuple[float, Callable[[Random], dict[str, Any]]]] = [
    (0.25, lambda random: {"repetition_penalty": random.choice([0.8, 1.3])}),
    (0.25, lambda random: {"frequency_penalty": random.choice([-0.5, 0.7]), "presence_penalty": 0.6}),
    (0.25, lambda random: {"logit_bias": {random.randrange(VOCAB): random.choice([2.0, -5.0, -math.inf])}}),
    (0.2, lambda random: {"bad_words": random.sample(WORDS, 2)}),
    (0.1, lambda random: {"allowed_token_ids": random.sample(range(VOCAB), 40)}),
    (0.15, lambda random: {"structured_outputs": random.choice(GRAMMARS), "ignore_eos": False}),
    (0.3, lambda random: {"stop": random.sample(WORDS, 2), "include_stop_str_in_output": random.random() < 0.5}),
]
OTHERS: list[tuple[float, Callable[[Random], dict[str, Any]]]] = [
    (0.25, lambda random: {"logprobs": random.choice([0, 1, 5])}),
    (0.2, lambda random: {"prompt_logprobs": random.choice([0, 2])}),
    (0.3, lambda random: {"stop_token_ids": random.sample(range(VOCAB), random.choice([1, 40]))}),
    (0.2, lambda random: {"min_tokens": 1}),
]


def _parameters(random: Random) -> SamplingParams:
    params: dict[str, Any] = {
        "max_tokens": random.choice([1, 2, 8, 20, 40, None]),
        "seed": random.randrange(10**6),
        "output_kind": random.choice(list(RequestOutputKind)),
        "ignore_eos": random.random() < 0.8,
    }
    kind = random.choice([_beams, _draws, _draws, _draws, lambda random: {"temperature": 0.0}])
    params |= kind(random)
    for rate, made in [*OTHERS, *(ADJUSTMENTS if kind is not _beams else ())]:
        if random.random() < rate:
            params |= made(random)
    if random.random() < 0.1 and params.get("n", 1) == 1 and not params.get("best_of"):
        params |= {"max_tokens": 0, "prompt_logprobs": 1, "min_tokens": 0}
    return SamplingParams(**params)


# ---- what it should have said


def difference(asked: Asked, expected: RequestOutput) -> str | None:
    """What is wrong with what was heard, in a sentence; None if nothing is. A request that was cut has a part of it."""
    if asked.last is None or not asked.last.finished:
        return "the request never ended"
    if asked.is_cut and (asked.params.use_beam_search or asked.params.num_sequences > asked.params.n):
        return None  # which sequences are the best shows in the end only
    if not asked.is_cut and len(asked.pieces) != len(expected.outputs):
        return f"{len(asked.pieces)} sequences instead of {len(expected.outputs)}"
    pairs = [(asked.prompt_logprobs, expected.prompt_logprobs or [])]
    for whole in expected.outputs:
        heard = asked.pieces.get(whole.index)
        if heard is None:
            continue
        is_cut = heard.finish_reason in ("abort", "error")
        if heard.token_ids != whole.token_ids[: len(heard.token_ids) if is_cut else None]:
            return f"sequence {whole.index}: tokens {heard.token_ids} instead of {whole.token_ids}"
        actual, wanted = ((each.finish_reason, each.stop_reason, each.text) for each in (heard, whole))
        if not is_cut and actual != wanted:
            return f"sequence {whole.index}: end and text {actual} instead of {wanted}"
        pairs.append((heard.logprobs or [], whole.logprobs or []))
    rows = [rows for pair in pairs for rows in zip(*pair, strict=False)]
    return next(
        (f"log-probabilities {row} instead of {other}" for row, other in rows if not _is_like(row, other)), None
    )


def _is_like(row: Mapping[int, Any] | None, other: Mapping[int, Any] | None) -> bool:
    """The same values; of tokens that are as likely as each other, either may be named."""
    mine, others = (sorted(entry.logprob for entry in (entries or {}).values()) for entries in (row, other))
    return mine == pytest.approx(others, rel=0, abs=LOGPROB_TOLERANCE)


# ---- an engine and its requests


class Interruption:
    """Makes steps fail or be interrupted, before or after they have computed."""

    def __init__(self, llm: LLM, random: Random, rate: float) -> None:
        self._execute = llm.engine.executor.execute
        self._random = random
        self._rate = rate
        llm.engine.executor.execute = self  # type: ignore[method-assign, assignment]

    def __call__(self, batch: Any) -> Any:
        hit = self._random.random()
        error = self._random.choice([RuntimeError("a step that fails"), KeyboardInterrupt()])
        if hit < self._rate / 2:
            raise error
        result = self._execute(batch)
        if hit < self._rate:
            raise error
        return result


class Driver:
    """One engine and its requests."""

    def __init__(self, llm: LLM, random: Random, num_requests: int, new_request: Callable[[], Asked]) -> None:
        self.llm = llm
        self.client = EngineClient(llm.engine)
        self._random = random
        self._new_request = new_request
        self.asked: dict[str, Asked] = {}
        self._left = num_requests
        self._abort_rate = random.choice([0.0, 0.02, 0.1])
        Interruption(llm, random, random.choice([0.0, 0.0, 0.02]))

    def go_on(self) -> bool:
        """Add, step or abort; whether there is more to do."""
        engine = self.llm.engine
        while self._left and self._random.random() < 0.6:
            self._left -= 1
            self._add()
        running = [name for name, asked in self.asked.items() if asked.last is None or not asked.last.finished]
        if running and self._random.random() < self._abort_rate:
            self._abort(self._random.choice(running))
        if self._random.random() < 0.005:
            engine.reset_prefix_cache()
        if engine.has_unfinished_requests():
            self._step()
        return self._left > 0 or engine.has_unfinished_requests()

    def _add(self) -> None:
        name = f"{len(self.asked)}"
        asked = self._new_request()
        try:
            parts = PromptParts(None, asked.prompt, asked.salt)
            self.client.add(self.llm.engine.make_request(name, parts, asked.params, priority=asked.priority))
        except RequestError:  # such as three sequences that cannot all be as long as they may become
            return
        self.asked[name] = asked

    def _abort(self, name: str) -> None:
        (output,) = self.client.abort([name])
        assert output.finished
        self.asked[name].hear(output)

    def _step(self) -> None:
        try:
            outputs: list[Any] = self.client.step()
        except EngineError as error:
            outputs = error.outputs
        except KeyboardInterrupt:
            outputs = []
            for name in self.client.pending:  # as `LLM.generate` ends its requests
                del self.asked[name]
            self.client.close()
        for output in outputs:
            self.asked[output.request_id].hear(output)

    def check_idle(self) -> str | None:
        """What is left of requests though none is: a sentence, or None."""
        engine = self.llm.engine
        manager = self.llm.engine.scheduler.block_manager
        check_blocks(manager)
        left = {
            "used blocks": manager.pool.num_used,
            "swapped blocks": manager.pool.num_swapped,
            "requests": engine._requests,
        }
        leftovers = [f"{what}: {value}" for what, value in left.items() if value]
        return ", ".join(leftovers) or None


def random_engine(random: Random) -> dict[str, Any]:
    """Engine arguments; memory for little more than one sequence up to plenty."""
    arguments: dict[str, Any] = {
        "dtype": "float32",
        "device": "cpu",
        "kvcache_block_size": BLOCK,
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": random.choice([4, 8, 16]),
        "max_num_batched_tokens": random.choice([16, 48, 256]),
        "enable_prefix_caching": random.random() < 0.8,
        "preemption_mode": random.choice([None, None, "swap", "recompute"]),
        "swap_space": random.choice([0.0, 12, 60]) * BLOCK_GIB,
        "long_prefill_token_threshold": random.choice([0, 0, 16]),
        "num_gpu_blocks": random.choice([12, 20, 60]),
    }
    if random.random() < 0.5:
        arguments |= {
            "enable_cpu_offload": True,
            "num_gpu_blocks": random.choice([4, 6, 16]),
            "num_cpu_blocks": random.choice([14, 24, 60]),
            "cpu_attention": random.random() < 0.7,
        }
    return arguments
