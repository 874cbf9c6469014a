"""The bytes of a unit: copied out of the pools' blocks, and read into the blocks of another engine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from nanovllm.data.batch import BlockMove, StateMove
from nanovllm.data.kv_groups import HOLE
from nanovllm.device import CopyKind, Device, Event, PitchedCopy, Stream
from nanovllm.features.kv_disk.policy import UNIT
from nanovllm.kvcache.pools import KVPools
from nanovllm.kvcache.states import MOVE_KINDS


@dataclass(frozen=True, slots=True)
class UnitPlace:
    """Where the tokens of a unit are, from position `begin` on."""

    unit: int
    group: int
    begin: int
    blocks: Sequence[int]  # physical ids, from the block of the token at `begin` on


@dataclass(frozen=True, slots=True)
class StatePlace:
    """The slot of a recurrent state."""

    slot: int


Place = UnitPlace | StatePlace


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor of bytes, which it keeps alive."""
    array: Any = tensor.view(-1).numpy()
    return memoryview(array)


@dataclass(frozen=True)
class UnitCopier:
    """Copies units between host buffers and blocks on either tier.

    A unit's bytes are `[layers of the group, 2, kv_heads, UNIT, row_bytes]`, whatever the block size. `settled` is what
    `begin` returned: copies are made after it, and have ended when their method returns.
    """

    device: Device
    pools: KVPools

    def begin_thread(self) -> None:
        """The calling thread, which did not make the device, works with it from now on."""
        if self.device.torch_device.type == "cuda":
            torch.cuda.set_device(self.device.torch_device)

    def new_buffer(self, place: Place) -> Tensor:
        """Memory that copies reach directly; torch keeps what was pinned for the next buffer."""
        if isinstance(place, StatePlace):
            assert self.pools.states is not None
            shape: tuple[int, ...] = (sum(part.nbytes for part in self.pools.states.parts(0)),)
        else:
            layout = self.pools.layout.of_groups[place.group]
            shape = (layout.num_layers, 2, layout.num_kv_heads, UNIT, layout.row_bytes)
        return torch.empty(shape, dtype=torch.uint8, pin_memory=self.device.torch_device.type == "cuda")

    def begin(self, moves: Sequence[BlockMove] = (), state_moves: Sequence[StateMove] = ()) -> Event:
        """Carry out moves that were planned before. Between steps, by the thread that runs them."""
        if moves or state_moves:
            with self.device.compute():
                self.pools.move_blocks(moves, state_moves)
        return self.pools.order.before_outside_copies()

    def copy_out(self, place: Place, settled: Event) -> Tensor:
        """A new buffer with a state, or with the tokens of a unit and zeros before the place's first one."""
        buffer = self.new_buffer(place)
        if isinstance(place, StatePlace):
            self._copy_state(buffer, place.slot, settled, out=True)
            return buffer
        if place.begin > place.unit * UNIT:
            buffer.zero_()  # what was in this memory before must not be written
        with self.pools.order.outside_copies(settled) as stream:
            for span in self.spans(place):
                self._copy(buffer, place.group, *span, stream, out=True)
        return buffer

    def copy_in(self, buffer: Tensor, place: Place, settled: Event) -> None:
        """Write a state into its slot, or the tokens of a unit into the blocks, but for holes."""
        if isinstance(place, StatePlace):
            self._copy_state(buffer, place.slot, settled, out=False)
            return
        with self.pools.order.outside_copies(settled) as stream:
            for span in self.spans(place):
                if span[0] != HOLE:  # released: behind a window that begins within the unit
                    self._copy(buffer, place.group, *span, stream, out=False)

    def _copy(
        self, buffer: Tensor, group: int, physical_id: int, first: int, at: int, count: int, stream: Stream, out: bool
    ) -> None:
        """Copy `count` tokens of a block, from its token `first` on, out to the unit's tokens from `at` on, or back."""
        layout = self.pools.layout.of_groups[group]
        block = self.pools.layout.views(self.pools.block(physical_id))[group][: layout.num_layers]
        kind = self._kind(physical_id >= self.pools.split.resident_blocks, out)
        if count == layout.block_size == UNIT:  # a layer of each is contiguous
            pitch = block.stride(0) * block.element_size()
            size = layout.block_layer_bytes
            copies = [PitchedCopy(block, buffer, pitch, size, size, len(block), kind)]
        else:
            pitches = (layout.head_pitch, UNIT * layout.row_bytes)
            width = count * layout.row_bytes
            planes = zip(block[:, 0, 0, first:], buffer[:, 0, 0, at:], strict=True)
            copies = [PitchedCopy(*ends, *pitches, width, layout.rows_per_token, kind) for ends in planes]
        self._submit(copies, stream, out)

    def _submit(self, copies: Iterable[PitchedCopy], stream: Stream, out: bool) -> None:
        """Submit copies to blocks from a buffer, or out of them the other way round."""
        for copy in copies:
            if out:
                copy = replace(copy, dst=copy.src, src=copy.dst, dpitch=copy.spitch, spitch=copy.dpitch)
            self.device.copy_2d(copy, stream)

    def _kind(self, is_host: bool, out: bool) -> CopyKind:
        """Of copies between a buffer and a block or state on the host or the device."""
        return MOVE_KINDS[is_host][True] if out else MOVE_KINDS[True][is_host]

    def _copy_state(self, buffer: Tensor, slot: int, settled: Event, out: bool) -> None:
        assert self.pools.states is not None
        parts = self.pools.states.parts(slot)
        kind = self._kind(slot >= self.pools.states.num_device_slots, out)
        sizes = [part.nbytes for part in parts]
        pieces = zip(parts, buffer.split(sizes), sizes, strict=True)
        copies = [PitchedCopy(part, piece, size, size, size, 1, kind) for part, piece, size in pieces]
        with self.pools.order.outside_copies(settled) as stream:
            self._submit(copies, stream, out)

    def spans(self, place: UnitPlace) -> Iterator[tuple[int, int, int, int]]:
        """(physical id, first token in the block, first token in the unit, number of tokens) of the unit's blocks."""
        size = self.pools.layout.groups[place.group].block_size
        position = max(place.unit * UNIT, place.begin)
        end = (place.unit + 1) * UNIT
        for physical_id in place.blocks:
            first = position % size
            count = min(size - first, end - position)
            yield physical_id, first, position - place.unit * UNIT, count
            position += count
