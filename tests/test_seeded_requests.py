"""A request's tokens and log-probabilities depend on nothing but the request, whatever happens around it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

import pytest
from checkpoints import checkpoint_fixture
from engines import offloaded

from nanovllm import LLM, SamplingParams
from nanovllm.outputs import Logprob

VOCAB = 83
REQUESTS = 40
BLOCK = 16
Answer = tuple[list[int], list[Mapping[int, Logprob]] | None, list[Mapping[int, Logprob] | None] | None]

WAYS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.7, "top_k": 10},
    {"top_p": 0.8, "logprobs": 2},
    {"min_p": 0.1, "prompt_logprobs": 1},
    {"temperature": 1.5, "top_k": 30, "top_p": 0.9, "min_p": 0.02, "logprobs": 0},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.5},
    {"temperature": 0.0, "repetition_penalty": 1.2, "presence_penalty": 1.0, "logprobs": 5},
    {"logit_bias": {3: 4.0, 9: -100.0}, "min_tokens": 5, "prompt_logprobs": 3},
    {"top_k": 5, "presence_penalty": -1.0, "stop_token_ids": [1, 2, 3, 4, 5, 6], "min_tokens": 3},
]


def requests() -> list[tuple[list[int], SamplingParams]]:
    """Prompts of 1 to 40 tokens, half of them with a beginning in common; every way of choosing a token."""
    random = Random(17)
    found = []
    shared = [random.randrange(VOCAB) for _ in range(40)]
    for index in range(REQUESTS):
        own = [random.randrange(VOCAB) for _ in range(random.randint(1, 30))]
        prompt = (shared[: random.randint(1, 39)] + own)[:40] if index % 2 else own
        way = WAYS[index % len(WAYS)]
        found.append((prompt, SamplingParams(seed=random.randrange(2**40), max_tokens=random.randint(5, 7), **way)))
    return found


def answers(llm: LLM, batch: list[tuple[list[int], SamplingParams]]) -> list[Answer]:
    outputs = llm.generate([prompt for prompt, _ in batch], [params for _, params in batch], use_tqdm=False)
    return [(out.outputs[0].token_ids, out.outputs[0].logprobs, out.prompt_logprobs) for out in outputs]


model_dir = checkpoint_fixture(
    vocab=VOCAB, layers=1, hidden=32, intermediate=48, heads=2, kv_heads=1, eos_token_id=[7, 8]
)


@pytest.fixture(scope="module")
def alone(model_dir: Path) -> list[Answer]:
    """Each request in a step of its own, with nothing cached."""
    with LLM(model_dir, kvcache_block_size=BLOCK, num_gpu_blocks=8, enable_prefix_caching=False) as llm:
        return [answers(llm, [request])[0] for request in requests()]


TOGETHER: dict[str, dict[str, Any]] = {
    "all at once": {"num_gpu_blocks": 400},
    "preempted": {"num_gpu_blocks": 14, "max_num_batched_tokens": 60},
    "offloaded": offloaded(BLOCK, 5, 40, max_num_batched_tokens=150),
}


@pytest.mark.parametrize("name", TOGETHER)
def test_seeded_requests(name: str, model_dir: Path, alone: list[Answer]) -> None:
    batch = requests()
    order = Random(3).sample(range(REQUESTS), REQUESTS)
    with LLM(model_dir, **{"kvcache_block_size": BLOCK, **TOGETHER[name]}) as llm:
        cold = answers(llm, batch)
        assert [i for i in range(REQUESTS) if cold[i] != alone[i]] == [], "cache cold"
        warm = answers(llm, [batch[i] for i in order])
        assert [i for i, answer in zip(order, warm, strict=True) if answer != alone[i]] == [], "shuffled, cache warm"
        assert llm.engine.scheduler.preemption.stats.total > 0 or name != "preempted"
        assert llm.prefix_cache_stats().hit_tokens > 0
        assert (llm.kv_stats().transfers.h2d_bytes > 0) == (name == "offloaded")


def test_the_requests_are_worth_comparing(alone: list[Answer]) -> None:
    """Different requests differ, and every way of ending and reporting occurs."""
    tokens = [tuple(answer[0]) for answer in alone]
    assert len(set(tokens)) > 0.9 * REQUESTS
    assert sum(logprobs is not None for _, logprobs, _ in alone) == 0.3 * REQUESTS
    lengths = [params.max_tokens for _, params in requests()]
    ended_early = [len(answer) < length for answer, length in zip(tokens, lengths, strict=True) if length]
    assert 1 < sum(ended_early) < REQUESTS
