"""Where each bit of GGUF weights in planes comes from: the table of `gguf_planes`, written out bit by bit."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.ops.gguf_planes import PLANES, SEGMENT, UNIT, Planes, plane_bytes


def planes_by_bits(scheme: str, rows: Tensor, in_features: int) -> Tensor:
    """As `gguf_planes.rows_to_planes`, a copy."""
    source = _source_bits(scheme, in_features, plane_bytes(scheme, in_features), rows.device)
    shifts = torch.arange(8, dtype=torch.uint8, device=rows.device)
    bits = F.pad((rows.unsqueeze(-1) >> shifts & 1).flatten(1), (0, 1))  # behind its end a row has a bit 0
    return (bits[:, source].unflatten(1, (-1, 8)) << shifts).sum(-1, dtype=torch.uint8)


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
