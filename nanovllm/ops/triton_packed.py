"""Products with packed weights in Triton: int4, int8, fp8 and mxfp4 weights, inputs in bf16, fp16 or fp32.

A tile of quantized values minus their zero point is exact in each of these dtypes, so that a tile's product is exact up
to its fp32 sum. The scale multiplies the sum. Weights are read once for each tile of rows and are never written out.

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

SCHEMES = ("int4", "int8", "fp8", "mxfp4")
SMALLEST_TILE_ROWS = 16  # rows of the smallest tile
MOST_COLUMNS = 128  # of a tile
# With few rows, reading the weights determines the time. More programs than this are not needed to use the bandwidth.
PROGRAMS = 256
MOST_SPLITS = 8
ROUNDED_PER_PROGRAM = 2048  # inputs that a program rounds to fp8, but at least a group of one row


@dataclass(frozen=True, slots=True)
class PackedConfig:
    """One launch of the kernel; not tuned by timing."""

    rows: int  # of a tile
    outputs: int  # of a tile
    columns: int  # of a tile: inputs, within one group
    splits: int  # parts of the inputs, each summed by programs of its own
    warps: int
    stages: int


def packed_config(
    rows: int, out_features: int, in_features: int, group_size: int, dtype: torch.dtype = torch.bfloat16
) -> PackedConfig:
    """Tiles and splits for these sizes. They depend on the number of rows only by whether there are few.

    dtype: in which tiles of inputs and weights are multiplied.
    """
    most = MOST_COLUMNS if rows <= SMALLEST_TILE_ROWS or dtype.itemsize == 1 else MOST_COLUMNS // 2
    if dtype == torch.float32:  # for exactness only: larger tiles spill registers
        most = 32
    columns = min(most, group_size & -group_size) if group_size < in_features else most
    if rows > SMALLEST_TILE_ROWS and dtype.itemsize == 1:
        return PackedConfig(128, 128, columns, 1, 8, 3)
    if rows > SMALLEST_TILE_ROWS:
        size = 32 if dtype == torch.float32 else 64
        return PackedConfig(size, size, columns, 1, 4, 3)
    programs, steps = triton.cdiv(out_features, 32), triton.cdiv(in_features, columns)
    splits = min(MOST_SPLITS, steps, max(1, PROGRAMS // programs))
    return PackedConfig(SMALLEST_TILE_ROWS, 32, columns, splits, 4, 4)


@triton.jit
def _e4m3_values(codes):  # type: ignore[no-untyped-def]
    """The fp16 values of float8_e4m3fn codes without NaN: the bits of an fp16 number that is smaller by 2^8."""
    bits = ((codes & 127).to(tl.uint16) << 7) | ((codes & 128).to(tl.uint16) << 8)
    return bits.to(tl.float16, bitcast=True) * 256.0


@triton.jit
def _doubled_e2m1(codes):  # type: ignore[no-untyped-def]
    """Twice the values of float4_e2m1fn codes from 0 to 15, integers."""
    code = (codes & 7).to(tl.int32)
    size = tl.where(code < 4, code, tl.where(code < 6, 2 * code - 4, 4 * code - 16))
    return tl.where(codes >= 8, -size, size)


@triton.jit
def _half_of_power(codes):  # type: ignore[no-untyped-def]
    """2^(code - 128) of bytes; of codes 0 and 1 the power is subnormal."""
    code = codes.to(tl.int32)
    return tl.where(code > 1, (code - 1) << 23, (code + 1) << 21).to(tl.float32, bitcast=True)


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
    group_size,
    SCHEME: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    FP8_INPUTS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ROW_BYTES: tl.constexpr,
):
    """Program (tile of outputs, tile of rows, part of the inputs)."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    split = tl.program_id(2)
    is_row, is_output = (m < rows)[:, None], n < out_features
    dtype = x_ptr.dtype.element_ty
    x_row = x_ptr + m.to(tl.int64)[:, None] * x_stride
    scale_row = n * scale_columns
    steps = tl.cdiv(in_features, BLOCK_K)
    steps_per_split = tl.cdiv(steps, SPLITS)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(split * steps_per_split, min(steps, (split + 1) * steps_per_split)):
        group = (step * BLOCK_K) // group_size
        column = step * BLOCK_K + tl.arange(0, BLOCK_K)
        x = tl.load(x_row + column[None, :], mask=is_row & (column < in_features)[None, :], other=0.0)
        # Data tiles are [outputs, inputs], as in memory.
        byte = step * ROW_BYTES + tl.arange(0, ROW_BYTES)
        inside = is_output[:, None] & (byte < row_bytes)[None, :]
        data = tl.load(
            data_ptr + n.to(tl.int64)[:, None] * row_bytes + byte[None, :], mask=inside, other=0.0 if FP8_INPUTS else 0
        )
        if SCHEME == "int4" or SCHEME == "mxfp4":  # a byte holds two inputs, the even one in the low half
            data = tl.interleave(data & 15, data >> 4)
        if FP8_INPUTS:
            values = data
        elif SCHEME == "fp8":
            values = _e4m3_values(data).to(dtype)
        elif SCHEME == "mxfp4":
            values = _doubled_e2m1(data).to(dtype)
        elif HAS_ZEROS:
            zero = tl.load(zeros_ptr + n * scale_columns + group, mask=is_output, other=0).to(tl.int32)
            values = (data.to(tl.int32) - zero[:, None]).to(dtype)
        else:
            values = (data.to(tl.int32) - (8 if SCHEME == "int4" else 0)).to(dtype)
        if SCHEME == "mxfp4":
            scale = _half_of_power(tl.load(scales_ptr + scale_row + group, mask=is_output, other=0))
        else:
            scale = tl.load(scales_ptr + scale_row + group, mask=is_output, other=0.0).to(tl.float32)
        product = tl.dot(x, tl.trans(values), input_precision="ieee") * scale[None, :]
        if FP8_INPUTS:
            x_scale = tl.load(x_scales_ptr + m.to(tl.int64) * scale_columns + group, mask=m < rows, other=0.0)
            product *= x_scale[:, None]
        total += product
    if HAS_BIAS:
        total += tl.load(bias_ptr + n, mask=is_output, other=0.0).to(tl.float32)[None, :]
    out_at = out_ptr + (split * rows + m).to(tl.int64)[:, None] * out_features + n[None, :]
    tl.store(out_at, total.to(out_ptr.dtype.element_ty), mask=is_row & is_output[None, :])


@triton.jit(do_not_specialize=["rows"])
def _round_inputs_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    rounded_ptr,
    scales_ptr,
    rows,
    in_features,
    group_size,
    x_stride,
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
    tl.store(scales_ptr + row * tl.num_programs(1) + tl.program_id(1), scale, mask=row < rows)


def round_inputs(x: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """x [rows, in] in float8_e4m3fn, and the fp32 scales [rows, groups] of each row's groups of inputs.

    Elements and scales are those of `ops.kv_quantization`, with a group in the place of a row.
    """
    (rows, in_features), groups = x.shape, triton.cdiv(x.shape[1], group_size)
    rounded = torch.empty(rows, in_features, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(rows, groups, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(min(group_size, in_features))
    rows_per_program = max(1, ROUNDED_PER_PROGRAM // block)
    _round_inputs_kernel[(triton.cdiv(rows, rows_per_program), groups)](
        x, rounded.view(torch.int8), scales, rows, in_features, group_size, x.stride(0),
        BLOCK_R=rows_per_program, BLOCK_D=block, num_warps=max(4, min(16, block // 1024)), enable_fp_fusion=False,
    )  # fmt: skip
    return rounded, scales


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

    scheme: one of SCHEMES. x: rows may be strided, the elements of a row are contiguous. fp8_inputs: of scheme "fp8",
    whether x is rounded to fp8, on a GPU whose matrix units multiply fp8.
    """
    (rows, in_features), out_features = x.shape, data.shape[0]
    if not rows:
        return x.new_empty(0, out_features)
    assert x.stride(1) == 1 and data.is_contiguous() and scales.is_contiguous(), "rows must be contiguous"
    dtype, x_scales = x.dtype, scales  # an absent tensor is replaced by any other
    if fp8_inputs:
        x, x_scales = round_inputs(x, group_size)
    config = config or packed_config(rows, out_features, in_features, group_size, x.dtype)
    splits = config.splits
    out = x.new_empty(splits, rows, out_features, dtype=torch.float32 if splits > 1 else dtype)
    grid = (triton.cdiv(out_features, config.outputs), triton.cdiv(rows, config.rows), splits)
    # Not every GPU has a type for fp8, which is decoded from bytes.
    codes = data.view(torch.uint8) if scheme == "fp8" and not fp8_inputs else data
    _packed_kernel[grid](
        out, x, x_scales, codes, scales, scales if zeros is None else zeros, x if bias is None else bias, rows,
        out_features, in_features, data.shape[1], x.stride(0), scales.shape[1], group_size,
        SCHEME=scheme, HAS_ZEROS=zeros is not None, HAS_BIAS=bias is not None and splits == 1,
        FP8_INPUTS=fp8_inputs, SPLITS=splits,
        BLOCK_M=config.rows, BLOCK_N=config.outputs, BLOCK_K=config.columns,
        ROW_BYTES=config.columns // (2 if scheme in HALF_BYTES else 1),
        num_warps=config.warps, num_stages=config.stages, enable_fp_fusion=True,
    )  # fmt: skip
    if splits == 1:
        return out[0]
    total = out.sum(0)
    return (total if bias is None else total + bias.float()).to(dtype)
