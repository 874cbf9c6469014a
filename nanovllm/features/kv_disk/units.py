"""The bytes of a unit: copied out of the pools' blocks, and read into the blocks of another engine."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from nanovllm.data.batch import BlockMove, StateMove
from nanovllm.data.kv_groups import HOLE
from nanovllm.device import Device
from nanovllm.features.kv_disk.policy import UNIT
from nanovllm.kvcache.pools import KVPools


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor of bytes, which it keeps alive."""
    found: Any = tensor.view(-1).numpy()
    return memoryview(found)


@dataclass(frozen=True)
class UnitCopier:
    """Copies units between host buffers and blocks on either tier.

    A unit's bytes are `[layers of the group, 2, kv_heads, UNIT, row_bytes]`, whatever the block size.
    """

    device: Device
    pools: KVPools

    def new_buffer(self, group: int) -> Tensor:
        return torch.empty(self._shape(group), dtype=torch.uint8)

    def num_bytes(self, group: int) -> int:
        return math.prod(self._shape(group))

    def _shape(self, group: int) -> tuple[int, ...]:
        layout = self.pools.layout.of_groups[group]
        return (layout.num_layers, 2, layout.num_kv_heads, UNIT, layout.row_bytes)

    def begin(self, moves: Sequence[BlockMove] = (), state_moves: Sequence[StateMove] = ()) -> None:
        """Carry out moves that were planned before, and wait until nothing is under way. Between steps."""
        if moves or state_moves:
            with self.device.compute():
                self.pools.move_blocks(moves, state_moves)
        self.pools.synchronize()

    def copy_out(self, unit: int, group: int, table: Sequence[int]) -> Tensor | None:
        """A new buffer with the tokens of the unit; None if blocks of it are holes. table: physical ids."""
        buffer, spans = self.new_buffer(group), list(self.spans(unit, group, 0, table))
        if len(spans) == 0 or any(physical_id == HOLE for physical_id, _, _, _ in spans):
            return None
        with self.device.compute():
            for physical_id, first, at, count in spans:
                buffer[:, :, :, at : at + count].copy_(self.rows(physical_id, group, first, count))
        return buffer

    def copy_in(self, buffer: Tensor, unit: int, group: int, begin: int, table: Sequence[int]) -> None:
        """Write the tokens of the unit from position `begin` on into the blocks of the table, but for its holes."""
        with self.device.compute():
            for physical_id, first, at, count in self.spans(unit, group, begin, table):
                if physical_id == HOLE:  # released: behind a window that begins within the unit
                    continue
                self.rows(physical_id, group, first, count).copy_(buffer[:, :, :, at : at + count])

    # ---- states of recurrent layers

    @cached_property
    def state_bytes(self) -> int:
        """Of the state of all layers; 0 without recurrent ones."""
        return 0 if self.pools.states is None else sum(part.nbytes for part in self.pools.states.parts(0))

    def copy_state_out(self, slot: int) -> Tensor:
        buffer = torch.empty(self.state_bytes, dtype=torch.uint8)
        with self.device.compute():
            for part, of_buffer in self._state_parts(slot, buffer):
                of_buffer.copy_(part)
        return buffer

    def copy_state_in(self, buffer: Tensor, slot: int) -> None:
        with self.device.compute():
            for part, of_buffer in self._state_parts(slot, buffer):
                part.copy_(of_buffer)

    def _state_parts(self, slot: int, buffer: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        assert self.pools.states is not None
        at = 0
        for part in self.pools.states.parts(slot):
            yield part, buffer[at : at + part.nbytes]
            at += part.nbytes

    def spans(self, unit: int, group: int, begin: int, table: Sequence[int]) -> Iterator[tuple[int, int, int, int]]:
        """(physical id, first token in the block, first token in the unit, number of tokens) of the unit's blocks."""
        size = self.pools.layout.groups[group].block_size
        position, end = max(unit * UNIT, begin), (unit + 1) * UNIT
        while position < end:
            index, first = divmod(position, size)
            count = min(size - first, end - position)
            yield table[index], first, position - unit * UNIT, count
            position += count

    def rows(self, physical_id: int, group: int, first: int, count: int) -> Tensor:
        """Bytes of tokens of a block, `[layers, 2, kv_heads, count, row_bytes]`."""
        layout = self.pools.layout
        block = layout.views(self.pools.block(physical_id))[group]
        return block[: len(layout.groups[group].layers)].view(torch.uint8)[:, :, :, first : first + count]


class UnitTarget:
    """Implements `loading.Target`: the blocks of a unit."""

    def __init__(self, copier: UnitCopier, unit: int, group: int, begin: int, table: Sequence[int]) -> None:
        """The tokens of the unit from position `begin` on are written; table: physical ids."""
        self._copier = copier
        self._place = (unit, group, begin, table)
        self._buffer: Tensor | None = None

    def views(self) -> Sequence[memoryview]:
        self._buffer = self._copier.new_buffer(self._place[1])
        return [bytes_of(self._buffer)]

    def take(self) -> None:
        assert self._buffer is not None
        self._copier.copy_in(self._buffer, *self._place)
        self._buffer = None


class StateTarget:
    """Implements `loading.Target`: the slot of a state. A state is one read."""

    def __init__(self, copier: UnitCopier, slot: int) -> None:
        self._copier = copier
        self._slot = slot
        self._buffer: Tensor | None = None

    def views(self) -> Sequence[memoryview]:
        self._buffer = torch.empty(self._copier.state_bytes, dtype=torch.uint8)
        return [bytes_of(self._buffer)]

    def take(self) -> None:
        assert self._buffer is not None
        self._copier.copy_state_in(self._buffer, self._slot)
        self._buffer = None
