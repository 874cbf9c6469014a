"""KV memory on both tiers, and every copy between them.

The device holds *resident* blocks (all layers) and a *ring* of slots (one layer of one block each); the host holds
the rest. A forward pass visits host blocks in an order that is known when it begins, layer after layer, so loads run
ahead through the ring, across layer boundaries too. Blocks that are attended in one call are a *run*, in neighbouring
slots: the ring has N groups of slots, run i uses group i % N, and its loads are issued as soon as run i - N has let go
of that group. Of a run, neighbouring blocks of the host are one strided copy.

Besides, the device may hold a *layer buffer* for layer-major prefill: one layer of the first blocks of one sequence.
Its slots, numbered after the ring's, live by the same order; `layerwise_cache.py` says when each is filled and
released.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from nanovllm.device import CopyKind, Device, PitchedCopy, Stream
from nanovllm.kvcache.block_mover import BlockMover, CountedCopies
from nanovllm.kvcache.budget import DeviceSplit, TransferCount
from nanovllm.kvcache.hybrid_manager import BlockMove
from nanovllm.kvcache.layout import KVLayout
from nanovllm.kvcache.prefill_plan import NO_LAYERWISE, LayerwiseMemory
from nanovllm.kvcache.transfer_order import TransferOrder

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class RingUse:
    """One visit to a host block in one layer. `stored_tokens` are loaded; 0 if nothing of it is on the host yet."""

    layer: int
    host_block: int
    stored_tokens: int


@dataclass(frozen=True, slots=True)
class SlotTokens:
    """Tokens of one layer of a host block, and the slot that they are copied to or from."""

    slot: int
    layer: int
    host_block: int
    first_token: int
    num_tokens: int


def in_groups(items: Sequence[Item], group_slots: int) -> list[Sequence[Item]]:
    """The items in consecutive runs, all but the last of `group_slots`."""
    return [items[first : first + group_slots] for first in range(0, len(items), group_slots)]


def neighbours(pieces: Sequence[SlotTokens], block_size: int, blocks_in_reach: int) -> list[list[SlotTokens]]:
    """The pieces cut into lists that one strided copy moves: whole blocks, in neighbouring slots and host blocks.

    blocks_in_reach: no copy reaches across a multiple of so many host blocks.
    """
    found: list[list[SlotTokens]] = []
    for piece in pieces:
        last = found[-1][-1] if found else None
        if (
            last is not None
            and last.num_tokens == piece.num_tokens == block_size
            and (piece.slot, piece.host_block) == (last.slot + 1, last.host_block + 1)
            and piece.layer == last.layer
            and piece.host_block % blocks_in_reach
        ):
            found[-1].append(piece)
        else:
            found.append([piece])
    return found


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
        layerwise_memory: LayerwiseMemory = NO_LAYERWISE,
        group_slots: int | None = None,
    ) -> None:
        """group_slots: the most host blocks in a run; None leaves it to `DeviceSplit.group_slots`."""
        self.device = device
        self.layout = layout
        self.split = split
        self.num_host_blocks = num_host_blocks
        self.layerwise_memory = layerwise_memory
        self.resident = device.empty("resident blocks", layout.device_pool_shape(split.resident_blocks), dtype)
        self.ring = device.empty("ring slots", layout.ring_shape(split.ring_slots), dtype)
        self.layer_buffer = device.empty("layer buffer", layout.ring_shape(layerwise_memory.buffer_blocks), dtype)
        self.host = device.empty_host("host blocks", layout.host_pool_shape(num_host_blocks), dtype)
        self.swap = device.empty_host("swap blocks", layout.host_pool_shape(num_swap_blocks), dtype)
        self.group_slots = group_slots or split.group_slots(layout.block_layer_bytes)
        self._num_groups = max(1, split.ring_slots // self.group_slots)
        self._blocks_in_reach = max(1, device.rows_in_reach(self.host))
        self._order = TransferOrder(device, self._num_groups)
        self._copies = CountedCopies(device)
        self._mover = BlockMover(self._copies, self._order, layout, self.resident, self.host, self.swap)
        self._memory: dict[range, Tensor] = {}  # of neighbouring slots; cutting the ring anew costs each visit more
        self._groups: Sequence[Sequence[RingUse]] = ()  # of the pass under way
        self._next_group = 0

    @property
    def order(self) -> TransferOrder:
        """For the CPU arm, which reads the host pool."""
        return self._order

    @property
    def transfers(self) -> TransferCount:
        """Copies and bytes since the engine was made, counted where they are issued."""
        return self._copies.transfers

    def count_cpu_attention(self, blocks: int, num_bytes: int) -> None:
        """One layer of so many host blocks was attended where it lies."""
        self._copies.count("arm", blocks, num_bytes)

    # ---- the ring

    def begin(self, groups: Sequence[Sequence[RingUse]]) -> None:
        """Start a forward pass that visits host blocks in exactly these runs; the first loads start now.

        A run has at most `group_slots` visits.
        """
        assert self._next_group == len(self._groups), "the last pass did not visit all that it announced"
        assert all(len(group) <= self.group_slots for group in groups)
        self._groups, self._next_group = groups, 0
        for index in range(min(self._num_groups, len(groups))):
            self._fill(index)

    def acquire(self) -> tuple[range, Tensor]:
        """The next run's slots, ready for compute, and their memory `[slots, 2, kv_heads, block_size, head_dim]`."""
        slots = self._slots(self._next_group)
        self._order.before_compute(self._next_group % self._num_groups)
        if slots not in self._memory:
            self._memory[slots] = self.ring[slots.start : slots.stop]
        return slots, self._memory[slots]

    def store(self, pieces: Sequence[SlotTokens]) -> None:
        """Copy tokens just written into slots of the acquired run to their host blocks."""
        self._store(self._next_group % self._num_groups, pieces)

    def release(self) -> None:
        """Compute is done with the slots that were acquired: the run that needs them next may fill them."""
        self._order.after_compute(self._next_group % self._num_groups)
        following = self._next_group + self._num_groups
        self._next_group += 1
        if following < len(self._groups):
            self._fill(following)

    def abandon(self) -> None:
        """A pass failed: let copies under way end, and forget the rest of it."""
        self._groups, self._next_group = (), 0
        self._order.reset()

    def _slots(self, index: int) -> range:
        first = index % self._num_groups * self.group_slots
        return range(first, first + len(self._groups[index]))

    def _fill(self, index: int) -> None:
        uses = zip(self._slots(index), self._groups[index], strict=True)
        pieces = [SlotTokens(slot, use.layer, use.host_block, 0, use.stored_tokens) for slot, use in uses]
        self._load(index % self._num_groups, pieces)

    # ---- the layer buffer, by index of the block in its sequence

    def fill_buffer(self, index: int, use: RingUse) -> None:
        """Start a layer of the block: load what the host holds of it, after compute's last use of the slot."""
        piece = SlotTokens(self.split.ring_slots + index, use.layer, use.host_block, 0, use.stored_tokens)
        self._load(self._num_groups + index, [piece])

    def buffered(self, index: int) -> Tensor:
        """The block's memory `[2, kv_heads, block_size, head_dim]`, ready for compute."""
        self._order.before_compute(self._num_groups + index)
        return self.layer_buffer[index]

    def store_buffered(self, index: int, layer: int, host_block: int, first_token: int, num_tokens: int) -> None:
        """Copy tokens just written into the buffer's block to its host block."""
        piece = SlotTokens(self.split.ring_slots + index, layer, host_block, first_token, num_tokens)
        self._store(self._num_groups + index, [piece])

    def release_buffer(self, index: int) -> None:
        """What compute does with the block's layer was put on the compute stream."""
        self._order.after_compute(self._num_groups + index)

    # ---- copies of one layer of neighbouring blocks

    def _load(self, group: int, pieces: Sequence[SlotTokens]) -> None:
        stream = self._order.before_fill(group)
        loaded = [piece for piece in pieces if piece.num_tokens]
        for together in neighbours(loaded, self.layout.block_size, self._blocks_in_reach):
            self.load_to_slot_layer(together, stream)
        self._order.after_fill(group)

    def _store(self, group: int, pieces: Sequence[SlotTokens]) -> None:
        stream = self._order.before_store(group)
        for together in neighbours(pieces, self.layout.block_size, self._blocks_in_reach):
            self.offload_slot_layer(together, stream)

    def load_to_slot_layer(self, pieces: Sequence[SlotTokens], stream: Stream) -> None:
        """Copy tokens of a host block's layer, or neighbouring whole ones, to their slots."""
        slot, host = self._slot(pieces[0].slot), self.host[pieces[0].host_block, pieces[0].layer]
        self._copy(slot, host, self.layout.block_layer_bytes, self.layout.block_bytes, pieces, "h2d", stream)

    def offload_slot_layer(self, pieces: Sequence[SlotTokens], stream: Stream) -> None:
        """Copy tokens in a slot, or whole blocks in neighbouring ones, to their layer of the host blocks."""
        slot, host = self._slot(pieces[0].slot), self.host[pieces[0].host_block, pieces[0].layer]
        self._copy(host, slot, self.layout.block_bytes, self.layout.block_layer_bytes, pieces, "d2h", stream)

    def _copy(
        self,
        dst: Tensor,
        src: Tensor,
        dpitch: int,
        spitch: int,
        pieces: Sequence[SlotTokens],
        kind: CopyKind,
        stream: Stream,
    ) -> None:
        """dst, src: one layer of the first block on both sides; pitches: from one block to the next."""
        layout, first, count = self.layout, pieces[0].first_token, pieces[0].num_tokens
        if count == layout.block_size:  # all of it is contiguous
            copy = PitchedCopy(dst, src, dpitch, spitch, layout.block_layer_bytes, len(pieces), kind)
        else:  # tokens are contiguous within a head, so each head of K and V is one row
            pitch, width, height = layout.head_pitch, count * layout.row_bytes, layout.rows_per_token
            copy = PitchedCopy(dst[0, 0, first:], src[0, 0, first:], pitch, pitch, width, height, kind)
        self._copies.put(copy, stream, len(pieces))

    def _slot(self, slot: int) -> Tensor:
        """A slot's memory: the ring's come first, then the layer buffer's."""
        in_buffer = slot - self.split.ring_slots
        return self.ring[slot] if in_buffer < 0 else self.layer_buffer[in_buffer]

    # ---- copies of whole blocks

    def move_blocks(self, moves: Sequence[BlockMove]) -> None:
        """Carry out a step's moves in order. Called between forward passes; the next one starts when they are done."""
        self._mover.move_blocks(moves)

    def synchronize(self) -> None:
        """Block the host until no copy is under way."""
        self._order.synchronize()
