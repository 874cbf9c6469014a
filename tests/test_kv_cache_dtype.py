"""The KV cache in 8 bits: its rows and their bytes, attention to them, and that nothing else about results changes."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_cases import BOUNDS, Case, Shape, quantised, same_bits, split
from checkpoints import checkpoint_fixture, make_checkpoint
from engines import greedy, logits_by_request, offloaded, random_prompt, set_prefill
from fast import fast_only
from torch import Tensor
from triton_mode import DEVICE, TRITON_MARKS

from nanovllm import LLM
from nanovllm.errors import ConfigError
from nanovllm.ops.attention import AttentionMetadata, AttentionState
from nanovllm.ops.backends import cuda_backends
from nanovllm.ops.cpu_attention import NativeAttention, PagedStep
from nanovllm.ops.kv_quantization import dequantize_rows, quantize_rows, quantize_rows_torch
from nanovllm.ops.row_kernels import store_kv
from nanovllm.ops.torch_attention import TorchAttention

KV_DTYPES = ("int8", "fp8")
STORED = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
MODEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
VOCAB = 101
BLOCK = 16
HEAD_DIM = 32
# Largest error of outputs against fp64 attention to unquantised K and V of size 1, for heads of 64 and about 100 keys.
QUANTISED_BOUNDS = {"int8": 0.03, "fp8": 0.15}


def difficult_rows(dtype: torch.dtype, head_dim: int = 64) -> Tensor:
    """[40, 3, head_dim] of many sizes: rows of zeros, of subnormal numbers, of the largest, with one large element."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(40, 3, head_dim, generator=generator) * torch.randn(40, 3, 1, generator=generator).mul(3).exp()
    x[0] = 0.0
    x[1] *= 1e-39 if dtype != torch.float16 else 1e-7
    x[2] *= 1e-4
    x[2, :, 5] = 1.0
    x[3] = x[3].sign() * torch.finfo(dtype).max / 2
    return x.to(dtype)


def bytes_of(rows: Tensor) -> Tensor:
    return rows.cpu().view(torch.uint8)


# ---- rows


@pytest.mark.parametrize("dtype", MODEL_DTYPES)
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_rows_are_those_of_the_formula(dtype: torch.dtype, kv_dtype: str) -> None:
    stored = STORED[kv_dtype]
    x = difficult_rows(dtype)
    rows = quantize_rows(x, stored)
    assert rows.shape == (40, 3, 68) and rows.dtype == stored
    assert torch.equal(bytes_of(rows), bytes_of(quantize_rows_torch(x, stored)))
    scale = bytes_of(rows)[..., 64:].contiguous().view(torch.float32)
    exact = x.double().abs().amax(-1, keepdim=True) / (127 if kv_dtype == "int8" else 448)
    assert torch.allclose(scale.double(), exact.clamp(min=torch.finfo(torch.float32).tiny), rtol=2**-23, atol=0)
    error = (dequantize_rows(rows, torch.float32).double() - x.double()).abs()
    # int8: half a step. e4m3: half of the last of four binary digits, or of the smallest step.
    steps = 0.5 if kv_dtype == "int8" else (x.double() / scale).abs().mul(2**-4).clamp(min=2**-10)
    assert (error <= scale.double() * steps * (1 + 2**-14)).all()  # the quotient and the product round, too


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_strided_rows_and_odd_heads(kv_dtype: str) -> None:
    merged = torch.randn(9, 8, 24).to(torch.bfloat16)
    part = merged[:, 3:5]
    assert torch.equal(
        bytes_of(quantize_rows(part, STORED[kv_dtype])), bytes_of(quantize_rows(part.clone(), STORED[kv_dtype]))
    )
    odd = torch.randn(9, 2, 13)
    rows = quantize_rows(odd, STORED[kv_dtype])
    assert torch.equal(dequantize_rows(rows, torch.float32), dequantize_rows(rows.clone(), torch.float32))
    assert (dequantize_rows(rows, torch.float32) - odd).abs().max() < 0.2


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_not_finite_is_read_as_nan(kv_dtype: str, bad: float) -> None:
    x = torch.ones(2, 1, 16)
    x[0, 0, 3] = bad
    for rows in (quantize_rows(x, STORED[kv_dtype]), quantize_rows_torch(x, STORED[kv_dtype])):
        values = dequantize_rows(rows, torch.float32)
        assert values[0].isnan().any() and torch.equal(values[1], x[1])


@pytest.mark.parametrize("dtype", [pytest.param(d, marks=TRITON_MARKS) for d in (torch.float32, torch.float16)])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_triton_writes_the_same_rows(dtype: torch.dtype, kv_dtype: str) -> None:
    from nanovllm.ops.triton_kv import quantize_rows_triton

    x = difficult_rows(dtype, 24)[:, :2].to(DEVICE)
    rows = quantize_rows_triton(x, STORED[kv_dtype])
    assert torch.equal(bytes_of(rows), bytes_of(quantize_rows_torch(x, STORED[kv_dtype])))


# ---- attention


SHAPE = Shape(64, 2, 3, 32, None, ((0, 40), (69, 1), (100, 9), (5, 70)))


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_attention_of_torch(kv_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which rounds each dequantised element to bf16, so errors may be twice as large."""
    monkeypatch.setitem(BOUNDS, torch.bfloat16, (4e-2, 2e-2))
    case = quantised(SHAPE, torch.bfloat16, STORED[kv_dtype])
    case.check(case.attend(TorchAttention()))


@pytest.mark.parametrize("dtype", [pytest.param(d, marks=TRITON_MARKS) for d in (torch.float32, torch.float16)])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_attention_of_triton(kv_dtype: str, dtype: torch.dtype) -> None:
    from nanovllm.ops.triton_attention import TritonAttention

    window = 21 if dtype == torch.float16 else None
    case = quantised(Shape(24, 1, 2, 32, window, ((0, 66), (50, 1))), dtype, STORED[kv_dtype], device=DEVICE)
    state = case.attend(TritonAttention())
    case.check(state)
    in_parts = [split(seq, [1, 2], 32) for seq in case.sequences]
    tables = [[parts[i] for parts in in_parts if i < len(parts)] for i in range(max(map(len, in_parts)))]
    assert same_bits(case.attend(TritonAttention(), tables), state), "bits depend on the grouping of blocks"


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_the_error_of_eight_bits_is_bounded(kv_dtype: str) -> None:
    for seed in range(3):
        exact = Case(SHAPE, torch.float32, seed)
        case = quantised(SHAPE, torch.float32, STORED[kv_dtype], seed)
        error = (case.attend(NativeAttention()).out - exact.attend(NativeAttention()).out).abs().max()
        assert 1e-4 < error <= QUANTISED_BOUNDS[kv_dtype]


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_a_step_of_few_rows_gives_the_bits_of_its_operations(kv_dtype: str) -> None:
    case = quantised(Shape(64, 2, 3, 16, None, ((20, 1), (33, 2))), torch.bfloat16, STORED[kv_dtype])
    rows = torch.cat([torch.arange(s.query_start, s.query_start + s.query_len) for s in case.sequences])
    slots = torch.cat(
        [torch.tensor(s.block_table)[s.positions() // 16] * 16 + s.positions() % 16 for s in case.sequences]
    )
    k, v = torch.randn(2, len(rows), 2, 64).to(torch.bfloat16)
    dense = [replace(s, query_start=i) for i, s in enumerate(case.sequences)]
    table = AttentionMetadata(dense)
    pool = case.pool.clone()
    q = case.q[rows].contiguous()
    store_kv(pool, k, v, slots)
    state = AttentionState.empty(q)
    NativeAttention().attend(q, pool, table, state, 0.125, None)
    step = PagedStep(case.pool.unsqueeze(0), slots, table, q.dtype, 6, 0.125, None)
    out = step.attend(0, q.clone(), k, v)
    assert torch.equal(out, state.out.to(q.dtype)) and torch.equal(bytes_of(case.pool), bytes_of(pool))


# ---- engines


model_dir = checkpoint_fixture(vocab=VOCAB, head_dim=HEAD_DIM, seed=5)


def logits_of(model_dir: Path, prompts: list[list[int]], kv_dtype: str, way: str = "", **arguments: Any) -> Tensor:
    with LLM(model_dir, dtype="float32", kv_cache_dtype=kv_dtype, **arguments) as llm:
        if way:
            set_prefill(llm, way)
        found = logits_by_request(llm, prompts, 20)
        return torch.stack([found[key] for key in sorted(found)])


RESIDENT: dict[str, Any] = {"kvcache_block_size": BLOCK, "num_gpu_blocks": 60}
WAYS: dict[str, dict[str, Any]] = {
    "small chunks": {**RESIDENT, "max_num_batched_tokens": 7},
    "uneven chunks": {**RESIDENT, "max_num_batched_tokens": 33},
    "offloaded": offloaded(BLOCK, 4, 60, max_num_batched_tokens=40, cpu_attention=False),
    "CPU attention": offloaded(BLOCK, 6, 60, max_num_batched_tokens=23),
    "layer by layer": offloaded(BLOCK, 4, 60, max_num_batched_tokens=40, cpu_attention=False, way="layer-major"),
    "chunk by chunk": offloaded(BLOCK, 4, 60, max_num_batched_tokens=40, cpu_attention=False, way="chunk-major"),
    "few blocks": {**RESIDENT, "num_gpu_blocks": 14},
}


@pytest.mark.parametrize("kv_dtype", fast_only(["int8"], KV_DTYPES))
def test_logits_do_not_depend_on_chunks_batch_budget_or_preemption(model_dir: Path, kv_dtype: str) -> None:
    prompts = [random_prompt(length, VOCAB, seed=1) for length in (6 * BLOCK + 5, BLOCK, 3)]
    alone = torch.cat([logits_of(model_dir, [prompt], kv_dtype, **RESIDENT) for prompt in prompts])
    assert not torch.equal(alone, logits_of(model_dir, prompts, "auto", **RESIDENT))
    for name, arguments in WAYS.items():
        assert torch.equal(logits_of(model_dir, prompts, kv_dtype, **arguments), alone), name


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_the_link_carries_a_byte_for_each_element_and_four_for_each_row(tmp_path: Path, kv_dtype: str) -> None:
    """Compared with bfloat16: (head_dim + 4) / (2 head_dim) of the bytes, in as many copies."""
    make_checkpoint(tmp_path, vocab=VOCAB, head_dim=64, dtype="bfloat16")
    counted = {}
    for name in ("auto", kv_dtype):
        arguments = offloaded(BLOCK, 4, 60, max_num_batched_tokens=40, cpu_attention=False)
        with LLM(tmp_path, kv_cache_dtype=name, **arguments) as llm:
            output = llm.generate([random_prompt(150, VOCAB, 0)], greedy(8), use_tqdm=False)[0]
            counted[name] = stats = llm.kv_stats()
            assert len(output.outputs[0].token_ids) == 8
    wide = counted["auto"].transfers
    narrow = counted[kv_dtype].transfers
    assert (narrow.h2d_copies, narrow.d2h_copies) == (wide.h2d_copies, wide.d2h_copies)
    assert (narrow.h2d_bytes * 128, narrow.d2h_bytes * 128) == (wide.h2d_bytes * 68, wide.d2h_bytes * 68)
    assert stats.bytes_per_block * 128 == counted["auto"].bytes_per_block * 68
    assert stats.host_bytes * 128 == counted["auto"].host_bytes * 68


def test_only_triton_reads_eight_bits_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from nanovllm.ops import backends

    monkeypatch.setattr(backends, "triton_runs", lambda: True)
    assert [b.name for b in cuda_backends(torch.device("cuda"), 128, torch.int8)] == ["Triton paged attention"]
    with pytest.raises(ConfigError, match="multiple of 4"):
        cuda_backends(torch.device("cuda"), 130, torch.float8_e4m3fn)
    monkeypatch.setattr(backends, "triton_runs", lambda: False)
    with pytest.raises(ConfigError, match="Triton does not run"):
        cuda_backends(torch.device("cuda"), 128, torch.int8)
