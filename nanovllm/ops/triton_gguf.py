"""Products with GGUF weights in Triton, and their values in 16 bits.

The weights are in planes (`gguf_planes`): 16 bytes of numbers at a time, with the scales apart. A number of 4 to 8 bits
is exact in bf16 and fp16, so that a product of inputs with one scale is exact up to its fp32 sum on the matrix units.
The scale multiplies that sum in fp32, and the minimum of a group multiplies the sum of its inputs. Nothing of a weight
is rounded. The bits of a row do not depend on the other rows, nor on how many there are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.ops.gguf_planes import PLANES, UNIT
from nanovllm.ops.triton_groups import group_of_tile, most_tiles

MOST_ROWS = 32  # with more, the weight in 16 bits and torch's product are faster
OUTPUTS = 32  # of a program's tile
# Reading the weights determines the time. With about so many programs all multiprocessors have several of them, whose
# loads overlap with the others' sums.
PROGRAMS = 2048
MOST_SPLITS = 8
DEQUANTIZED_ROWS = 16  # of a program
# What is subtracted from the numbers.
OFFSETS = {"q4_0": 8, "q5_0": 16, "q6_k": 32}


class PlaneWeight(Protocol):
    """What is asked of a weight in planes; see `packed_weights.PackedWeight`."""

    @property
    def scheme(self) -> str: ...

    @property
    def data(self) -> Tensor: ...

    @property
    def arrivals(self) -> Tensor | None: ...

    @property
    def planes(self) -> bool: ...

    @property
    def in_features(self) -> int: ...

    @property
    def out_features(self) -> int: ...


@dataclass(frozen=True, slots=True)
class GgufConfig:
    """One launch of the kernel; not tuned by timing. The bits of a row depend on splits alone."""

    rows: int  # of a tile
    outputs: int  # of a tile
    splits: int  # parts of the inputs, each summed by programs of its own
    warps: int
    stages: int


def gguf_config(rows: int, out_features: int, in_features: int, dtype: torch.dtype) -> GgufConfig:
    """Tiles for so many rows of a product, or of an expert on average.

    Two warps: from four on the compiler takes another instruction of Hopper's, whose tiles are larger. fp32, which has
    no matrix units, is for exactness only.
    """
    units = triton.cdiv(in_features, UNIT)
    splits = min(MOST_SPLITS, units, max(1, PROGRAMS // triton.cdiv(out_features, OUTPUTS)))
    if dtype == torch.float32:
        return GgufConfig(8, 16, splits, 2, 1)
    return GgufConfig(8 if rows <= 8 else 16, OUTPUTS, splits, 2, 2)  # of 32 rows it would spill registers


@triton.constexpr_function
def _assembly(segment, bits, offset, is_bf16):  # type: ignore[no-untyped-def]
    """PTX for four numbers of a segment as 16-bit floats: $2 has the bytes of the low plane, $3 those of the high one.

    A byte below the upper byte of 128 in bf16, or of 1024 in fp16, is that number plus the byte, exactly. Signed bytes
    in bf16 have one bit more than fits: they are (128 + the low seven bits) - (128 or, if negative, 256).
    """
    if bits == 8:
        read = "and.b32 n, $2, 0x7f7f7f7f; and.b32 h, $2, 0x80808080;" if is_bf16 else "xor.b32 n, $2, 0x80808080;"
    else:
        read = f"shr.b32 n, $2, {segment % 2 * 4}; and.b32 n, n, 0x0f0f0f0f;"
    if bits == 5 or bits == 6:
        at = segment if bits == 5 else segment % 4 * 2
        read += f"shl.b32 h, $3, {4 - at};" if at <= 4 else f"shr.b32 h, $3, {at - 4};"
        read += f"and.b32 h, h, {0x10101010 if bits == 5 else 0x30303030}; or.b32 n, n, h;"
    widened = "mov.b32 m, {}; prmt.b32 a, n, m, 0x4140; prmt.b32 b, n, m, 0x4342;"
    if not is_bf16:
        less = 0x6400 + (128 if bits == 8 else offset)
        end = f"mov.b32 c, {less * 0x10001}; sub.f16x2 $0, a, c; sub.f16x2 $1, b, c;"
        return f"{{.reg .b32 n, h, m, a, b, c; {read} {widened.format(0x64646464)} {end}}}"
    if bits == 8:
        end = "prmt.b32 c, h, m, 0x4140; prmt.b32 h, h, m, 0x4342; mov.b32 m, 0xbf80bf80;"
        end += "fma.rn.bf16x2 $0, c, m, a; fma.rn.bf16x2 $1, h, m, b;"
    else:
        end = f"mov.b32 c, {(0xC300 + offset) * 0x10001}; mov.b32 m, 0x3f803f80;"
        end += "fma.rn.bf16x2 $0, a, m, c; fma.rn.bf16x2 $1, b, m, c;"
    return f"{{.reg .b32 n, h, m, a, b, c; {read} {widened.format(0x43434343)} {end}}}"


@triton.jit
def _numbers(  # type: ignore[no-untyped-def]
    low, high, S: tl.constexpr, BITS: tl.constexpr, OFFSET: tl.constexpr, dtype: tl.constexpr, ASSEMBLY: tl.constexpr
):
    """The numbers of segment S less the offset of the scheme, exact in dtype. low, high: bytes, of the two planes."""
    if ASSEMBLY:
        read = [low, high] if BITS == 5 or BITS == 6 else [low]
        constraints: tl.constexpr = "=r,=r,r,r" if BITS == 5 or BITS == 6 else "=r,=r,r"
        code: tl.constexpr = _assembly(S, BITS, OFFSET, dtype == tl.bfloat16)
        numbers = tl.inline_asm_elementwise(code, constraints, read, tl.int16, True, 4).to(dtype, bitcast=True)
    elif BITS == 8:
        numbers = low.to(tl.int8, bitcast=True).to(tl.int32).to(dtype)
    else:
        number = ((low >> 4) if S % 2 else (low & 15)).to(tl.int32)
        if BITS == 5:
            number |= ((high >> S) & 1).to(tl.int32) << 4
        if BITS == 6:
            number |= ((high >> (S % 4 * 2)) & 3).to(tl.int32) << 4
        numbers = (number - OFFSET).to(dtype)
    return numbers


@triton.jit
def _ones(low, dtype: tl.constexpr, ASSEMBLY: tl.constexpr):  # type: ignore[no-untyped-def]
    """Ones beside bytes. They seem to be made of them, so that the compiler lays them out as it does the numbers."""
    if ASSEMBLY:
        two: tl.constexpr = "0x3f803f80" if dtype == tl.bfloat16 else "0x3c003c00"
        code: tl.constexpr = "mov.b32 $0, " + two + "; mov.b32 $1, " + two + ";"
        ones = tl.inline_asm_elementwise(code, "=r,=r,r", [low], tl.int16, True, 4).to(dtype, bitcast=True)
    else:
        ones = tl.full(low.shape, 1.0, dtype)
    return ones


@triton.jit
def _half(word, WHICH: tl.constexpr):  # type: ignore[no-untyped-def]
    """The fp16 number in the low (0) or high (1) half of int32 words, in fp32."""
    return (word >> (16 * WHICH)).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _scales(first_at, second_at, mask, S: tl.constexpr, SCHEME: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of a segment of each output: the scale, and what is subtracted from its weights; of q6_k the two scales. fp32.

    first_at, second_at: where the planes of scales have a unit's bytes.
    """
    words_at = first_at.to(tl.pointer_type(tl.int32))
    if SCHEME == "q4_k" or SCHEME == "q5_k":
        AT: tl.constexpr = S % 4 * 8
        scales = tl.load(words_at, mask=mask, other=0)
        minimums = tl.load(words_at + 1, mask=mask, other=0)
        if S >= 4:  # the low four bits of both, in one word, and the two upper bits above those of the first four
            low = tl.load(words_at + 2, mask=mask, other=0)
            scales = (low & 0x0F0F0F0F) | ((scales >> 2) & 0x30303030)
            minimums = ((low >> 4) & 0x0F0F0F0F) | ((minimums >> 2) & 0x30303030)
        both = tl.load(second_at.to(tl.pointer_type(tl.int32)), mask=mask, other=0)
        scale = _half(both, 0) * ((scales >> AT) & 63).to(tl.float32)
        return scale, _half(both, 1) * ((minimums >> AT) & 63).to(tl.float32)
    elif SCHEME == "q6_k":
        word = tl.load(words_at + S // 2, mask=mask, other=0)
        d = tl.load(second_at.to(tl.pointer_type(tl.float16)), mask=mask, other=0.0).to(tl.float32)
        first = (word << (24 - S % 2 * 16)) >> 24
        return d * first.to(tl.float32), d * ((word << (16 - S % 2 * 16)) >> 24).to(tl.float32)
    elif SCHEME == "q4_1" or SCHEME == "q5_1":
        word = tl.load(words_at + S, mask=mask, other=0)
        return _half(word, 0), -_half(word, 1)
    else:
        scale = _half(tl.load(words_at + S // 2, mask=mask, other=0), S % 2)
        return scale, scale


@triton.jit(do_not_specialize=["rows"])
def _gguf_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    x_ptr,
    data_ptr,
    bias_ptr,
    parts_ptr,
    arrivals_ptr,
    rows_ptr,
    ends_ptr,
    rows,
    out_features,
    in_features,
    row_bytes,
    x_stride,
    out_stride,
    num_experts,
    SCHEME: tl.constexpr,
    BITS: tl.constexpr,
    OFFSET: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    EXPERTS: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):
    """Program (tile of outputs, tile of rows, part of the inputs). EXPERTS: 0 for one matrix.

    Of several parts the program that is done last adds all, in their order, whichever it is.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_output = n < out_features
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    if EXPERTS:
        expert, begin, end = group_of_tile(ends_ptr, num_experts, tl.program_id(1), EXPERTS, BLOCK_M)
        if expert >= num_experts:  # the grid has a tile for every expert, even if it has no rows
            return
        weight_row = expert.to(tl.int64) * out_features + n
        entry = begin + tl.arange(0, BLOCK_M)
        has_entry = entry < end
    else:
        weight_row = n.to(tl.int64)
        entry = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
        has_entry = entry < rows
    row = entry.to(tl.int64)
    if HAS_ROWS:
        row = tl.load(rows_ptr + entry, mask=has_entry, other=0)
    units = tl.cdiv(in_features, 256)
    feature = tl.arange(0, 32)
    row_at = data_ptr + weight_row * row_bytes
    low_at = row_at[:, None] + feature[None, :]
    high_at = low_at + units * LOW
    first_at = row_at + units * (LOW + HIGH)
    second_at = first_at + units * FIRST
    x_at = x_ptr + row[None, :] * x_stride + feature[:, None]
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    per_split = tl.cdiv(units, SPLITS)
    split = tl.program_id(2)
    for unit in range(split * per_split, min(units, (split + 1) * per_split)):
        for segment in tl.static_range(8):
            if BITS == 8:
                low = tl.load(low_at + unit * LOW + segment * 32, mask=is_output[:, None], other=0)
                high = low
            elif segment % 2 == 0:
                low = tl.load(low_at + unit * LOW + segment * 16, mask=is_output[:, None], other=0)
                if BITS == 4:
                    high = low
            if (BITS == 5 and segment == 0) or (BITS == 6 and segment % 4 == 0):
                high = tl.load(high_at + unit * HIGH + segment * 8, mask=is_output[:, None], other=0)
            column = unit * 256 + segment * 32
            # Conditions of masks are vectors, as the interpreter needs.
            inside = (has_entry & (column + tl.zeros((BLOCK_M,), tl.int32) < in_features))[None, :]
            numbers = _numbers(low, high, segment, BITS, OFFSET, dtype, ASSEMBLY)
            scale, other = _scales(first_at + unit * FIRST, second_at + unit * SECOND, is_output, segment, SCHEME)
            if SCHEME == "q6_k":  # scales are those of 16 inputs
                x = tl.load(x_at + column, mask=inside & (feature < 16)[:, None], other=0.0)
                total += tl.dot(numbers, x, input_precision="ieee") * scale[:, None]
                x = tl.load(x_at + column, mask=inside & (feature >= 16)[:, None], other=0.0)
                total += tl.dot(numbers, x, input_precision="ieee") * other[:, None]
            else:
                x = tl.load(x_at + column, mask=inside, other=0.0)
                total += tl.dot(numbers, x, input_precision="ieee") * scale[:, None]
            if SECOND == 4 or FIRST == 32:  # minimums: their product with the sum of the inputs
                ones = _ones(low, dtype, ASSEMBLY)
                total -= tl.dot(ones, x, input_precision="ieee") * other[:, None]
    inside = is_output[:, None] & has_entry[None, :]
    if SPLITS > 1:
        tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        size = rows.to(tl.int64) * out_features
        part_at = parts_ptr + entry.to(tl.int64)[None, :] * out_features + n[:, None]
        tl.store(part_at + split * size, total, mask=inside)
        tl.debug_barrier()
        if tl.atomic_add(arrivals_ptr + tile, 1, sem="acq_rel", scope="gpu") < SPLITS - 1:
            return
        tl.store(arrivals_ptr + tile, 0)
        total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for part in range(SPLITS):
            total += tl.load(part_at + part * size, mask=inside, other=0.0, cache_modifier=".cg")
    if HAS_BIAS:
        bias_row = weight_row if EXPERTS else n
        total += tl.load(bias_ptr + bias_row, mask=is_output, other=0.0).to(tl.float32)[:, None]
    out_at = out_ptr + entry.to(tl.int64)[None, :] * out_stride + n[:, None]
    tl.store(out_at, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _gguf_values_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    data_ptr,
    rows_ptr,
    num_rows,
    in_features,
    row_bytes,
    out_stride,
    SCHEME: tl.constexpr,
    BITS: tl.constexpr,
    OFFSET: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Program (unit, tile of rows)."""
    entry = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    unit = tl.program_id(0)
    mask = entry < num_rows
    row = entry.to(tl.int64)
    if HAS_ROWS:
        row = tl.load(rows_ptr + entry, mask=mask, other=0)
    units = tl.cdiv(in_features, 256)
    feature = tl.arange(0, 32)
    row_at = data_ptr + row * row_bytes
    low_at = row_at[:, None] + unit * LOW + feature[None, :]
    high_at = row_at[:, None] + units * LOW + unit * HIGH + feature[None, :]
    first_at = row_at + units * (LOW + HIGH) + unit * FIRST
    second_at = row_at + units * (LOW + HIGH + FIRST) + unit * SECOND
    out_at = out_ptr + entry.to(tl.int64)[:, None] * out_stride + unit * 256 + feature[None, :]
    for segment in tl.static_range(8):
        low = tl.load(low_at + (segment * 32 if BITS == 8 else segment // 2 * 32), mask=mask[:, None], other=0)
        high = low
        if BITS == 5 or BITS == 6:
            high = tl.load(high_at + (segment // 4 * 32 if BITS == 6 else 0), mask=mask[:, None], other=0)
        scale, other = _scales(first_at, second_at, mask, segment, SCHEME)
        value = _numbers(low, high, segment, BITS, OFFSET, tl.float32, False)
        if SCHEME == "q6_k":
            value *= tl.where((feature < 16)[None, :], scale[:, None], other[:, None])
        else:
            value *= scale[:, None]
        if SECOND == 4 or FIRST == 32:
            value -= other[:, None]
        inside = mask & (unit * 256 + segment * 32 + tl.zeros((BLOCK_N,), tl.int32) < in_features)
        tl.store(out_at + segment * 32, value.to(out_ptr.dtype.element_ty), mask=inside[:, None])


def _constants(scheme: str) -> dict[str, object]:
    """What the kernels know of a scheme."""
    planes = PLANES[scheme]
    of_rest = [(end - begin) * planes.blocks for begin, end in planes.rest]
    return {
        "SCHEME": scheme, "BITS": planes.bits, "OFFSET": OFFSETS.get(scheme, 0), "LOW": planes.low_bytes,
        "HIGH": planes.high_bytes, "FIRST": of_rest[0], "SECOND": sum(of_rest[1:]),
    }  # fmt: skip


def gguf_linear(
    x: Tensor,
    weight: PlaneWeight,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    config: GgufConfig | None = None,
) -> Tensor:
    """x W^T + b: [rows, in] -> [rows, out] in x's dtype, for few rows: one launch.

    weight: in planes. x, and out, memory for the result: rows may be strided, the elements of a row are contiguous.
    """
    (rows, in_features) = x.shape
    out_features = weight.out_features
    y = x.new_empty(rows, out_features) if out is None else out
    if not y.numel():
        return y
    config = config or gguf_config(rows, out_features, in_features, x.dtype)
    tiles = triton.cdiv(out_features, config.outputs), triton.cdiv(rows, config.rows)
    parts = y
    arrivals = weight.arrivals
    if config.splits > 1:
        parts = x.new_empty(config.splits, rows, out_features, dtype=torch.float32)
        if arrivals is None or len(arrivals) < tiles[0] * tiles[1]:
            arrivals = torch.zeros(tiles[0] * tiles[1], dtype=torch.int32, device=x.device)
    _launch(x, weight, bias, y, (*tiles, config.splits), config, parts=parts, arrivals=arrivals)
    return y


def gguf_grouped_linear(
    x: Tensor,
    weight: PlaneWeight,
    ends: Tensor,
    rows: Tensor | None = None,
    bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`triton_experts.grouped_linear` with GGUF weights, for any number of rows of an expert: [entries, out].

    weight: the matrices of all experts, one below the other, in planes: [experts * out, in], experts being len(ends).
    bias: [experts, out], contiguous, or None; the rest as there.
    """
    num_experts = len(ends)
    in_features = weight.in_features
    out_features = weight.out_features // num_experts
    entries = len(x) if rows is None else len(rows)
    y = x.new_empty(entries, out_features) if out is None else out
    if not y.numel():
        return y
    config = gguf_config(triton.cdiv(entries, num_experts), out_features, in_features, x.dtype)
    config = replace(config, splits=1)
    grid = triton.cdiv(out_features, config.outputs), most_tiles(entries, num_experts, config.rows), 1
    _launch(x, weight, bias, y, grid, config, ends=ends, indices=rows)
    return y


def _launch(
    x: Tensor,
    weight: PlaneWeight,
    bias: Tensor | None,
    y: Tensor,
    grid: tuple[int, int, int],
    config: GgufConfig,
    *,
    parts: Tensor | None = None,
    arrivals: Tensor | None = None,
    ends: Tensor | None = None,
    indices: Tensor | None = None,
) -> None:
    """An absent tensor is replaced by any other."""
    assert weight.planes and x.stride(1) == 1 and y.stride(1) == 1, "weights must be in planes, and rows contiguous"
    _gguf_kernel[grid](
        y, x, weight.data, y if bias is None else bias, y if parts is None else parts,
        y if arrivals is None else arrivals, y if indices is None else indices, y if ends is None else ends,
        len(y), y.shape[1], weight.in_features, weight.data.stride(0), x.stride(0), y.stride(0),
        0 if ends is None else len(ends), **_constants(weight.scheme),
        EXPERTS=0 if ends is None else triton.next_power_of_2(len(ends)), HAS_ROWS=indices is not None,
        HAS_BIAS=bias is not None, SPLITS=config.splits, BLOCK_M=config.rows, BLOCK_N=config.outputs,
        ASSEMBLY=x.dtype != torch.float32,
        num_warps=config.warps, num_stages=config.stages, enable_fp_fusion=True,
    )  # fmt: skip


def gguf_dequantize_(weight: PlaneWeight, out: Tensor, rows: Tensor | None = None) -> Tensor:
    """Write the weights, or some rows, into out [rows, in], rounded once to its dtype: the values of `dequantize`.

    weight: in planes; rows: int64 [rows] or None; out: rows may be strided. One launch. Returns out.
    """
    assert weight.planes and out.stride(1) == 1, "weights must be in planes, and rows contiguous"
    if out.numel():
        grid = triton.cdiv(weight.in_features, UNIT), triton.cdiv(len(out), DEQUANTIZED_ROWS)
        _gguf_values_kernel[grid](
            out, weight.data, out if rows is None else rows, len(out), weight.in_features, weight.data.stride(0),
            out.stride(0), **_constants(weight.scheme), HAS_ROWS=rows is not None, BLOCK_N=DEQUANTIZED_ROWS,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return out
