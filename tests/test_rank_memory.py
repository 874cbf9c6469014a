"""The memory of a rank's process: its share of the weights and of the KV cache, as the system counts it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint
from engines import greedy, random_prompt, token_ids
from rank_processes import rank_pids

from nanovllm import LLM

LARGE: dict[str, Any] = {"hidden": 512, "intermediate": 512, "heads": 16, "kv_heads": 16, "head_dim": 128, "layers": 3}
VOCAB = 60_000
BLOCK, NUM_BLOCKS = 16, 200
PROMPT_LEN = 400


@pytest.mark.slow
def test_a_rank_holds_its_share_of_weights_and_kv_cache(tmp_path: Path) -> None:
    """Beyond the memory of ranks with next to no model.

    Pages of files are left out, since all processes share them. The prompts write the whole KV cache: memory that was
    never written is not counted.
    """
    make_checkpoint(tmp_path / "small", "qwen3", vocab=VOCAB, hidden=16, max_positions=512)
    make_checkpoint(tmp_path / "large", "llama", vocab=VOCAB, max_positions=512, **LARGE)
    arguments: dict[str, Any] = {"kvcache_block_size": BLOCK, "num_gpu_blocks": NUM_BLOCKS, "swap_space": 0}
    arguments |= {"max_num_seqs": 2, "max_num_batched_tokens": 32}  # so that activations take next to nothing
    held, found = [], []
    for name in ("small", "large"):
        with LLM(tmp_path / name, tensor_parallel_size=2, **arguments) as llm:
            prompts = [random_prompt(PROMPT_LEN, 1000, seed) for seed in range(NUM_BLOCKS * BLOCK // PROMPT_LEN + 1)]
            token_ids(llm, prompts, greedy(2))
            held.append(held_bytes(llm))
            found.append([anonymous_bytes(pid) for pid in rank_pids(os.getpid())])
    with LLM(tmp_path / "large", load_format="dummy", **arguments) as llm:
        assert held[1] == pytest.approx(held_bytes(llm) / 2, rel=0.001)
    share = held[1] - held[0]
    for small, large in zip(*found, strict=True):
        print(f"{(large - small) / 2**20:.1f} MiB, of which weights and KV are {share / 2**20:.1f} MiB")
        assert large - small == pytest.approx(share, rel=0.03)


def held_bytes(llm: LLM) -> int:
    """Weights in float32 and KV cache, of a rank."""
    return llm.kv_stats().device_bytes + llm.engine.executor.spec.num_weights * 4


def anonymous_bytes(pid: int) -> int:
    """Memory of a process that is no file's."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    (kib,) = (int(line.split()[1]) for line in lines if line.startswith("Anonymous:"))
    return kib << 10
