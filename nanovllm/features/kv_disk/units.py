"""The bytes of a unit: copied out of the pools' blocks, and back into the blocks of another engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nanovllm.data.batch import BlockMove
from nanovllm.data.kv_groups import HOLE
from nanovllm.device import Device
from nanovllm.features.kv_disk.policy import UNIT
from nanovllm.kvcache.pools import KVPools


@dataclass(frozen=True)
class UnitCopier:
    """Copies units between host buffers and blocks on either tier. Used between steps.

    A unit's bytes are `[layers of the group, 2, kv_heads, UNIT, row_bytes]`, whatever the block size.
    """

    device: Device
    pools: KVPools

    def new_buffer(self, group: int) -> Tensor:
        layout = self.pools.layout.of_groups[group]
        return torch.empty((layout.num_layers, 2, layout.num_kv_heads, UNIT, layout.row_bytes), dtype=torch.uint8)

    def begin(self, moves: Sequence[BlockMove] = ()) -> None:
        """Carry out block moves that were planned before, and wait until nothing is under way."""
        if moves:
            with self.device.compute():
                self.pools.move_blocks(moves)
        self.pools.synchronize()

    def copy_out(self, unit: int, group: int, table: Sequence[int]) -> Tensor | None:
        """A new buffer with the tokens of the unit; None if blocks of it are holes. table: physical ids."""
        buffer, spans = self.new_buffer(group), list(self._spans(unit, group, 0, table))
        if len(spans) == 0 or any(physical_id == HOLE for physical_id, _, _, _ in spans):
            return None
        with self.device.compute():
            for physical_id, first, at, count in spans:
                buffer[:, :, :, at : at + count].copy_(self._rows(physical_id, group, first, count))
        return buffer

    def copy_in(self, buffer: Tensor, unit: int, group: int, begin: int, table: Sequence[int]) -> None:
        """Write the tokens of the unit from position `begin` on into the blocks of the table, but for its holes."""
        with self.device.compute():
            for physical_id, first, at, count in self._spans(unit, group, begin, table):
                if physical_id == HOLE:  # released: behind a window that begins within the unit
                    continue
                self._rows(physical_id, group, first, count).copy_(buffer[:, :, :, at : at + count])

    def _spans(self, unit: int, group: int, begin: int, table: Sequence[int]) -> Iterator[tuple[int, int, int, int]]:
        """(physical id, first token in the block, first token in the unit, number of tokens) of the unit's blocks."""
        size = self.pools.layout.groups[group].block_size
        position, end = max(unit * UNIT, begin), (unit + 1) * UNIT
        while position < end:
            index, first = divmod(position, size)
            count = min(size - first, end - position)
            yield table[index], first, position - unit * UNIT, count
            position += count

    def _rows(self, physical_id: int, group: int, first: int, count: int) -> Tensor:
        layout = self.pools.layout
        block = layout.views(self.pools.block(physical_id))[group]
        return block[: len(layout.groups[group].layers)].view(torch.uint8)[:, :, :, first : first + count]
