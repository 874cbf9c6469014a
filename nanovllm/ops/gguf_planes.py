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

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.ops.packed_panels import traded

UNIT = 256  # inputs
SEGMENT = 32  # inputs
ALIGNMENT = 16  # bytes: rows begin at a multiple
_CHUNK_BYTES = 4 << 20  # of rows that are put into order at a time
# Bits of a word of 8 bytes that trade places, as `traded` takes them.
_TRADES = ((0x00AA00AA00AA00AA, 7), (0x0000CCCC0000CCCC, 14), (0x00000000F0F0F0F0, 28))
Change = Callable[[Tensor, Tensor], None]  # makes the second of the first


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
    for chunk in _chunks(whole):
        write_planes(scheme, rows[chunk].clone(), whole[chunk])
    return whole


def planes_to_rows(scheme: str, planes: Tensor, in_features: int) -> Tensor:
    """The inverse of `rows_to_planes`, a copy: uint8 [out_features, bytes of a row of the file]."""
    planes_of = PLANES[scheme]
    row_bytes = in_features // planes_of.block_inputs * planes_of.block_bytes
    rows = planes.new_empty(len(planes), row_bytes)
    for chunk in _chunks(planes):
        whole = planes.new_empty(len(planes[chunk]), -(-in_features // UNIT) * planes_of.unit_bytes)
        for change, of_blocks, of_plane in _parts(planes_of, whole, planes[chunk]):
            change(of_plane, of_blocks)
        rows[chunk] = whole[:, :row_bytes]
    return rows


def write_planes(scheme: str, rows: Tensor, into: Tensor) -> None:
    """Write rows of a file's bytes, uint8 [..., bytes of a row], in planes to other memory [..., plane_bytes]."""
    planes = PLANES[scheme]
    if missing := -rows.shape[-1] % planes.unit_bytes:
        rows = F.pad(rows, (0, missing))
    for change, of_blocks, of_plane in _parts(planes, rows, into):
        change(of_blocks, of_plane)
    into[..., rows.shape[-1] :].zero_()


def _chunks(rows: Tensor) -> Iterator[slice]:
    """Some rows at a time."""
    count = max(1, _CHUNK_BYTES // max(1, rows.shape[1]))
    return (slice(begin, begin + count) for begin in range(0, len(rows), count))


def _parts(planes: Planes, rows: Tensor, memory: Tensor) -> Iterator[tuple[Change, Tensor, Tensor]]:
    """What each plane is made of: views of rows of whole units and of the plane, and what makes either of the other.

    All places are even, so that most views are of two bytes at a time, which is faster.
    """
    units = rows.shape[-1] // planes.unit_bytes
    blocks = rows.view(torch.int16).unflatten(-1, (units, planes.blocks, -1))
    sizes = [planes.low_bytes, planes.high_bytes, *(planes.blocks * (end - begin) for begin, end in planes.rest)]
    ends = list(accumulate((units * size // 2 for size in sizes), initial=0))
    low, high, *rest = (
        memory.view(torch.int16)[..., begin:end].unflatten(-1, (units, -1)) for begin, end in pairwise(ends)
    )
    numbers = _words(blocks, planes.low, planes.low_bytes // planes.blocks)
    if planes.block_inputs == SEGMENT and planes.bits < 8:  # the halves of a block's bytes are of one segment
        yield _trade_halves, numbers.unflatten(-2, (-1, 2)), low.unflatten(-1, (4, 2, -1))
    elif planes.bits == 6:
        yield _trade_halves, numbers.squeeze(-2).unflatten(-1, (2, 2, -1)), low.unflatten(-1, (2, 2, -1))
    else:
        yield _copy, numbers, low.unflatten(-1, (planes.blocks, -1))
    bits = _words(blocks, planes.high, planes.high_bytes // planes.blocks)
    if planes.high_bytes and planes.block_inputs == SEGMENT:
        yield _transpose, bits.view(torch.uint8).transpose(-1, -2), high.view(torch.uint8).unflatten(-1, (4, 8))
    elif planes.high_bytes:
        yield _copy, bits.squeeze(-2), high
    for plane, (begin, end) in zip(rest, planes.rest, strict=True):
        yield _copy, _words(blocks, begin, end - begin), plane.unflatten(-1, (planes.blocks, -1))


def _words(blocks: Tensor, begin: int, size: int) -> Tensor:
    """Bytes of each block, which are int16 here."""
    return blocks[..., begin // 2 : (begin + size) // 2]


def _copy(source: Tensor, target: Tensor) -> None:
    target.copy_(source)


def _trade_halves(source: Tensor, target: Tensor) -> None:
    """int16 [..., 2, words]: the high halves of all bytes of the first trade places with the low ones of the second."""
    first, second = source.unbind(-2)
    differing = (first >> 4 ^ second) & 0x0F0F
    torch.bitwise_xor(second, differing, out=target[..., 1, :])
    differing <<= 4
    torch.bitwise_xor(first, differing, out=target[..., 0, :])


def _transpose(source: Tensor, target: Tensor) -> None:
    """uint8 [..., 8]: bit i of byte j becomes bit j of byte i."""
    squares = source.contiguous().view(torch.int64)
    target.copy_(traded(squares, _TRADES).view(torch.uint8))
