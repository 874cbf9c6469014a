"""The answer does not depend on the memory budget: same block and chunk size, bit-identical logits."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path

import pytest
import torch
from checkpoints import MIXES, checkpoint_fixture, make_checkpoint
from engines import PREFILL_WAYS, logits_by_request, offloaded, random_prompt, set_prefill, watch_layerwise
from fast import fast_only
from torch import Tensor

from nanovllm import LLM
from nanovllm.memory import sizing
from nanovllm.memory.budget import DeviceSplit

BLOCK = 16
CHUNK = 40
VOCAB = 97
LENGTHS = (9 * BLOCK + 7, 3 * BLOCK, 5)
ALL_RESIDENT = 24  # more blocks than the prompts and their answers fill, ring included


def logits_of_run(
    model_dir: Path, dtype: str, num_gpu_blocks: int, num_prompts: int, way: str, kv_cache_dtype: str = "auto"
) -> tuple[Tensor, bool]:
    """All logits, `[sampled rows, vocab]`, per request; and whether prefill ran layer by layer."""
    arguments = offloaded(BLOCK, num_gpu_blocks, 40, max_num_batched_tokens=CHUNK, cpu_attention=False)
    arguments["kv_cache_dtype"] = kv_cache_dtype
    with LLM(model_dir, dtype=dtype, **arguments) as llm:
        set_prefill(llm, way)
        layerwise_memory = watch_layerwise(llm)
        logits = sorted_logits(llm, num_prompts)
    return logits, bool(layerwise_memory)


def sorted_logits(llm: LLM, num_prompts: int) -> Tensor:
    prompts = [random_prompt(length, VOCAB, seed=4) for length in LENGTHS[:num_prompts]]
    logits = logits_by_request(llm, prompts, BLOCK + 2)
    return torch.stack([logits[key] for key in sorted(logits)])


# dtype, head_dim, layers, kv_cache_dtype
WIDE = ("float32", 32, 3, "auto")
LARGE_HEADS = ("bfloat16", 128, 3, "auto")
INT8 = ("bfloat16", 64, 2, "int8")
FP8 = ("float32", 32, 3, "fp8")
TORCH = (("float32", 24, 2, "auto"), ("float32", 24, 2, "int8"))  # its operator takes heads of 24
MODELS = (WIDE, LARGE_HEADS, INT8, FP8, ("bfloat16", 32, 1, "auto"), *TORCH)
FEW = (4, 5, 6, 9, 12, 17, ALL_RESIDENT - 1)
EVERY = range(4, ALL_RESIDENT)
CASES = [(WIDE, 3, FEW), (WIDE, 3, EVERY), (WIDE, 1, EVERY), *((each, 3, FEW) for each in MODELS[1:])]


@pytest.mark.parametrize(("model", "num_prompts", "budgets"), fast_only(CASES[:1], CASES))
def test_logits_are_bit_identical_for_every_device_budget(
    tmp_path: Path, model: tuple[str, int, int, str], num_prompts: int, budgets: Sequence[int]
) -> None:
    dtype, head_dim, layers, stored = model
    make_checkpoint(tmp_path, vocab=VOCAB, dtype=dtype, head_dim=head_dim, layers=layers)
    resident, is_layerwise = logits_of_run(tmp_path, dtype, ALL_RESIDENT, num_prompts, "layer-major", stored)
    assert torch.isfinite(resident.float()).all() and not is_layerwise, "there is nothing to save"
    for num_gpu_blocks in budgets:
        for way in PREFILL_WAYS if num_gpu_blocks % 4 == 0 else ("layer-major",):
            streamed, is_layerwise = logits_of_run(tmp_path, dtype, num_gpu_blocks, num_prompts, way, stored)
            assert torch.equal(streamed, resident), f"num_gpu_blocks={num_gpu_blocks}, {way}"
            if num_gpu_blocks == 4:
                assert is_layerwise == (way == "layer-major" and head_dim % 16 == 0)


small = checkpoint_fixture(vocab=VOCAB)


@pytest.fixture(scope="module")
def resident(small: Path) -> Tensor:
    return logits_of_run(small, "float32", ALL_RESIDENT, 3, "layer-major")[0]


# In runs of up to 1, 2, 4, 5, 6 and 8.
@pytest.mark.parametrize(
    ("ring_slots", "way"),
    fast_only(
        [(2, "layer-major"), (2, "chunk-major"), (5, "chunk-major"), (11, "layer-major"), (16, "chunk-major")],
        product((2, 3, 5, 8, 11, 12, 16), PREFILL_WAYS),
    ),
)
def test_logits_are_bit_identical_for_every_ring(
    small: Path, resident: Tensor, ring_slots: int, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizing, "split_device", lambda *_: DeviceSplit(ring_slots, resident_blocks=1))
    streamed, is_layerwise = logits_of_run(small, "float32", 5, 3, way)
    assert torch.equal(streamed, resident) and is_layerwise == (way == "layer-major")


def test_resident_and_offloaded_rooms_agree_to_the_bit(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, vocab=VOCAB, dtype="bfloat16", head_dim=64)
    with LLM(tmp_path, kvcache_block_size=BLOCK, num_gpu_blocks=40, max_num_batched_tokens=CHUNK) as llm:
        logits = sorted_logits(llm, len(LENGTHS))
    for way in PREFILL_WAYS:
        assert torch.equal(logits, logits_of_run(tmp_path, "bfloat16", 4, 3, way)[0]), way


@pytest.mark.slow
@pytest.mark.parametrize("mix", MIXES)
def test_logits_of_every_mix_of_layers_are_bit_identical_for_every_device_budget(tmp_path: Path, mix: str) -> None:
    make_checkpoint(tmp_path, vocab=VOCAB, dtype="bfloat16", **MIXES[mix])
    with LLM(tmp_path, kvcache_block_size=BLOCK, num_gpu_blocks=120, max_num_batched_tokens=CHUNK) as llm:
        resident = sorted_logits(llm, len(LENGTHS))
    for num_gpu_blocks in (4, 5, 7, 10, 16, 24):
        arguments = offloaded(BLOCK, num_gpu_blocks, 120, max_num_batched_tokens=CHUNK, cpu_attention=False)
        with LLM(tmp_path, **arguments) as llm:
            assert torch.equal(sorted_logits(llm, len(LENGTHS)), resident), f"num_gpu_blocks={num_gpu_blocks}"
