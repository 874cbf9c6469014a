"""The order of GGUF weights in memory that the Triton kernels read: planes of numbers, then planes of scales.

A block of GGUF is not a whole number of 16-byte words, and has numbers and scales side by side. Here each row is put
into another order by itself: rows can still be cut out, and no bit is lost. A unit has the bits of 256 inputs, which
are 8 segments of 32. A row is a sequence of planes; a plane has the same bytes of every unit:

| plane | bytes of a unit | |
|---|---|---|
| low | 128 | input i of segments 2p and 2p + 1 in the low and high half of byte 32p + i; of q8_0 256, a byte each |
| fifth bits (q5_0, q5_1, q5_k) | 32 | of input i of segment s in bit s of byte i |
| fifth and sixth bits (q6_k) | 64 | of input i of segment 4h + s in bits 2s and 2s + 1 of byte 32h + i |
| scales | 12 or 16 | of the K types, as in the file |
| fp16 numbers | 2 to 32 | as in the file: one or two of each block |

Rows are filled up with zeros to whole units, and to a multiple of 16 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.ops.packed_panels import traded

UNIT = 256  # inputs
SEGMENT = 32  # inputs
ALIGNMENT = 16  # bytes: rows begin at a multiple
_CHUNK_BYTES = 4 << 20  # of rows that are put into order at a time; on the way back their bits take 24 times as much
_SHIFTS = tuple(range(8))
# Of a unit of these block inputs and bits of a number: how many pairs of parts with low bits trade halves of bytes.
_PAIRS = {(32, 4): 4, (32, 5): 4, (256, 6): 2}
# Bits that trade places, as `traded` takes them, so that bit i of byte j of a word becomes bit j of byte i.
_TRANSPOSE = ((0x00AA00AA00AA00AA, 7), (0x0000CCCC0000CCCC, 14), (0x00000000F0F0F0F0, 28))


@dataclass(frozen=True, slots=True)
class Planes:
    """How a scheme's block becomes planes. Places are bytes in a block of the file."""

    block_inputs: int  # of a block of the file
    block_bytes: int
    low: int  # where the low four bits of the numbers begin, or all eight of q8_0
    high: int  # where the other bits begin
    bits: int  # of a number
    rest: tuple[tuple[int, int], ...]  # (begin, end) of each plane of scales

    @property
    def blocks(self) -> int:
        """Blocks of a unit."""
        return UNIT // self.block_inputs

    @property
    def low_bytes(self) -> int:
        return UNIT if self.bits == 8 else UNIT // 2

    @property
    def high_bytes(self) -> int:
        return 0 if self.bits == 8 else (self.bits - 4) * UNIT // 8

    @property
    def unit_bytes(self) -> int:
        """Of all planes."""
        return self.blocks * self.block_bytes


PLANES = {
    "q4_0": Planes(32, 18, 2, 0, 4, ((0, 2),)),
    "q4_1": Planes(32, 20, 4, 0, 4, ((0, 4),)),
    "q5_0": Planes(32, 22, 6, 2, 5, ((0, 2),)),
    "q5_1": Planes(32, 24, 8, 4, 5, ((0, 4),)),
    "q8_0": Planes(32, 34, 2, 0, 8, ((0, 2),)),
    "q4_k": Planes(256, 144, 16, 0, 4, ((4, 16), (0, 4))),
    "q5_k": Planes(256, 176, 48, 16, 5, ((4, 16), (0, 4))),
    "q6_k": Planes(256, 210, 0, 128, 6, ((192, 208), (208, 210))),
}


def plane_bytes(scheme: str, in_features: int) -> int:
    """Bytes of a row in planes."""
    used = -(-in_features // UNIT) * PLANES[scheme].unit_bytes
    return -(-used // ALIGNMENT) * ALIGNMENT


def empty_rows(scheme: str, out_features: int, in_features: int, device: torch.device) -> Tensor:
    """Memory for rows of a file's bytes, uint8 [out_features, bytes of a row], with room for planes in their place."""
    planes = PLANES[scheme]
    row_bytes = in_features // planes.block_inputs * planes.block_bytes
    memory = torch.empty(out_features, plane_bytes(scheme, in_features), dtype=torch.uint8, device=device)
    return memory.narrow(1, 0, row_bytes)


def rows_to_planes(scheme: str, rows: Tensor, in_features: int) -> Tensor:
    """Rows of a file's bytes, uint8 [out_features, bytes of a row] -> uint8 [out_features, plane_bytes].

    If each row begins plane_bytes after the one before it, the planes take the place of the rows, which are lost. Else
    the result is a copy.
    """
    size = plane_bytes(scheme, in_features)
    has_room = rows.stride() == (size, 1) and rows.shape[1] <= size
    whole = rows.as_strided((len(rows), size), (size, 1)) if has_room else rows.new_empty(len(rows), size)
    count = max(1, _CHUNK_BYTES // max(1, size))
    for begin in range(0, len(rows), count):
        write_planes(scheme, rows[begin : begin + count].clone(), whole[begin : begin + count])
    return whole


def write_planes(scheme: str, rows: Tensor, into: Tensor) -> None:
    """Write rows of a file's bytes, uint8 [..., bytes of a row], in planes to other memory [..., plane_bytes]."""
    planes = PLANES[scheme]
    num_units = -(-rows.shape[-1] // planes.unit_bytes)
    if missing := num_units * planes.unit_bytes - rows.shape[-1]:
        rows = F.pad(rows, (0, missing))
    # All places are even, and work on two bytes is faster than on one.
    blocks = rows.view(torch.int16).unflatten(-1, (num_units, planes.blocks, -1))
    sizes = [planes.low_bytes, planes.high_bytes, *(planes.blocks * (end - begin) for begin, end in planes.rest)]
    ends = list(accumulate((num_units * size // 2 for size in sizes), initial=0))
    low, high, *rest = (
        into.view(torch.int16)[..., begin:end].unflatten(-1, (num_units, -1)) for begin, end in pairwise(ends)
    )
    _write_low(planes, blocks, low)
    if planes.high_bytes:
        _write_high(planes, blocks, high)
    for plane, (begin, end) in zip(rest, planes.rest, strict=True):
        plane.unflatten(-1, (planes.blocks, -1)).copy_(blocks[..., begin // 2 : end // 2])
    into[..., 2 * ends[-1] :].zero_()


def _write_low(planes: Planes, blocks: Tensor, low: Tensor) -> None:
    """blocks: int16 [..., units, blocks, words of a block]; low: int16 [..., units, words of the plane]."""
    begin = planes.low // 2
    numbers = blocks[..., begin : begin + planes.low_bytes // planes.blocks // 2]
    pairs = _PAIRS.get((planes.block_inputs, planes.bits))
    if pairs is None:
        low.unflatten(-1, (planes.blocks, -1)).copy_(numbers)
        return
    # In the file the low halves of both of a pair are segments side by side; here they are of one byte.
    first, second = numbers.flatten(-2).unflatten(-1, (pairs, 2, -1)).unbind(-2)
    differing = (first >> 4 ^ second) & 0x0F0F
    to = low.unflatten(-1, (pairs, 2, -1))
    torch.bitwise_xor(first, differing << 4, out=to[..., 0, :])
    torch.bitwise_xor(second, differing, out=to[..., 1, :])


def _write_high(planes: Planes, blocks: Tensor, high: Tensor) -> None:
    """See `_write_low`."""
    begin = planes.high // 2
    bits = blocks[..., begin : begin + planes.high_bytes // planes.blocks // 2]
    if planes.blocks == 1:
        high.copy_(bits.squeeze(-2))
        return
    # 8 bits of each block's 32 become a bit of each of 8 bytes.
    squares = bits.contiguous().view(torch.uint8).transpose(-1, -2).contiguous().view(torch.int64)
    high.copy_(traded(squares, _TRANSPOSE).view(torch.int16).flatten(-2))


def planes_to_rows(scheme: str, planes: Tensor, in_features: int) -> Tensor:
    """The inverse of `rows_to_planes`, a copy: uint8 [out_features, bytes of a row of the file]."""
    planes_of = PLANES[scheme]
    row_bytes = in_features // planes_of.block_inputs * planes_of.block_bytes
    forward = _source_bits(scheme, in_features, planes.shape[1], planes.device)
    used = forward < 8 * row_bytes
    back = torch.empty(8 * row_bytes, dtype=torch.int64, device=planes.device)
    back[forward[used]] = torch.arange(len(forward), device=planes.device)[used]
    rows = planes.new_empty(len(planes), row_bytes)
    _permute_bits(planes, rows, back)
    return rows


def _permute_bits(rows: Tensor, into: Tensor, source: Tensor) -> None:
    """Bit i of a row of `into` becomes bit source[i] of the row, or 0 behind its end. Both may be the same memory."""
    count = max(1, _CHUNK_BYTES // max(1, into.shape[1]))
    shifts = torch.tensor(_SHIFTS, dtype=torch.uint8, device=rows.device)
    for begin in range(0, len(rows), count):
        chunk = rows[begin : begin + count]
        bits = chunk.new_zeros(len(chunk), 8 * chunk.shape[1] + 1)
        torch.bitwise_and(chunk.unsqueeze(-1) >> shifts, 1, out=bits[:, :-1].unflatten(1, (-1, 8)))
        moved = bits.index_select(1, source).unflatten(1, (-1, 8)) << shifts
        into[begin : begin + count] = moved.sum(-1, dtype=torch.uint8)


def _source_bits(scheme: str, in_features: int, size: int, device: torch.device) -> Tensor:
    """Where each bit of a row in planes is in a row of the file, behind its end if it is filled up: int64 [8 * size]"""
    planes = PLANES[scheme]
    units = -(-in_features // UNIT)
    row_bits = in_features // planes.block_inputs * planes.block_bytes * 8
    count = partial(torch.arange, dtype=torch.int64, device=device)
    of_input = count(UNIT)
    byte = count(8 * planes.unit_bytes)
    bits = count(planes.bits)
    # Of one unit: where each bit of each input is, and where it goes within its plane.
    block = of_input // planes.block_inputs
    inner = of_input % planes.block_inputs
    source = _number_bits(planes, inner[:, None], bits[None, :]) + (block * planes.block_bytes * 8)[:, None]
    segment = of_input[:, None] // SEGMENT
    place = of_input[:, None] % SEGMENT
    low_bits = 8 if planes.bits == 8 else 4
    per_byte = 8 // low_bits
    low = (segment // per_byte * SEGMENT + place) * 8 + segment % per_byte * low_bits + bits[None, :low_bits]
    parts = [_in_order(low, source[:, :low_bits])]
    if planes.high_bytes:
        width = planes.bits - 4
        per_byte = 8 // width
        high = (segment // per_byte * SEGMENT + place) * 8 + segment % per_byte * width + bits[None, :width]
        parts.append(_in_order(high, source[:, 4:]))
    for begin, end in planes.rest:
        blocks = count(planes.blocks)[:, None] * (planes.block_bytes * 8)
        parts.append((blocks + byte[8 * begin : 8 * end]).flatten())
    unit = count(units)[:, None] * (8 * planes.unit_bytes)
    source = torch.cat([(unit + part).flatten() for part in parts])
    source = F.pad(source, (0, 8 * size - len(source)), value=row_bits)
    return source.clamp_(max=row_bits)


def _in_order(to: Tensor, places: Tensor) -> Tensor:
    """The places in the order of `to`, where they go."""
    ordered = torch.empty_like(to.flatten())
    ordered[to.flatten()] = places.flatten()
    return ordered


def _number_bits(planes: Planes, i: Tensor, bit: Tensor) -> Tensor:
    """Where in its block bit `bit` of the number of input i is, as `packed_weights` reads them."""
    if planes.bits == 8:
        return (planes.low + i) * 8 + bit
    if planes.block_inputs == SEGMENT:
        low = (planes.low + i % 16) * 8 + i // 16 * 4 + bit
        high = (planes.high + i // 8) * 8 + i % 8
    elif planes.bits == 6:
        half = i // 128
        place = i % 128
        low = (planes.low + half * 64 + place % 64) * 8 + place // 64 * 4 + bit
        high = (planes.high + half * 32 + place % 32) * 8 + place // 32 * 2 + bit - 4
    else:
        low = (planes.low + i // 64 * 32 + i % 32) * 8 + i // 32 % 2 * 4 + bit
        high = (planes.high + i % 32) * 8 + i // 32
    return torch.where(bit < 4, low, high)
