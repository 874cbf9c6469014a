"""Products of few rows with packed weights in Triton, and the weights in 16 bits for products of many rows.

Weights are int4, int8, fp8 or mxfp4, inputs bf16, fp16 or fp32. The numbers of a group without their scale are exact in
each of these dtypes, and so are products up to the sums in fp32, which the scale multiplies.

With few rows, reading the weights determines the time. A tile is [outputs, rows]: the packed bytes are copied to shared
memory several tiles ahead, in words of 16 bytes, become numbers in the registers from which the matrix units take
them, and are never written. So few warps compute a tile that each unpacks weights of its own.

With `fp8_inputs` each row of the inputs is rounded to fp8 as well, with a scale for each group of the weight, and the
matrix units multiply fp8 by fp8. A row's scales depend on the row alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.ops.packed_panels import HALF_BYTES
from nanovllm.ops.triton_kv import quantized
from nanovllm.ops.triton_unpack import unpack, unpack_halves, unpack_scales

FEW_ROWS = 16  # up to which the bits of a row do not depend on the number of rows
# More rows are faster with the weight in 16 bits: on an H200 a tile of 64 rows took 48 to 51 us of a matrix of 14,336 x
# 4,096, and with the weight in 16 bits a product took 12 to 49 us more than torch's of a plain weight.
MOST_ROWS = 64
LEAST_PAIRED = 64  # inputs of one scale, of which half fill the layout that matrix units read bytes in
COLUMNS = 128  # inputs of a step of the kernel, of one group or of several
# With few rows about so many programs, of two warps each, have enough reads on their way: beside 132 multiprocessors
# 3 to 4 on each, with 3 tiles of 4 KiB ahead. Fewer parts of the inputs would idle some, more would only be added up.
PROGRAMS = 512
# of few rows and of more, whose parts are more to add up
MOST_SPLITS = 8
MANY_SPLITS = 2
LEAST_STEPS = 4  # of a part
SUMMED_PER_PROGRAM = 1024
ROUNDED_PER_PROGRAM = 2048  # inputs that a program rounds to fp8, but at least a group of one row
DEQUANTIZED_PER_PROGRAM = 8192  # weights that a program writes in 16 bits


@dataclass(frozen=True, slots=True)
class PackedConfig:
    """One launch of the product's kernel; not tuned by timing."""

    rows: int  # of a tile
    outputs: int  # of a tile
    splits: int  # parts of the inputs, each summed by programs of its own
    warps: int
    stages: int


def packed_config(
    rows: int, out_features: int, in_features: int, dtype: torch.dtype = torch.bfloat16, group: int = COLUMNS
) -> PackedConfig:
    """Tiles and splits for these sizes. dtype: in which tiles of inputs and weights are multiplied.

    group: inputs of one scale, at most COLUMNS. The more products a tile has, the smaller it is.
    """
    if dtype == torch.float32:  # for exactness only: larger tiles spill registers
        return PackedConfig(16, 32, 1, 2, 2)
    few = rows <= FEW_ROWS
    outputs = 64 if group >= LEAST_PAIRED or not few else 32
    size = next(size for size in (8, 16, 32, 64) if rows <= size or size == 64)
    programs = triton.cdiv(out_features, outputs) * triton.cdiv(rows, size)
    steps = triton.cdiv(in_features, COLUMNS)
    most = min(MOST_SPLITS if few else MANY_SPLITS, PROGRAMS * 64 // outputs // programs, steps // LEAST_STEPS)
    splits = 1 << max(1, most).bit_length() - 1
    return PackedConfig(size, outputs, splits, 4 if size == 64 else 2, 4 if few else 3)


def inputs_of_one_scale(group_size: int, in_features: int) -> int:
    """A power of two up to COLUMNS: inputs that a program may treat alike."""
    return min(COLUMNS, group_size & -group_size) if group_size < in_features else COLUMNS


@triton.jit(do_not_specialize=["rows"])
def _packed_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    x_ptr,
    x_scales_ptr,
    data_ptr,
    scales_ptr,
    zeros_ptr,
    bias_ptr,
    rows,
    out_features,
    in_features,
    row_bytes,
    x_stride,
    scale_columns,
    SCHEME: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    FP8_INPUTS: tl.constexpr,
    PAIRS: tl.constexpr,
    SPLITS: tl.constexpr,
    GROUP_PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Program (tile of outputs, tile of rows, part of the inputs).

    BLOCK_K inputs have one scale, UNROLL times so many are a step. GROUP_PARTS: how often a group has BLOCK_K inputs;
    0 if it has all. PAIRS: even and odd inputs are multiplied apart, as the halves of the bytes that their weights are.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    split = tl.program_id(2)
    is_row = (m < rows)[None, :]
    output = tl.minimum(n, out_features - 1)  # no output beyond the last is stored
    scale_row = output * scale_columns
    byte = tl.arange(0, BLOCK_BYTES)
    column = tl.arange(0, BLOCK_K)
    data_at = data_ptr + output.to(tl.int64)[:, None] * row_bytes + byte[None, :]
    x_row = x_ptr + m.to(tl.int64)[None, :] * x_stride
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    if PAIRS:
        word_type: tl.constexpr = tl.int64 if dtype == tl.float32 else tl.int32
        half_type: tl.constexpr = tl.int32 if dtype == tl.float32 else tl.int16
        x_words = x_row.to(tl.pointer_type(word_type), bitcast=True) + byte[:, None]
    steps = tl.cdiv(in_features, UNROLL * BLOCK_K)
    steps_per_split = tl.cdiv(steps, SPLITS)
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for step in range(split * steps_per_split, min(steps, (split + 1) * steps_per_split)):
        for unrolled in tl.static_range(UNROLL):
            part = step * UNROLL + unrolled
            inside = byte < row_bytes - part * BLOCK_BYTES
            data = tl.load(data_at + part * BLOCK_BYTES, mask=inside[None, :], other=0.0 if FP8_INPUTS else 0)
            # Parts beyond the last input multiply zeros.
            group = tl.minimum(part // GROUP_PARTS, scale_columns - 1) if GROUP_PARTS else 0
            zeros = tl.load(zeros_ptr + scale_row + group) if HAS_ZEROS else None
            product = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            if PAIRS:
                words = tl.load(x_words + part * BLOCK_BYTES, mask=is_row & inside[:, None], other=0)
                low = words.to(half_type)
                high = (words >> (8 * dtype.itemsize)).to(half_type)
                even, odd = unpack_halves(data, zeros, SCHEME, dtype)
                product = tl.dot(even, low.to(dtype, bitcast=True), product, input_precision="ieee")
                product = tl.dot(odd, high.to(dtype, bitcast=True), product, input_precision="ieee")
            else:
                has_input = column < in_features - part * BLOCK_K
                x = tl.load(x_row + (part * BLOCK_K + column)[:, None], mask=is_row & has_input[:, None], other=0.0)
                values = data if FP8_INPUTS else unpack(data, zeros, SCHEME, dtype)
                product = tl.dot(values, x, product, input_precision="ieee")
            if GROUP_PARTS:
                product *= unpack_scales(tl.load(scales_ptr + scale_row + group), SCHEME)[:, None]
                if FP8_INPUTS:
                    product *= tl.load(x_scales_ptr + group * rows + m, mask=m < rows, other=0.0)[None, :]
            total += product
    if not GROUP_PARTS:
        total *= unpack_scales(tl.load(scales_ptr + output), SCHEME)[:, None]
        if FP8_INPUTS:
            total *= tl.load(x_scales_ptr + m, mask=m < rows, other=0.0)[None, :]
    if HAS_BIAS:
        total += tl.load(bias_ptr + output).to(tl.float32)[:, None]
    out_at = out_ptr + (split * rows + m).to(tl.int64)[None, :] * out_features + n[:, None]
    tl.store(out_at, total.to(out_ptr.dtype.element_ty), mask=is_row & (n < out_features)[:, None])


@triton.jit(do_not_specialize=["elements"])
def _sum_splits_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    parts_ptr,
    bias_ptr,
    elements,
    out_features,
    HAS_BIAS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program: BLOCK elements of all rows and outputs, the sum of their parts in order, and the bias."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < elements
    total = tl.load(parts_ptr + at, mask=mask, other=0.0)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(parts_ptr + split * elements + at, mask=mask, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias_ptr + at % out_features, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _dequantize_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    data_ptr,
    scales_ptr,
    zeros_ptr,
    out_features,
    in_features,
    row_bytes,
    row_parts,
    scale_columns,
    SCHEME: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    GROUP_PARTS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
):
    """Program: BLOCK_R parts of rows, counted over all rows, one after the other in memory; BLOCK_K inputs have one
    scale."""
    index = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    row = (index // row_parts).to(tl.int64)
    part = index % row_parts
    is_row = row < out_features
    byte = part[:, None] * BLOCK_BYTES + tl.arange(0, BLOCK_BYTES)[None, :]
    data = tl.load(data_ptr + row[:, None] * row_bytes + byte, mask=is_row[:, None] & (byte < row_bytes), other=0)
    scale_at = row * scale_columns + (part // GROUP_PARTS if GROUP_PARTS else 0)
    zeros = tl.load(zeros_ptr + scale_at, mask=is_row, other=0) if HAS_ZEROS else None
    values = unpack(data, zeros, SCHEME, out_ptr.dtype.element_ty).to(tl.float32)
    values *= unpack_scales(tl.load(scales_ptr + scale_at, mask=is_row, other=0), SCHEME)[:, None]
    column = part[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    mask = is_row[:, None] & (column < in_features)
    tl.store(out_ptr + row[:, None] * in_features + column, values.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows", "scale_stride"])
def _round_inputs_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    rounded_ptr,
    scales_ptr,
    rows,
    in_features,
    group_size,
    x_stride,
    scale_stride,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Program (BLOCK_R rows, group of inputs)."""
    row = (tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)
    of_group = tl.arange(0, BLOCK_D)
    column = tl.program_id(1) * group_size + of_group
    mask = (row < rows)[:, None] & ((of_group < group_size) & (column < in_features))[None, :]
    x = tl.load(x_ptr + row[:, None] * x_stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
    element, scale = quantized(x, 448.0, BLOCK_R, BLOCK_D, 2)
    tl.store(rounded_ptr + row[:, None] * in_features + column[None, :], element, mask=mask)
    tl.store(scales_ptr + tl.program_id(1) * scale_stride + row, scale, mask=row < rows)


def round_inputs(x: Tensor, group_size: int, multiple: int = 1) -> tuple[Tensor, Tensor]:
    """x [rows, in] in float8_e4m3fn, and the fp32 scales [rows, groups] of each row's groups of inputs.

    Elements and scales are those of `ops.kv_quantization`, with a group in the place of a row. The scales of a group
    lie one after the other. multiple: of the number of rows; those beyond x are not initialized.
    """
    (rows, in_features) = x.shape
    groups = triton.cdiv(x.shape[1], group_size)
    all_rows = triton.cdiv(rows, multiple) * multiple
    rounded = torch.empty(all_rows, in_features, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(groups, all_rows, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(min(group_size, in_features))
    rows_per_program = max(1, ROUNDED_PER_PROGRAM // block)
    _round_inputs_kernel[(triton.cdiv(rows, rows_per_program), groups)](
        x, rounded.view(torch.int8), scales, rows, in_features, group_size, x.stride(0), all_rows,
        BLOCK_R=rows_per_program, BLOCK_D=block, num_warps=max(4, min(16, block // 1024)), enable_fp_fusion=False,
    )  # fmt: skip
    return rounded, scales.t()


def packed_linear(
    x: Tensor,
    scheme: str,
    data: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    group_size: int,
    bias: Tensor | None = None,
    config: PackedConfig | None = None,
    *,
    fp8_inputs: bool = False,
) -> Tensor:
    """x W^T + b: [rows, in] -> [rows, out]; the other arguments are those of `packed_weights.PackedWeight`.

    scheme: one of `triton_unpack.SCHEMES`. x: rows may be strided, the elements of a row are contiguous. fp8_inputs: of
    scheme "fp8", whether x is rounded to fp8, on a GPU whose matrix units multiply fp8.
    """
    (rows, in_features) = x.shape
    out_features = data.shape[0]
    if not rows:
        return x.new_empty(0, out_features)
    assert x.stride(1) == 1 and data.is_contiguous() and scales.is_contiguous(), "rows must be contiguous"
    # an absent tensor is replaced by any other
    dtype = x.dtype
    x_scales = scales
    if fp8_inputs:
        x, x_scales = round_inputs(x, group_size)
    block = inputs_of_one_scale(group_size, in_features)
    config = config or packed_config(rows, out_features, in_features, x.dtype, block)
    splits = config.splits
    pairs = scheme in HALF_BYTES and config.rows <= FEW_ROWS and block >= LEAST_PAIRED
    if pairs and (x.stride(0) % 2 or x.data_ptr() % (2 * x.itemsize)):
        x = x.contiguous()
    out = x.new_empty(rows, out_features, dtype=dtype)
    parts = out if splits == 1 else x.new_empty(splits, rows, out_features, dtype=torch.float32)
    has_bias = bias is not None
    some_bias = x if bias is None else bias
    grid = (triton.cdiv(out_features, config.outputs), triton.cdiv(rows, config.rows), splits)
    # Not every GPU has a type for fp8, which is decoded from bytes.
    codes = data.view(torch.uint8) if scheme == "fp8" and not fp8_inputs else data
    _packed_kernel[grid](
        parts, x, x_scales, codes, scales, scales if zeros is None else zeros, some_bias, rows, out_features,
        in_features, data.shape[1], x.stride(0), scales.shape[1],
        SCHEME=scheme, HAS_ZEROS=zeros is not None, HAS_BIAS=has_bias and splits == 1, FP8_INPUTS=fp8_inputs,
        PAIRS=pairs, SPLITS=splits, GROUP_PARTS=group_parts(group_size, in_features), BLOCK_M=config.rows,
        BLOCK_N=config.outputs, BLOCK_K=block, BLOCK_BYTES=block // 2 if scheme in HALF_BYTES else block,
        UNROLL=COLUMNS // block, num_warps=config.warps, num_stages=config.stages, enable_fp_fusion=True,
    )  # fmt: skip
    if splits > 1:
        _sum_splits_kernel[(triton.cdiv(out.numel(), SUMMED_PER_PROGRAM),)](
            out, parts, some_bias, out.numel(), out_features, HAS_BIAS=has_bias, SPLITS=splits,
            BLOCK=SUMMED_PER_PROGRAM, enable_fp_fusion=False,
        )  # fmt: skip
    return out


def dequantize_(
    out: Tensor, scheme: str, data: Tensor, scales: Tensor, zeros: Tensor | None, group_size: int
) -> Tensor:
    """Write the weight's values to out [out_features, in_features], contiguous, rounded to its dtype, and return it.

    Every packed byte is read once, and whole lines are written. Numbers times scales are rounded to fp32 first, which
    changes nothing with scales of 16 bits: there they are exact. fp16 rounds values below 2^-14 to multiples of 2^-24.
    """
    out_features, in_features = out.shape
    assert out.is_contiguous() and data.is_contiguous() and scales.is_contiguous(), "rows must be contiguous"
    half_bytes = scheme in HALF_BYTES
    block = inputs_of_one_scale(group_size, in_features)
    row_parts = triton.cdiv(in_features, block)
    parts_at_once = DEQUANTIZED_PER_PROGRAM // block
    _dequantize_kernel[(triton.cdiv(out_features * row_parts, parts_at_once),)](
        out, data.view(torch.uint8), scales, scales if zeros is None else zeros, out_features, in_features,
        data.shape[1], row_parts, scales.shape[1],
        SCHEME=scheme, HAS_ZEROS=zeros is not None, GROUP_PARTS=group_parts(group_size, in_features),
        BLOCK_R=parts_at_once, BLOCK_K=block, BLOCK_BYTES=block // 2 if half_bytes else block,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def group_parts(group_size: int, in_features: int) -> int:
    """How many times `inputs_of_one_scale` a group has, 0 if it has all inputs."""
    return group_size // inputs_of_one_scale(group_size, in_features) if group_size < in_features else 0
