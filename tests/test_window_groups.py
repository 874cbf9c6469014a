"""Models whose layers keep different tokens: the same bits however they are computed, and the memory that they take."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from engines import greedy, logits_by_request, offloaded, random_prompt, recorded_batches, set_prefill, token_ids
from fast import fast_only
from torch import Tensor

from nanovllm import LLM
from nanovllm.data.kv_groups import HOLE
from nanovllm.engine.block_manager import BlockManager

BLOCK = 16
VOCAB = 97
OUTPUT = 12
LENGTHS = (9 * BLOCK + 7, 3 * BLOCK, 5)
PATTERNS: dict[str, dict[str, Any]] = {
    "5 to 1": {"family": "gemma3", "layer_types": ["sliding_attention"] * 5 + ["full_attention"]},
    "1 to 1": {"family": "gemma3", "layer_types": ["sliding_attention", "full_attention"] * 2},
    "all": {"family": "mistral", "layers": 2},
}
ROOMY = {"kvcache_block_size": BLOCK, "num_gpu_blocks": 120, "max_model_len": 256}


def checkpoint(path: Path, pattern: str, window: int, **others: Any) -> Path:
    options = dict(PATTERNS[pattern])
    options.setdefault("layers", len(options.get("layer_types", ())))
    make_checkpoint(path, vocab=VOCAB, sliding_window=window, **options, **others)
    return path


def manager_of(llm: LLM) -> BlockManager:
    return llm.engine.scheduler.block_manager


def logits(llm: LLM, prompts: list[list[int]]) -> Tensor:
    found = logits_by_request(llm, prompts, OUTPUT)
    return torch.stack([found[key] for key in sorted(found)])


def prompts_of(seed: int = 4) -> list[list[int]]:
    return [random_prompt(length, VOCAB, seed) for length in LENGTHS]


# The window: smaller than a block, as long as one, longer than a chunk of 40.
@pytest.mark.parametrize("pattern, window", fast_only([("5 to 1", 60)], product(PATTERNS, (7, BLOCK, 60))))
def test_logits_do_not_depend_on_how_they_are_computed(tmp_path: Path, pattern: str, window: int) -> None:
    """For every chunk, memory budget and order of prefill, alone, in a batch, and from the prefix cache."""
    checkpoint(tmp_path, pattern, window)
    with LLM(tmp_path, dtype="float32", **ROOMY) as llm:
        expected = logits(llm, prompts_of())
        first = sum(len(logits(llm, [prompt])) for prompt in prompts_of())
        assert first == len(expected) and manager_of(llm).stats.hit_tokens > 0
        assert torch.equal(torch.cat([logits(llm, [prompt]) for prompt in prompts_of()]), expected)
    with LLM(tmp_path, dtype="float32", max_num_batched_tokens=7, max_num_seqs=1, **ROOMY) as llm:
        assert torch.equal(torch.cat([logits(llm, [prompt]) for prompt in prompts_of()]), expected)
    for num_gpu_blocks in (4, 12):
        for way in ("layer-major", "chunk-major"):
            arguments = offloaded(BLOCK, num_gpu_blocks, 100, max_num_batched_tokens=40, max_model_len=256)
            with LLM(tmp_path, dtype="float32", cpu_attention=way == "chunk-major", **arguments) as llm:
                set_prefill(llm, way)
                assert torch.equal(logits(llm, prompts_of()), expected), (num_gpu_blocks, way)
                again = logits(llm, prompts_of())
                assert torch.equal(again, expected) and manager_of(llm).stats.hit_tokens > 0, "from the prefix cache"
                assert manager_of(llm).pool.num_used == 0


@pytest.mark.parametrize("way", ["layer-major", "chunk-major"])
def test_blocks_behind_the_window_are_never_held_or_streamed(tmp_path: Path, way: str) -> None:
    window = 20
    chunk = 40
    prompt_len = 12 * BLOCK
    checkpoint(tmp_path, "5 to 1", window)
    arguments = offloaded(BLOCK, 4, 60, max_num_batched_tokens=chunk, max_model_len=256, cpu_attention=False)
    with LLM(tmp_path, dtype="float32", **arguments) as llm:
        set_prefill(llm, way)
        batches = recorded_batches(llm)
        token_ids(llm, random_prompt(prompt_len, VOCAB, 1), greedy(8))
        layout = llm._runner.kv_cache.layout
        resident = llm.kv_stats().resident_blocks
    assert resident == 0 and any(batch.layerwise for batch, _, _ in batches) == (way == "layer-major")
    most = layout.groups.most_blocks(prompt_len + 8, chunk)
    for batch, result, moved in batches:
        (seq,) = batch.sequences
        held = sum(block != HOLE for table in seq.block_tables for block in table)
        assert held <= (most if seq.layerwise is None else most + 2 * 5)
        assert (moved.h2d_bytes, moved.d2h_bytes) == (result.h2d_bytes[0], result.d2h_bytes[0])
        if seq.layerwise is None:
            begin = seq.context_len
            end = seq.context_len + len(seq.token_ids)
            loaded = sum(
                len(group.layers) * (begin - min(begin, group.first_visible(begin) * BLOCK)) for group in layout.groups
            )
            assert moved.h2d_bytes == loaded * layout.token_layer_bytes
            assert moved.d2h_bytes == (end - begin) * layout.token_bytes
    if way == "layer-major":  # of the windows' layers, only what later tokens see is stored
        stored = sum(moved.d2h_bytes for batch, _, moved in batches if batch.layerwise is not None)
        assert stored < prompt_len * layout.token_bytes / 2


def test_a_small_cache_takes_a_prompt_that_did_not_fit_without_groups(tmp_path: Path) -> None:
    checkpoint(tmp_path, "5 to 1", 16)
    with LLM(tmp_path, dtype="float32", kvcache_block_size=BLOCK, num_gpu_blocks=30, max_num_batched_tokens=32) as llm:
        longest = llm.plan().kv.max_model_len
        layout = llm._runner.kv_cache.layout
        # 5 windows take 4 blocks each, for 15 + 32 keys. Six blocks of one layer are one of six layers.
        assert layout.planes == 1 and longest == (30 - 5 * 4) * BLOCK == 2 * 30 // 6 * BLOCK
        (output,) = token_ids(llm, random_prompt(longest - 4, VOCAB, 1), greedy(4))
        assert len(output) == 4 and llm.engine.scheduler.preemption.stats.total == 0
