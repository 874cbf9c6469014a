"""What tests of weights that stream share: budgets by the number of streamed layers, and all that requests answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint
from engines import random_prompt, token_ids

from nanovllm import LLM, SamplingParams
from nanovllm.data.network import WeightSizes
from nanovllm.device import cpu
from nanovllm.features.streamed_weights.stream import WeightStream
from nanovllm.memory.weights import CACHE_SHARE, LEAST_ROWS, WeightPlan, spread
from nanovllm.models.hf_config import load_network_config
from nanovllm.outputs import Logprob

VOCAB = 97
LENGTHS = (100, 33, 5)
PROMPTS = [random_prompt(length, VOCAB, seed=length) for length in LENGTHS]
MAX_TOKENS = 7
GREEDY = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=3)
PARAMS = [
    GREEDY,
    SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, prompt_logprobs=1),
    SamplingParams(temperature=0.8, n=2, seed=5, max_tokens=4, ignore_eos=True, logprobs=1),
]


FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "gpt_oss": {"sliding_window": 24, "experts": 16},
    "qwen3_5": {},
    "gemma3": {"sliding_window": 24},
    "glm4_moe": {"experts": 16},
    "qwen3_moe": {"experts": 16},
}
Made = Callable[[str], Path]


def checkpoints(factory: pytest.TempPathFactory, layers: int) -> Made:
    """What gives the checkpoint of each of FAMILIES, which is made once."""

    @cache
    def of_family(family: str) -> Path:
        path = factory.mktemp(family)
        make_checkpoint(path, family, vocab=VOCAB, layers=layers, **FAMILIES[family])
        return path

    return of_family


@contextmanager
def failing_copies(fails_at: int) -> Iterator[None]:
    """Context in which this copy and all behind it fail."""
    copies = count(1)
    copy_pitched = cpu.copy_pitched

    def broken(*given: Any, **named: Any) -> None:
        if next(copies) >= fails_at:
            raise OSError("the link is down")
        copy_pitched(*given, **named)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(cpu, "copy_pitched", broken)
        yield


def interrupt_each_copy(llm: LLM, prompt: list[list[int]], params: SamplingParams, copies: Iterable[int]) -> None:
    """Ctrl-C comes in one of the copies, each in turn, and afterwards the tokens are what they were before."""
    expected = token_ids(llm, prompt, params)
    device = stream_of(llm)._device
    copy_2d = device.copy_2d
    for stops_at in copies:
        counted = count(1)

        def interrupted(*given: Any, counted: Iterator[int] = counted, stops_at: int = stops_at) -> int:
            if next(counted) == stops_at:
                raise KeyboardInterrupt
            return copy_2d(*given)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(device, "copy_2d", interrupted)
            with pytest.raises(KeyboardInterrupt):
                llm.generate(prompt, params, use_tqdm=False)
        assert token_ids(llm, prompt, params) == expected


def weight_sizes(path: Path, dtype: str = "float32") -> WeightSizes:
    return load_network_config(path).on_meta(dtype).network.weights


def budget(sizes: WeightSizes, count: int) -> int:
    """`weights_memory_bytes` with which so many layers stream, the least beside a cache of its usual size."""
    plan = WeightPlan(sizes, spread(count, len(sizes.stored_bytes)))
    least = LEAST_ROWS * sizes.experts_per_token
    return replace(plan, cached_experts=max(plan.num_streamed_experts // CACHE_SHARE, least)).device_bytes


def stream_of(llm: LLM) -> WeightStream:
    """The stream of weights of an engine of one process, which has one."""
    stream = llm._runner.model.layer_weights
    assert isinstance(stream, WeightStream)
    return stream


def bits(positions: Iterable[Mapping[int, Logprob] | None]) -> list[Any]:
    return [(token, found.logprob) for position in positions for token, found in (position or {}).items()]


def answers(llm: LLM, params: list[SamplingParams] = PARAMS, **given: Any) -> list[Any]:
    """Tokens and the bits of log-probabilities, of every prompt with all parameters at once."""
    prompts = [prompt for prompt in PROMPTS for _ in params]
    outputs = llm.generate(prompts, params * len(PROMPTS), use_tqdm=False, **given)
    assert llm.metrics().blocks.used == 0
    return [
        (bits(output.prompt_logprobs or ()), [(one.token_ids, bits(one.logprobs or ())) for one in output.outputs])
        for output in outputs
    ]
