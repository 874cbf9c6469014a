"""The order of packed weights in memory that the C++ kernel reads: panels of 16 outputs, interleaved. Nothing is lost.

The data of a panel are tiles, one for each block of inputs. A tile of a GGUF scheme whose blocks are not whole words of
four bytes begins with the fp16 numbers of the 16 outputs; then it has the first word of each output, the second word of
each, and so on. Of the words of fp8 it has bytes 0 and 2 of all 16 outputs, then their bytes 1 and 3. Bit 4i + j of the
word with the fifth bits of Q5_0 and Q5_1 becomes bit i of byte j, so that all words of four inputs are completed alike.
Scales and zeros become [panels, groups, 16]. Outputs are filled up to a multiple of 16 with zeros, and inputs of int4,
int8, fp8 and mxfp4 to a multiple of 32. csrc/cpu_packed.h says how they are multiplied.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

OUTPUTS = 16  # of a panel
HALF_BYTES = ("int4", "mxfp4")  # schemes with two inputs in a byte of a row
_INPUTS = 32  # of a block where the scales lie apart
_CHUNK_BYTES = 1 << 20  # of rows that are rearranged at a time
# Where in a block the fp16 number is that is not part of a whole word.
_HALF = {"q4_0": 0, "q5_0": 0, "q8_0": 0, "q6_k": 208}
_FIFTHS = {"q5_0": 0, "q5_1": 1}  # which of a block's words has the fifth bits
# A word's bits and how far up they trade places; in this order bit 4i + j comes to byte j, in the reverse order back.
_TRADES = ((0x0000AAAA, 15), (0x00CC00CC, 6), (0x0000FF00, 8), (0x0A0A0A0A, 3))
# Of two bytes of int4 and mxfp4, with inputs i and i + 16, i + 1 and i + 17: then each has two neighbours.
_HALF_BYTE_TRADES = ((0x00F000F0, 4),)


def rows_to_panels(scheme: str, rows: Tensor, block_bytes: int, in_place: bool = False) -> Tensor:
    """Rows of bytes, uint8 [out_features, bytes of a row] -> uint8 [panels, bytes of a panel].

    block_bytes: of a block in a row. in_place: if the panels fit the memory of the rows exactly, they take it and the
    rows are lost, so that the weight is never there twice.
    """
    panels = -(-rows.shape[0] // OUTPUTS)
    panel_bytes = -(-rows.shape[1] // block_bytes) * block_bytes * OUTPUTS
    fills = rows.is_contiguous() and rows.numel() == panels * panel_bytes
    data = rows.view(panels, panel_bytes) if in_place and fills else rows.new_empty(panels, panel_bytes)
    step = max(1, _CHUNK_BYTES // max(1, panel_bytes))
    for begin in range(0, panels, step):
        chunk = rows[begin * OUTPUTS : (begin + step) * OUTPUTS]
        data[begin : begin + step] = _blocks_to_panels(scheme, rows_to_blocks(scheme, chunk, block_bytes))
    return data


def _blocks_to_panels(scheme: str, blocks: Tensor) -> Tensor:
    """uint8 [out_features, blocks, bytes of a block] -> uint8 [panels, bytes of a panel]."""
    if missing := -blocks.shape[0] % OUTPUTS:  # else padding would copy
        blocks = F.pad(blocks, (0, 0, 0, 0, 0, missing))
    outputs = blocks.unflatten(0, (-1, OUTPUTS))
    num_panels, _, num_blocks, block_bytes = outputs.shape
    tiles = blocks.new_empty(num_panels, num_blocks, OUTPUTS * block_bytes)
    at = _HALF.get(scheme)
    first_word = 0
    if at is not None:
        halves = outputs.view(torch.int16)  # the fp16 number is the first or the last of a block
        tiles.view(torch.int16)[..., :OUTPUTS].copy_(halves[..., at // 2].transpose(1, 2))
        outputs = halves[..., 1:] if at == 0 else halves[..., :-1]
        first_word = OUTPUTS // 2
    words = outputs.contiguous().view(torch.int32).permute(0, 2, 3, 1)
    to = tiles.view(torch.int32)[..., first_word:].unflatten(-1, (-1, OUTPUTS))
    to.copy_(words)
    if scheme in _FIFTHS:
        fifths = to[..., _FIFTHS[scheme], :]
        fifths.copy_(traded(fifths, _TRADES))
    if scheme == "fp8":
        tiles = tiles.unflatten(2, (-1, OUTPUTS, 2, 2)).permute(0, 1, 2, 5, 3, 4).flatten(2)
    return tiles.flatten(1)


def panels_to_blocks(scheme: str, panels: Tensor, block_bytes: int, outputs: Tensor) -> Tensor:
    """The blocks of some outputs, int64 [rows], of panels: uint8 [rows, blocks, block_bytes]."""
    panel = outputs // OUTPUTS
    lane = outputs % OUTPUTS
    tiles = panels.view(panels.shape[0], -1, OUTPUTS * block_bytes)
    at = _HALF.get(scheme)
    half_bytes = 0 if at is None else 2 * OUTPUTS
    if scheme == "fp8":
        pairs = tiles.unflatten(-1, (-1, 2, OUTPUTS, 2))[panel, :, :, :, lane]
        return pairs.transpose(-1, -2).flatten(2)
    words = tiles[..., half_bytes:].unflatten(-1, (-1, OUTPUTS, 4))[panel, :, :, lane]
    if scheme in _FIFTHS:
        fifths = words.view(torch.int32)[:, :, _FIFTHS[scheme]]
        fifths.copy_(traded(fifths, _TRADES[::-1]))
    words = words.flatten(-2)
    if at is None:
        return words
    halves = tiles[..., :half_bytes].unflatten(-1, (OUTPUTS, 2))[panel, :, lane]
    return torch.cat((words[..., :at], halves, words[..., at:]), dim=-1)


def panels_to_rows(scheme: str, panels: Tensor, block_bytes: int, rows: Tensor) -> None:
    """Write the rows of whole panels, of several weights at once, on any device.

    panels: uint8 [n, panels, bytes of a panel]; rows: uint8 [n, 16 * panels, bytes of whole blocks], maybe strided.
    """
    tiles = panels.unflatten(2, (-1, OUTPUTS * block_bytes))
    blocks = rows.unflatten(1, (-1, OUTPUTS)).unflatten(3, (-1, block_bytes))  # [n, panels, OUTPUTS, blocks, bytes]
    if scheme == "fp8":
        words = tiles.unflatten(3, (-1, 2, OUTPUTS, 2))
        blocks.unflatten(4, (-1, 2, 2)).copy_(words.permute(0, 1, 5, 2, 3, 6, 4))
    elif scheme in HALF_BYTES:
        # Then the even bytes of a block are the first half of those of a row, and the odd ones the other.
        words = traded(tiles.view(torch.int32), _HALF_BYTE_TRADES).view(torch.uint8).unflatten(3, (4, OUTPUTS, 2, 2))
        blocks.unflatten(4, (2, 4, 2)).copy_(words.permute(0, 1, 4, 2, 6, 3, 5))
    elif scheme in _HALF:
        _words_to_blocks(tiles.view(torch.int16), blocks.view(torch.int16), _HALF[scheme] // 2)
    else:
        words = tiles.view(torch.int32).unflatten(3, (-1, OUTPUTS))
        blocks.view(torch.int32).copy_(words.permute(0, 1, 4, 2, 3))
    if scheme in _FIFTHS:
        begin = 2 * OUTPUTS * (scheme in _HALF) + 4 * OUTPUTS * _FIFTHS[scheme]
        words = tiles[..., begin : begin + 4 * OUTPUTS].view(torch.int32)
        fifths = traded(words, _TRADES[::-1]).view(torch.int16).unflatten(3, (OUTPUTS, 2))
        begin = begin // (2 * OUTPUTS)
        blocks.view(torch.int16)[..., begin : begin + 2].copy_(fifths.transpose(2, 3))


def _words_to_blocks(tiles: Tensor, blocks: Tensor, at: int) -> None:
    """Both int16, whose blocks have an fp16 number in place `at`, the first or the last, which is first in a tile."""
    blocks[..., at].copy_(tiles[..., :OUTPUTS].transpose(2, 3))
    words = tiles[..., OUTPUTS:].unflatten(3, (-1, OUTPUTS, 2))
    others = blocks[..., 1:] if at == 0 else blocks[..., :-1]
    others.unflatten(4, (-1, 2)).copy_(words.permute(0, 1, 4, 2, 3, 5))


def traded(words: Tensor, trades: Sequence[tuple[int, int]]) -> Tensor:
    """Integers with the bits of each mask and those so many places above them exchanged, a trade after the other."""
    for mask, places in trades:
        differing = words >> places
        differing ^= words
        differing &= mask
        words = words ^ differing
        differing <<= places  # in place, as above: pieces of weights are large
        words ^= differing
    return words


def groups_to_panels(values: Tensor) -> Tensor:
    """Scales or zeros [out_features, groups] -> [panels, groups, OUTPUTS]."""
    padded = F.pad(values, (0, 0, 0, -values.shape[0] % OUTPUTS))
    return padded.unflatten(0, (-1, OUTPUTS)).transpose(1, 2).contiguous()


def panels_to_groups(values: Tensor, outputs: Tensor) -> Tensor:
    """The inverse of `groups_to_panels` for some outputs, int64 [rows]: [rows, groups]."""
    return values[outputs // OUTPUTS, :, outputs % OUTPUTS]


def rows_to_blocks(scheme: str, data: Tensor, block_bytes: int) -> Tensor:
    """Rows of bytes, uint8 [out_features, bytes of a row] -> uint8 [out_features, blocks, block_bytes].

    A byte of int4 and mxfp4 has an even input and the next one in a row, but inputs i and i + 16 in a block, as in
    GGUF.
    """
    if missing := -data.shape[1] % block_bytes:  # else padding would copy
        data = F.pad(data, (0, missing))
    blocks = data.unflatten(1, (-1, block_bytes))
    if scheme not in HALF_BYTES:
        return blocks
    first, second = blocks.contiguous().view(torch.int64).unbind(-1)  # 8 bytes at a time
    low = 0x0F0F0F0F0F0F0F0F
    even = first & low | (second & low) << 4
    odd = first >> 4 & low | second & ~low
    return torch.stack([half.unsqueeze(-1).view(torch.uint8) for half in (even, odd)], dim=-1).flatten(-2)


def blocks_to_rows(scheme: str, blocks: Tensor, row_bytes: int) -> Tensor:
    """The inverse of `rows_to_blocks`: uint8 [out_features, row_bytes]."""
    if scheme in HALF_BYTES:
        even = blocks[..., 0::2]
        odd = blocks[..., 1::2]
        blocks = torch.cat((even & 15 | odd << 4, even >> 4 | odd & 240), dim=-1)
    return blocks.flatten(1)[:, :row_bytes].contiguous()
