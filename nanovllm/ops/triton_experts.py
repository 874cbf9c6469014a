"""Products of rows with the matrices of the experts that were chosen for them, in Triton. Not yet run on a GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.ops.triton_decode import dot_precision
from nanovllm.ops.triton_groups import group_of_tile, most_tiles

WEIGHT_BOUND_ROWS = 16  # of an expert, on average: with at most so many, reading the weights determines the time
COLUMNS_PER_PROGRAM = 1024


@triton.jit(do_not_specialize=["x_stride"])
def _grouped_kernel(  # type: ignore[no-untyped-def]
    y_ptr,
    x_ptr,
    weight_ptr,
    bias_ptr,
    rows_ptr,
    ends_ptr,
    num_experts,
    out_features,
    in_features,
    x_stride,
    EXPERTS: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program (tile of columns, tile of rows): BLOCK_M rows of one expert."""
    expert, begin, end = group_of_tile(ends_ptr, num_experts, tl.program_id(1), EXPERTS, BLOCK_M)
    if expert >= num_experts:  # the grid has a tile for every expert, even if it has no rows
        return
    entry = begin + tl.arange(0, BLOCK_M)
    has_entry = entry < end
    row = entry.to(tl.int64)
    if HAS_ROWS:
        row = tl.load(rows_ptr + entry, mask=has_entry, other=0)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    feature = tl.arange(0, BLOCK_K)
    x_at = x_ptr + row[:, None] * x_stride + feature[None, :]
    weight_row = expert.to(tl.int64) * out_features + column
    weight_at = weight_ptr + weight_row[None, :] * in_features + feature[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, in_features, BLOCK_K):
        inside = feature < in_features - start
        x = tl.load(x_at + start, mask=has_entry[:, None] & inside[None, :], other=0.0)
        weight = tl.load(weight_at + start, mask=inside[:, None] & (column < out_features)[None, :], other=0.0)
        acc = tl.dot(x, weight, acc, input_precision=PRECISION)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + weight_row, mask=column < out_features, other=0.0).to(tl.float32)[None, :]
    y_at = y_ptr + entry.to(tl.int64)[:, None] * out_features + column[None, :]
    tl.store(y_at, acc.to(y_ptr.dtype.element_ty), mask=has_entry[:, None] & (column < out_features)[None, :])


def grouped_linear(
    x: Tensor,
    weights: Tensor,
    ends: Tensor,
    rows: Tensor | None = None,
    bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Row i of the result is x[rows[i]] times the transposed matrix of its expert, plus its bias: [entries, out].

    x: [tokens, in], the elements of a row contiguous; weights: [experts, out, in], contiguous; ends: int64 [experts],
    for each expert where its rows of the result end, which begin where those of the expert before it end; rows: int64
    [entries], None if x has the rows of the result; bias: [experts, out], contiguous, or None; out: contiguous memory
    for the result. Sums are fp32.
    """
    assert weights.is_contiguous() and x.stride(1) == 1, "rows and weights must be contiguous"
    num_experts, out_features, in_features = weights.shape
    entries = len(x) if rows is None else len(rows)
    y = x.new_empty(entries, out_features) if out is None else out
    if not entries:
        return y
    few = entries <= WEIGHT_BOUND_ROWS * num_experts
    block_m, block_n, block_k = (16, 64, 64) if few else (64, 64, 32)
    if x.dtype == torch.float32:
        block_k = 32
    grid = (triton.cdiv(out_features, block_n), most_tiles(entries, num_experts, block_m))
    _grouped_kernel[grid](
        y, x, weights, bias, rows, ends, num_experts, out_features, in_features, x.stride(0),
        EXPERTS=triton.next_power_of_2(num_experts), HAS_ROWS=rows is not None, HAS_BIAS=bias is not None,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, PRECISION=dot_precision(x.dtype),
        num_warps=4, num_stages=3, enable_fp_fusion=True,
    )  # fmt: skip
    return y


@triton.jit
def _weighted_sum_kernel(  # type: ignore[no-untyped-def]
    out_ptr, y_ptr, entries_ptr, weights_ptr, size, EXPERTS: tl.constexpr, BLOCK: tl.constexpr
):
    """Program (row, tile of columns)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < size
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for index in tl.static_range(EXPERTS):
        entry = tl.load(entries_ptr + row * EXPERTS + index)
        weight = tl.load(weights_ptr + row * EXPERTS + index)
        total += weight * tl.load(y_ptr + entry * size + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * size + column, total.to(out_ptr.dtype.element_ty), mask=mask)


def weighted_sum(y: Tensor, entries: Tensor, weights: Tensor) -> Tensor:
    """Each row of the result is a sum of weights[row, i] * y[entries[row, i]], in fp32: [rows, size] in y's dtype.

    y: [entries, size], contiguous; entries: int64 and weights: fp32 [rows, experts of a row].
    """
    assert y.is_contiguous(), "y must be contiguous"
    (rows, experts), size = entries.shape, y.shape[1]
    out = y.new_empty(rows, size)
    if out.numel():
        _weighted_sum_kernel[(rows, triton.cdiv(size, COLUMNS_PER_PROGRAM))](
            out, y, entries.contiguous(), weights.contiguous(), size,
            EXPERTS=experts, BLOCK=COLUMNS_PER_PROGRAM, enable_fp_fusion=True,
        )  # fmt: skip
    return out
