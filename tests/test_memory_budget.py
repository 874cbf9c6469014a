"""The answer does not depend on the memory budget: same block and chunk size, bit-identical logits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint
from engines import greedy, offloaded, random_prompt, recorded_logits
from torch import Tensor

from nanovllm import LLM
from nanovllm.kvcache import sizing
from nanovllm.kvcache.budget import DeviceSplit

BLOCK, CHUNK, VOCAB = 16, 40, 97
LENGTHS = (9 * BLOCK + 7, 3 * BLOCK, 5)
ALL_RESIDENT = 24  # more blocks than the prompts and their answers fill, ring included


def logits_of_run(model_dir: Path, dtype: str, num_gpu_blocks: int, num_prompts: int) -> Tensor:
    """All logits of prefill and decode, `[sampled rows, vocab]`."""
    arguments = offloaded(BLOCK, num_gpu_blocks, 40, max_num_batched_tokens=CHUNK, cpu_attention=False)
    prompts = [random_prompt(length, VOCAB, seed=4) for length in LENGTHS[:num_prompts]]
    with LLM(model_dir, dtype=dtype, **arguments) as llm, recorded_logits(llm) as logits:
        llm.generate(prompts, greedy(BLOCK + 2), use_tqdm=False)
    return torch.cat(logits)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "layers"),
    [("float32", 32, 3), ("bfloat16", 128, 3), ("bfloat16", 32, 1), ("float32", 24, 2)],  # 24: torch's operator
)
@pytest.mark.parametrize("num_prompts", [1, 3])
def test_logits_are_bit_identical_for_every_device_budget(
    tmp_path: Path, dtype: str, head_dim: int, layers: int, num_prompts: int
) -> None:
    make_checkpoint(tmp_path, vocab=VOCAB, dtype=dtype, head_dim=head_dim, layers=layers)
    resident = logits_of_run(tmp_path, dtype, ALL_RESIDENT, num_prompts)
    assert torch.isfinite(resident.float()).all()
    for num_gpu_blocks in range(4, ALL_RESIDENT):
        streamed = logits_of_run(tmp_path, dtype, num_gpu_blocks, num_prompts)
        assert torch.equal(streamed, resident), f"num_gpu_blocks={num_gpu_blocks}"


@pytest.mark.parametrize("ring_slots", [2, 3, 5, 11])
def test_logits_are_bit_identical_for_every_ring(
    tmp_path: Path, ring_slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(tmp_path, vocab=VOCAB)
    resident = logits_of_run(tmp_path, "float32", ALL_RESIDENT, 3)
    monkeypatch.setattr(sizing, "split_device", lambda blocks, layers: DeviceSplit(ring_slots, resident_blocks=1))
    assert torch.equal(logits_of_run(tmp_path, "float32", 5, 3), resident)


def test_resident_and_offloaded_rooms_agree_to_the_bit(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, vocab=VOCAB, dtype="bfloat16", head_dim=64)
    prompts = [random_prompt(length, VOCAB, seed=4) for length in LENGTHS]
    with (
        LLM(tmp_path, kvcache_block_size=BLOCK, num_gpu_blocks=40, max_num_batched_tokens=CHUNK) as llm,
        recorded_logits(llm) as logits,
    ):
        llm.generate(prompts, greedy(BLOCK + 2), use_tqdm=False)
    assert torch.equal(torch.cat(logits), logits_of_run(tmp_path, "bfloat16", 4, 3))
