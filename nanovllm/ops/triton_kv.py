"""8-bit rows of K and V in Triton: how kernels read an element, and how rows are written.

Elements are read as integers: e4m3 arithmetic needs a GPU of compute capability 8.9, its bits do not. Their values are
exact in fp16 and in bf16. An e4m3 byte shifted into fp16's places is the value times 2^-8, which the scale makes good.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.ops.kv_quantization import LARGEST, SCALE_BYTES

FORMATS = {torch.int8: 1, torch.float8_e4m3fn: 2}  # 0: elements of the queries' dtype, without scales
ROWS_PER_PROGRAM = 16


def stored_format(dtype: torch.dtype) -> int:
    """The kernels' FORMAT of KV blocks."""
    return FORMATS.get(dtype, 0)


def as_bytes(pool: Tensor) -> Tensor:
    """8-bit blocks as int8; others as they are."""
    return pool.view(torch.int8) if pool.dtype in FORMATS else pool


def scales_of(pool: Tensor) -> Tensor:
    """The memory of 8-bit blocks as fp32, of which the last in each row is its scale; others as they are."""
    return pool.view(torch.float32) if pool.dtype in FORMATS else pool


@triton.jit
def widen_elements(x, dtype: tl.constexpr, FORMAT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Elements in `dtype` without their scale, times a power of two that `load_scales` makes good."""
    if FORMAT == 2:
        bits = x.to(tl.int16)
        x = ((bits & 0x7F) << 7 | (bits & -32768)).to(tl.float16, bitcast=True)
    elif FORMAT and dtype == tl.float16:  # elements of about 1: small weights times a scale would be subnormal
        x = x.to(tl.float32) * 0.0078125
    if FORMAT:
        x = x.to(dtype)
    return x


@triton.jit
def load_scales(scales, mask, dtype: tl.constexpr, FORMAT: tl.constexpr):  # type: ignore[no-untyped-def]
    """The factors of `widen_elements` in `dtype` from the scales at these addresses, 0 where masked."""
    scale = tl.load(scales, mask=mask, other=0.0)
    if FORMAT == 2:
        scale *= 256.0
    elif dtype == tl.float16:
        scale *= 128.0
    return scale


@triton.jit
def _narrow_int8(x):  # type: ignore[no-untyped-def]
    """int8 of fp32 |x| <= 127 to the nearest, ties to even: the low bits of its sum with 1.5 * 2^23."""
    return (x + 12582912.0).to(tl.int32, bitcast=True) & 0xFF


@triton.jit
def _narrow_e4m3(x):  # type: ignore[no-untyped-def]
    """e4m3 of fp32 |x| <= 448 to the nearest, ties to even; below 2^-6 numbers are multiples of 2^-9."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    subnormal = (magnitude.to(tl.float32, bitcast=True) * 512.0 + 12582912.0).to(tl.int32, bitcast=True)
    return (tl.where(magnitude < (121 << 23), subnormal, normal) & 0x7F) | ((bits >> 24) & 0x80)


@triton.jit
def quantized(x, largest, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr, FORMAT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Elements and scales of the rows of fp32 x [BLOCK_R, BLOCK_D], as `kv_quantization` defines them."""
    top = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)  # as integers magnitudes keep their order, NaN on top
    wanted = tl.div_rn(top.to(tl.float32, bitcast=True), largest + tl.zeros([BLOCK_R], tl.float32))
    scale = tl.where(wanted < 1.1754943508222875e-38, 1.1754943508222875e-38, wanted)
    quotient = tl.div_rn(x, scale[:, None] + tl.zeros([BLOCK_R, BLOCK_D], tl.float32))
    element = _narrow_e4m3(quotient) if FORMAT == 2 else _narrow_int8(quotient)
    return element.to(tl.int8), scale


@triton.jit(do_not_specialize=["rows"])
def _quantize_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    rows_ptr,
    scales_ptr,
    rows,
    heads,
    head_dim,
    token_stride,
    head_stride,
    largest,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Program: BLOCK_R rows, counted over tokens and heads."""
    row = (tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)
    column = tl.arange(0, BLOCK_D)
    mask = (row < rows)[:, None] & (column < head_dim)[None, :]
    start = row // heads * token_stride + row % heads * head_stride
    x = tl.load(x_ptr + start[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
    element, scale = quantized(x, largest, BLOCK_R, BLOCK_D, FORMAT)
    tl.store(rows_ptr + row[:, None] * (head_dim + 4) + column[None, :], element, mask=mask)
    tl.store(scales_ptr + row * (head_dim // 4 + 1) + head_dim // 4, scale, mask=row < rows)


def quantize_rows_triton(x: Tensor, dtype: torch.dtype) -> Tensor:
    """See `kv_quantization.quantize_rows`; head_dim is a multiple of 4."""
    tokens, heads, head_dim = x.shape
    assert x.stride(2) == 1 and head_dim % SCALE_BYTES == 0, "rows must be dense, of a multiple of 4"
    rows = torch.empty(tokens, heads, head_dim + SCALE_BYTES, dtype=dtype, device=x.device)
    if rows.numel():
        _quantize_kernel[(triton.cdiv(tokens * heads, ROWS_PER_PROGRAM),)](
            x, as_bytes(rows), scales_of(rows), tokens * heads, heads, head_dim, *x.stride()[:2], LARGEST[dtype],
            BLOCK_R=ROWS_PER_PROGRAM, BLOCK_D=triton.next_power_of_2(head_dim), FORMAT=FORMATS[dtype],
            enable_fp_fusion=False,
        )  # fmt: skip
    return rows
