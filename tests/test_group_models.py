"""Requests of several sequences on real models: each answers as it would alone, whatever is shared or swapped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checkpoints import checkpoint_fixture
from engines import offloaded, random_prompt, token_ids
from ordering_check import OrderingCheck

from nanovllm import LLM, SamplingParams
from nanovllm.sampling_params import derived_seed

BLOCK = 16
VOCAB = 101


model_dir = checkpoint_fixture(vocab=VOCAB, seed=5, hidden=32, intermediate=32)


def sampled(count: int, max_tokens: int, seed: int, **others: Any) -> SamplingParams:
    return SamplingParams(n=count, max_tokens=max_tokens, temperature=1.0, seed=seed, ignore_eos=True, **others)


def derived(seed: int, index: int) -> int:
    return seed if index == 0 else derived_seed(seed, "sequence", index)


ENGINES: dict[str, dict[str, Any]] = {
    "resident": {"kvcache_block_size": BLOCK, "num_gpu_blocks": 100},
    "resident, swapped": {"kvcache_block_size": BLOCK, "num_gpu_blocks": 14},
    "resident, recomputed": {"kvcache_block_size": BLOCK, "num_gpu_blocks": 14, "preemption_mode": "recompute"},
    "offloaded": offloaded(BLOCK, 5, 80, max_num_batched_tokens=33),
    "offloaded, swapped": offloaded(BLOCK, 6, 10, max_num_batched_tokens=33),
    "offloaded, recomputed": offloaded(BLOCK, 6, 10, preemption_mode="recompute"),
}


PROMPTS = [random_prompt(length, VOCAB, seed=3) for length in (1, 15, 16, 37, 50)]


@pytest.fixture(scope="module")
def alone(model_dir: Path) -> list[list[list[int]]]:
    """What each sequence of each prompt's group gives as a request of its own."""
    with LLM(model_dir, dtype="float32", kvcache_block_size=BLOCK, num_gpu_blocks=40) as llm:
        return [
            [token_ids(llm, prompt, sampled(1, 20, derived(seed, index)))[0] for index in range(3)]
            for seed, prompt in enumerate(PROMPTS)
        ]


@pytest.mark.parametrize("name", ENGINES)
def test_a_group_gives_what_its_sequences_give_alone(model_dir: Path, alone: list[list[list[int]]], name: str) -> None:
    with LLM(model_dir, dtype="float32", max_model_len=80, **ENGINES[name]) as llm:
        outputs = llm.generate(PROMPTS, [sampled(3, 20, seed) for seed in range(len(PROMPTS))], use_tqdm=False)
        assert [[completion.token_ids for completion in output.outputs] for output in outputs] == alone
        stats = llm.engine.scheduler.preemption.stats
        manager = llm.engine.scheduler.block_manager
        assert (stats.swapped > 0) == ("swapped" in name) and (stats.total > 0) == ("," in name)
        assert manager.pool.num_used == manager.pool.num_swapped == 0 and manager.num_copied_blocks > 0
        assert isinstance(llm._runner.device, OrderingCheck) and llm._runner.device.num_checked > 0
