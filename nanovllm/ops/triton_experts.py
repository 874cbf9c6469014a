"""Products of rows with the matrices of the experts that were chosen for them, in Triton.

Matrices are plain or packed, and nothing of a packed one is written out. For few rows its numbers are multiplied and
the scale multiplies the sum, as in `triton_packed`; for many a tile becomes (q - zero) * scale in the rows' dtype,
rounded once. For many rows other packed matrices are written out in 16 bits. For all experts of a layer of gpt-oss-20b
or Qwen3.6-35B-A3B that would be 1.6 GB: for 4,096 rows of gpt-oss-20b, whose products are 0.8 TFLOP a layer, 3.2 GB to
write and read, in the place of 0.4 GB of packed weights.

With `fp8_inputs` rows are rounded to fp8 as in `triton_packed`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.ops.packed_panels import HALF_BYTES
from nanovllm.ops.packed_weights import PackedWeight
from nanovllm.ops.triton_decode import dot_precision
from nanovllm.ops.triton_gguf import gguf_grouped_linear
from nanovllm.ops.triton_groups import group_of_tile, most_tiles
from nanovllm.ops.triton_packed import round_inputs
from nanovllm.ops.triton_support import multiplies_fp8
from nanovllm.ops.triton_unpack import SCHEMES, unpack, unpack_halves, unpack_scales

FEW_ROWS = 16  # of a tile: up to so many, packed weights have a kernel of their own
SHORT_TILE_ROWS = 64  # of an expert, on average: with more, tiles of twice as many rows are used
COLUMNS_PER_PROGRAM = 1024


@dataclass(frozen=True, slots=True)
class ExpertConfig:
    """One launch of the kernel; not tuned by timing."""

    rows: int  # of a tile, of one expert
    outputs: int  # of a tile
    columns: int  # of a tile: inputs
    warps: int
    stages: int


def expert_config(entries: int, num_experts: int, dtype: torch.dtype, *, packed: bool) -> ExpertConfig:
    """Tiles for so many choices of experts, by the rows that an expert has on average.

    With few rows, reading the weights determines the time. A program has 3 tiles of plain weights, of 24 KB in all, on
    their way. Of unpacked weights the narrowest tile was the fastest on an H200, with a warp of its own: of gpt-oss-20b
    29 and 19 us a layer, where two warps of 32 outputs took 37 and 28. dtype: in which tiles are multiplied.
    """
    average = entries // num_experts
    few_rows = 8 if packed else 16
    if dtype == torch.float32:  # for exactness only: larger tiles spill registers
        few = ExpertConfig(few_rows, 32, 32, 2 if packed else 4, 2)
        return few if average <= few_rows else ExpertConfig(64, 64, 32, 4, 2)
    if average <= few_rows:
        return ExpertConfig(8, 16, 128, 1, 4) if packed else ExpertConfig(16, 32, 128, 4, 4)
    if dtype.itemsize == 1:  # a sum and a product
        return ExpertConfig(64, 128, 128, 8, 3)
    return ExpertConfig(64, 128, 64, 4, 3) if average <= SHORT_TILE_ROWS else ExpertConfig(128, 128, 64, 8, 3)


@triton.jit(do_not_specialize=["x_scale_stride"])
def _grouped_kernel(  # type: ignore[no-untyped-def]
    y_ptr,
    x_ptr,
    x_scales_ptr,
    data_ptr,
    scales_ptr,
    zeros_ptr,
    bias_ptr,
    rows_ptr,
    ends_ptr,
    num_experts,
    out_features,
    in_features,
    row_size,
    scale_columns,
    group_size,
    x_stride,
    x_scale_stride,
    SCHEME: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    FP8_INPUTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_K: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program (tile of outputs, tile of rows): BLOCK_M rows of one expert.

    A tile of weights has GROUPS parts of GROUP_K inputs, GROUP_SIZE elements of the data, each with one scale. It is
    loaded with a row for each part of an output.
    """
    expert, begin, end = group_of_tile(ends_ptr, num_experts, tl.program_id(1), EXPERTS, BLOCK_M)
    if expert >= num_experts:  # the grid has a tile for every expert, even if it has no rows
        return
    BLOCK_K: tl.constexpr = GROUPS * GROUP_K
    dtype = x_ptr.dtype.element_ty
    entry = begin + tl.arange(0, BLOCK_M)
    has_entry = entry < end
    row = entry.to(tl.int64)
    if HAS_ROWS:
        row = tl.load(rows_ptr + entry, mask=has_entry, other=0).to(tl.int64)
    column = tl.arange(0, BLOCK_K)
    x_at = x_ptr + row[:, None] * x_stride + column[None, :]
    part = tl.arange(0, BLOCK_N * GROUPS)
    output = tl.program_id(0) * BLOCK_N + part // GROUPS
    group = part % GROUPS
    is_output = output < out_features
    weight_row = expert.to(tl.int64) * out_features + output
    element = (group * GROUP_SIZE)[:, None] + tl.arange(0, GROUP_SIZE)[None, :]
    data_at = data_ptr + weight_row[:, None] * row_size + element
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(0, tl.cdiv(in_features, BLOCK_K)):
        inside = column < in_features - step * BLOCK_K
        x = tl.load(x_at + step * BLOCK_K, mask=has_entry[:, None] & inside[None, :], other=0.0)
        first = step * (GROUPS * GROUP_SIZE)
        mask = is_output[:, None] & (element < row_size - first)
        data = tl.load(data_at + first, mask=mask, other=0.0 if SCHEME == "dense" or FP8_INPUTS else 0)
        if SCHEME == "dense":
            total = tl.dot(x, tl.trans(data), total, input_precision=PRECISION)
        else:
            begin_k = step * BLOCK_K + group * GROUP_K
            scale_at = weight_row * scale_columns + begin_k // group_size
            has_scale = is_output & (begin_k < in_features)
            scale = unpack_scales(tl.load(scales_ptr + scale_at, mask=has_scale, other=0), SCHEME)
            if FP8_INPUTS:
                x_scale_at = step * BLOCK_K // group_size * x_scale_stride + row
                x_scale = tl.load(x_scales_ptr + x_scale_at, mask=has_entry, other=0.0)
                total += tl.dot(x, tl.trans(data)) * scale[None, :] * x_scale[:, None]
            else:
                if HAS_ZEROS:
                    zeros = tl.load(zeros_ptr + scale_at, mask=has_scale, other=0)
                    values = unpack(data, zeros, SCHEME, tl.float32)
                else:
                    values = unpack(data, None, SCHEME, tl.float32)
                values = tl.reshape((values * scale[:, None]).to(dtype), (BLOCK_N, BLOCK_K))
                total = tl.dot(x, tl.trans(values), total, input_precision=PRECISION)
    y_column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    has_column = y_column < out_features
    if HAS_BIAS:
        bias_at = bias_ptr + expert.to(tl.int64) * out_features + y_column
        total += tl.load(bias_at, mask=has_column, other=0.0).to(tl.float32)[None, :]
    y_at = y_ptr + entry.to(tl.int64)[:, None] * out_features + y_column[None, :]
    tl.store(y_at, total.to(y_ptr.dtype.element_ty), mask=has_entry[:, None] & has_column[None, :])


@triton.jit(do_not_specialize=["x_scale_stride"])
def _packed_experts_kernel(  # type: ignore[no-untyped-def]
    y_ptr,
    x_ptr,
    x_scales_ptr,
    data_ptr,
    scales_ptr,
    zeros_ptr,
    bias_ptr,
    rows_ptr,
    ends_ptr,
    num_experts,
    out_features,
    in_features,
    row_bytes,
    scale_columns,
    x_stride,
    x_scale_stride,
    SCHEME: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    FP8_INPUTS: tl.constexpr,
    PAIRS: tl.constexpr,
    GROUP_PARTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Program (tile of outputs, tile of rows): BLOCK_M rows of one expert, as `triton_packed` multiplies few rows."""
    expert, begin, end = group_of_tile(ends_ptr, num_experts, tl.program_id(1), EXPERTS, BLOCK_M)
    if expert >= num_experts:
        return
    entry = begin + tl.arange(0, BLOCK_M)
    has_entry = entry < end
    row = entry.to(tl.int64)
    if HAS_ROWS:
        row = tl.load(rows_ptr + entry, mask=has_entry, other=0).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    weight_row = expert.to(tl.int64) * out_features + tl.minimum(n, out_features - 1)  # none beyond the last is stored
    scale_row = weight_row * scale_columns
    byte = tl.arange(0, BLOCK_BYTES)
    column = tl.arange(0, BLOCK_K)
    data_at = data_ptr + weight_row[:, None] * row_bytes + byte[None, :]
    x_row = x_ptr + row[None, :] * x_stride
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    if PAIRS:  # even and odd inputs of x, as the halves of a byte are
        word: tl.constexpr = tl.int64 if dtype == tl.float32 else tl.int32
        half: tl.constexpr = tl.int32 if dtype == tl.float32 else tl.int16
        x_words = x_row.to(tl.pointer_type(word), bitcast=True) + byte[:, None]
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for step in range(tl.cdiv(in_features, UNROLL * BLOCK_K)):
        for unrolled in tl.static_range(UNROLL):
            part = step * UNROLL + unrolled
            inside = byte < row_bytes - part * BLOCK_BYTES
            data = tl.load(data_at + part * BLOCK_BYTES, mask=inside[None, :], other=0.0 if FP8_INPUTS else 0)
            # Parts beyond the last input multiply zeros.
            group = tl.minimum(part // GROUP_PARTS, scale_columns - 1) if GROUP_PARTS else 0
            zeros = tl.load(zeros_ptr + scale_row + group) if HAS_ZEROS else None
            product = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            if PAIRS:
                words = tl.load(x_words + part * BLOCK_BYTES, mask=has_entry[None, :] & inside[:, None], other=0)
                low = words.to(half)
                high = (words >> (8 * dtype.itemsize)).to(half)
                even, odd = unpack_halves(data, zeros, SCHEME, dtype)
                product = tl.dot(even, low.to(dtype, bitcast=True), product, input_precision="ieee")
                product = tl.dot(odd, high.to(dtype, bitcast=True), product, input_precision="ieee")
            else:
                mask = has_entry[None, :] & (column < in_features - part * BLOCK_K)[:, None]
                x = tl.load(x_row + (part * BLOCK_K + column)[:, None], mask=mask, other=0.0)
                values = data if FP8_INPUTS else unpack(data, zeros, SCHEME, dtype)
                product = tl.dot(values, x, product, input_precision="ieee")
            product *= unpack_scales(tl.load(scales_ptr + scale_row + group), SCHEME)[:, None]
            if FP8_INPUTS:
                x_scale_at = x_scales_ptr + group * x_scale_stride + row
                product *= tl.load(x_scale_at, mask=has_entry, other=0.0)[None, :]
            total += product
    if HAS_BIAS:
        total += tl.load(bias_ptr + weight_row).to(tl.float32)[:, None]
    y_at = y_ptr + entry.to(tl.int64)[None, :] * out_features + n[:, None]
    mask = has_entry[None, :] & (n < out_features)[:, None]
    tl.store(y_at, total.to(y_ptr.dtype.element_ty), mask=mask)


def grouped_linear(
    x: Tensor,
    weights: Tensor | PackedWeight,
    ends: Tensor,
    rows: Tensor | None = None,
    bias: Tensor | None = None,
    config: ExpertConfig | None = None,
    *,
    fp8_inputs: bool = False,
) -> Tensor:
    """Row i of the result is x[rows[i]] times the transposed matrix of its expert, plus its bias: [entries, out].

    x: [tokens, in], the elements of a row contiguous; weights: [experts, out, in], contiguous, or packed with the
    experts one below the other, [experts * out, in]; ends: int32 or int64 [experts], where the rows of each
    expert end in the result; they begin where those of the expert before it end. rows: of the same type [entries], None
    if x has the rows of the result; bias: [experts, out], contiguous, or None. Sums are fp32. fp8_inputs: of packed
    weights, see `triton_packed.packed_linear`.
    """
    num_experts = len(ends)
    entries = len(x) if rows is None else len(rows)
    in_features = x.shape[1]
    out_features = weights.shape[1] if isinstance(weights, Tensor) else weights.out_features // num_experts
    y = x.new_empty(entries, out_features)
    if not entries:
        return y
    scales: Tensor | None = None
    zeros: Tensor | None = None
    if isinstance(weights, PackedWeight):
        scheme = weights.scheme
        group = weights.group_size
        data = weights.data
        scales = weights.scales
        zeros = weights.zeros
        assert scheme in SCHEMES, f"no kernel for experts of {scheme}"
    else:
        scheme = "dense"
        group = in_features
        data = weights
    x_scales = x
    if fp8_inputs:
        x, x_scales = round_inputs(x, group)
    elif scheme == "fp8":  # not every GPU has a type for fp8, which is decoded from bytes
        data = data.view(torch.uint8)
    assert data.is_contiguous() and x.stride(1) == 1, "rows and weights must be contiguous"
    config = config or expert_config(entries, num_experts, x.dtype, packed=scales is not None)
    group_k = config.columns if group >= in_features else min(config.columns, group & -group)
    group_size = group_k // 2 if scheme in HALF_BYTES else group_k
    groups = config.columns // group_k
    grid = (triton.cdiv(out_features, config.outputs), most_tiles(entries, num_experts, config.rows))
    tensors = (
        y, x, x_scales, data, x if scales is None else scales, x if zeros is None else zeros,
        x if bias is None else bias, x if rows is None else rows, ends,
    )  # fmt: skip
    sizes = (num_experts, out_features, in_features, data.shape[-1], 1 if scales is None else scales.shape[1])
    options = {
        "SCHEME": scheme, "HAS_ZEROS": zeros is not None, "FP8_INPUTS": fp8_inputs,
        "EXPERTS": triton.next_power_of_2(num_experts), "HAS_ROWS": rows is not None, "HAS_BIAS": bias is not None,
        "BLOCK_M": config.rows, "BLOCK_N": config.outputs,
        "num_warps": config.warps, "num_stages": config.stages, "enable_fp_fusion": True,
    }  # fmt: skip
    if scales is not None and config.rows <= FEW_ROWS:
        _packed_experts_kernel[grid](
            *tensors, *sizes, x.stride(0), x_scales.stride(1), **options,
            PAIRS=scheme in HALF_BYTES, GROUP_PARTS=0 if group >= in_features else group // group_k,
            BLOCK_K=group_k, BLOCK_BYTES=group_size, UNROLL=groups,
        )  # fmt: skip
    else:
        _grouped_kernel[grid](
            *tensors, *sizes, group, x.stride(0), x_scales.stride(1), **options,
            GROUPS=groups, GROUP_K=group_k, GROUP_SIZE=group_size, PRECISION=dot_precision(x.dtype),
        )  # fmt: skip
    return y


def grouped_packed_linear(
    x: Tensor, weight: PackedWeight, ends: Tensor, rows: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """`grouped_linear` of any packed weight, with inputs in fp8 where `packed_weights.packed_linear` has them."""
    if weight.scheme not in SCHEMES:
        return gguf_grouped_linear(x, weight, ends, rows, bias)
    fp8_inputs = weight.fp8_inputs and x.dtype != torch.float32 and multiplies_fp8(x.device)
    return grouped_linear(x, weight, ends, rows, bias, fp8_inputs=fp8_inputs)


@triton.jit
def _weighted_sum_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    y_ptr,
    entries_ptr,
    weights_ptr,
    shared_ptr,
    size,
    EXPERTS: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (row, tile of columns)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < size
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    weights_at = weights_ptr + row * (EXPERTS + HAS_SHARED)
    for index in tl.static_range(EXPERTS):
        entry = tl.load(entries_ptr + row * EXPERTS + index).to(tl.int64)
        weight = tl.load(weights_at + index)
        total += weight * tl.load(y_ptr + entry * size + column, mask=mask, other=0.0).to(tl.float32)
    if HAS_SHARED:
        shared = tl.load(shared_ptr + row * size + column, mask=mask, other=0.0).to(tl.float32)
        total += tl.load(weights_at + EXPERTS) * shared
    tl.store(out_ptr + row * size + column, total.to(out_ptr.dtype.element_ty), mask=mask)


def weighted_sum(y: Tensor, entries: Tensor, weights: Tensor, shared: Tensor | None = None) -> Tensor:
    """Each row of the result is a sum of weights[row, i] * y[entries[row, i]], in fp32: [rows, size] in y's dtype.

    y: [entries, size], contiguous; entries: int32 or int64 [rows, experts of a row]; weights: fp32 [rows, experts of a
    row], and with `shared` [rows, size] one more, which multiplies a row of it. Added in this order.
    """
    assert y.is_contiguous() and (shared is None or shared.is_contiguous()), "rows must be contiguous"
    (rows, experts) = entries.shape
    size = y.shape[1]
    out = y.new_empty(rows, size)
    if out.numel():
        _weighted_sum_kernel[(rows, triton.cdiv(size, COLUMNS_PER_PROGRAM))](
            out, y, entries.contiguous(), weights.contiguous(), y if shared is None else shared, size,
            EXPERTS=experts, HAS_SHARED=int(shared is not None), BLOCK=COLUMNS_PER_PROGRAM, enable_fp_fusion=True,
        )  # fmt: skip
    return out
