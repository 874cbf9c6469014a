"""KV memory on both tiers, and every copy between them.

The device holds *resident* blocks (all layers) and a *ring* of slots (one layer of one block each); the host holds
the rest. A forward pass visits host blocks in an order that is known when it begins, layer after layer, so loads run
ahead through the ring, across layer boundaries too. Blocks that are attended in one call are a *run*, in neighbouring
slots: the ring has places for N runs, run i uses place i % N, and its loads are issued as soon as run i - N has let go
of that place.

Besides, the device may hold a *layer buffer* for layer-major prefill: one layer of the first blocks of one sequence.
Its slots, numbered after the ring's, live by the same order; `span_cache.py` says when each is filled and released.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import TypeVar

import torch
from torch import Tensor

from nanovllm.device import CopyKind, Device, PitchedCopy, Stream
from nanovllm.kvcache.block_mover import BlockMover, CountedCopies
from nanovllm.kvcache.budget import DeviceSplit, TransferCount
from nanovllm.kvcache.hybrid_manager import BlockMove
from nanovllm.kvcache.layout import KVLayout
from nanovllm.kvcache.prefill_plan import NO_SPANS, SpanMemory
from nanovllm.kvcache.transfer_order import TransferOrder

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class RingUse:
    """One visit to a host block in one layer. `stored_tokens` are loaded; 0 if nothing of it is on the host yet."""

    layer: int
    host_block: int
    stored_tokens: int


def in_runs(items: Sequence[Item], run_slots: int) -> list[Sequence[Item]]:
    """The items in consecutive runs, all but the last of `run_slots`."""
    return [items[first : first + run_slots] for first in range(0, len(items), run_slots)]


class OffloadEngine:
    """Owns the resident pool, the ring, the host pool and the swap pool.

    Slots are addressed by the order of the ring's uses.
    """

    def __init__(
        self,
        device: Device,
        layout: KVLayout,
        dtype: torch.dtype,
        split: DeviceSplit,
        num_host_blocks: int,
        num_swap_blocks: int = 0,
        spans: SpanMemory = NO_SPANS,
    ) -> None:
        self.device = device
        self.layout = layout
        self.split = split
        self.num_host_blocks = num_host_blocks
        self.spans = spans
        self.resident = device.empty("resident blocks", layout.device_pool_shape(split.resident_blocks), dtype)
        self.ring = device.empty("ring slots", layout.ring_shape(split.ring_slots), dtype)
        self.layer_buffer = device.empty("layer buffer", layout.ring_shape(spans.buffer_blocks), dtype)
        self.host = device.empty_host("host blocks", layout.host_pool_shape(num_host_blocks), dtype)
        self.swap = device.empty_host("swap blocks", layout.host_pool_shape(num_swap_blocks), dtype)
        self._order = TransferOrder(device, split.ring_slots)
        self._copies = CountedCopies(device)
        self._mover = BlockMover(self._copies, self._order, layout, self.resident, self.host, self.swap)
        self._memory: dict[range, Tensor] = {}  # of neighbouring slots; cutting the ring anew costs each visit more
        # Of the pass under way: its runs, where each stands, and how many the ring has room for.
        self._runs: Sequence[Sequence[RingUse]] = ()
        self._slots: list[range] = []
        self._places = 0
        self._next_run = 0

    @property
    def order(self) -> TransferOrder:
        """For the CPU arm, which reads the host pool."""
        return self._order

    @property
    def transfers(self) -> TransferCount:
        """Copies and bytes since the engine was made, counted where they are issued."""
        return self._copies.transfers

    def count_arm(self, blocks: int, num_bytes: int) -> None:
        """One layer of so many host blocks was attended where it lies."""
        self._copies.count("arm", blocks, num_bytes)

    # ---- the ring

    def begin(self, runs: Sequence[Sequence[RingUse]], run_slots: int) -> None:
        """Start a forward pass that visits host blocks in exactly these runs; the first loads start now.

        run_slots: the most that a run has.
        """
        assert self._next_run == len(self._runs), "the last pass did not visit all that it announced"
        assert all(len(run) <= run_slots for run in runs)
        self._runs, self._next_run, self._places = runs, 0, self.split.ring_slots // run_slots
        firsts = range(0, self._places * run_slots, run_slots)
        self._slots = [range(first, first + len(run)) for first, run in zip(cycle(firsts), runs, strict=False)]
        for index in range(min(self._places, len(runs))):
            self._fill(index)

    def acquire(self) -> tuple[range, Tensor]:
        """The next run's slots, ready for compute, and their memory `[slots, 2, kv_heads, block_size, head_dim]`."""
        slots = self._slots[self._next_run]
        for slot in slots:
            self._order.before_compute(slot)
        if slots not in self._memory:
            self._memory[slots] = self.ring[slots.start : slots.stop]
        return slots, self._memory[slots]

    def release(self) -> None:
        """Compute is done with the slots that were acquired: the run that needs them next may fill them."""
        for slot in self._slots[self._next_run]:
            self._order.after_compute(slot)
        following = self._next_run + self._places
        self._next_run += 1
        if following < len(self._runs):
            self._fill(following)

    def abandon(self) -> None:
        """A pass failed: let copies under way end, and forget the rest of it."""
        self._runs, self._next_run = (), 0
        self._order.reset()

    def _fill(self, index: int) -> None:
        for slot, use in zip(self._slots[index], self._runs[index], strict=True):
            self._fill_slot(slot, use)

    def _fill_slot(self, slot: int, use: RingUse) -> None:
        stream = self._order.before_fill(slot)
        if use.stored_tokens:
            self._order.before_load(stream, use.host_block)
            self.load_to_slot_layer(slot, use.layer, use.host_block, use.stored_tokens, stream)
        self._order.after_fill(slot)

    # ---- the layer buffer, by index of the block in its sequence

    def fill_buffer(self, index: int, use: RingUse) -> None:
        """Start a layer of the block: load what the host holds of it, after compute's last use of the slot."""
        self._fill_slot(self.split.ring_slots + index, use)

    def buffered(self, index: int) -> Tensor:
        """The block's memory `[2, kv_heads, block_size, head_dim]`, ready for compute."""
        self._order.before_compute(self.split.ring_slots + index)
        return self.layer_buffer[index]

    def store_buffered(self, index: int, layer: int, host_block: int, first_token: int, num_tokens: int) -> None:
        """Copy tokens just written into the buffer's block to its host block."""
        self.offload_slot_layer(self.split.ring_slots + index, layer, host_block, first_token, num_tokens)

    def release_buffer(self, index: int) -> None:
        """What compute does with the block's layer was put on the compute stream."""
        self._order.after_compute(self.split.ring_slots + index)

    # ---- copies of one layer of one block

    def _slot(self, slot: int) -> Tensor:
        """A slot's memory: the ring's come first, then the layer buffer's."""
        in_buffer = slot - self.split.ring_slots
        return self.ring[slot] if in_buffer < 0 else self.layer_buffer[in_buffer]

    def load_to_slot_layer(self, slot: int, layer: int, host_block: int, num_tokens: int, stream: Stream) -> None:
        """Copy the first `num_tokens` tokens of a host block's layer into a slot."""
        self._copy_tokens(self._slot(slot), self.host[host_block, layer], 0, num_tokens, "h2d", stream)

    def offload_slot_layer(self, slot: int, layer: int, host_block: int, first_token: int, num_tokens: int) -> None:
        """Copy tokens just written into a slot, `[first_token, first_token + num_tokens)`, to their host block."""
        stream = self._order.before_store(slot, host_block)
        self._copy_tokens(self.host[host_block, layer], self._slot(slot), first_token, num_tokens, "d2h", stream)
        self._order.after_store(slot, host_block)

    def _copy_tokens(self, dst: Tensor, src: Tensor, first: int, count: int, kind: CopyKind, stream: Stream) -> None:
        """Tokens are contiguous within a head, so each head of K and V is one row of a strided copy."""
        layout = self.layout
        pitch, width, height = layout.head_pitch, count * layout.row_bytes, layout.rows_per_token
        copy = PitchedCopy(dst[0, 0, first:], src[0, 0, first:], pitch, pitch, width, height, kind)
        self._copies.put(copy, stream)

    # ---- copies of whole blocks

    def move_blocks(self, moves: Sequence[BlockMove]) -> None:
        """Carry out a step's moves in order. Called between forward passes; the next one starts when they are done."""
        self._mover.move_blocks(moves)

    def synchronize(self) -> None:
        """Block the host until no copy is under way."""
        self._order.synchronize()
