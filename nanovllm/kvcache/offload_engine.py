"""KV memory on both tiers, and every copy between them.

The device holds *resident* blocks (all layers) and a *ring* of slots (one layer of one block each); the host holds the
other blocks. A forward pass announces the host blocks that it will attend to, layer after layer, before it begins
(`RingSchedule`). So loads run ahead of attention through the ring, across layer boundaries too. The blocks of one
attention call form a group, in neighbouring slots: with N groups of slots in the ring, group i of the pass uses slots
i % N, and its loads start as soon as group i - N has released them. Neighbouring host blocks of a group are one strided
copy.

For layer-by-layer prefill the device also holds a *layer buffer*: one layer of the first blocks of one sequence. Its
slots are numbered after the ring's and ordered in the same way; `nanovllm.layerwise_prefill` fills and releases them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from nanovllm.device import CopyKind, Device, PitchedCopy, Stream
from nanovllm.errors import EngineError
from nanovllm.kvcache.block_mover import BlockMover, CountedCopies
from nanovllm.kvcache.budget import DeviceSplit, TransferCount
from nanovllm.kvcache.hybrid_manager import BlockMove
from nanovllm.kvcache.layerwise import NO_LAYERWISE, LayerwiseMemory
from nanovllm.kvcache.layout import KVLayout
from nanovllm.kvcache.transfer_order import TransferOrder

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class RingUse:
    """One use of a ring slot: a layer of a host block. `stored_tokens` are loaded, 0 if the host holds none yet."""

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


class RingSchedule:
    """The groups of ring uses that a forward pass announced, in the order in which it must attend to them.

    Loads are issued ahead in this order, so a group attended out of turn would read the slots of another one.
    """

    def __init__(self, groups: Sequence[Sequence[RingUse]] = ()) -> None:
        self.groups = groups
        self.next_index = 0

    @property
    def is_finished(self) -> bool:
        return self.next_index == len(self.groups)

    def check_next(self, first: RingUse) -> None:
        """Raises EngineError unless the next announced group begins with this use."""
        announced = None if self.is_finished else self.groups[self.next_index][0]
        if announced != first:
            raise EngineError(
                f"the pass attends to a group that begins with {first}, but announced {announced} next; attend to the "
                "groups in the order given to begin()"
            )

    def advance(self) -> None:
        self.next_index += 1


def in_groups(items: Sequence[Item], group_slots: int) -> list[Sequence[Item]]:
    """Consecutive items in groups of `group_slots`; the last group may be shorter."""
    return [items[first : first + group_slots] for first in range(0, len(items), group_slots)]


def neighbours(pieces: Sequence[SlotTokens], block_size: int, blocks_in_reach: int) -> list[list[SlotTokens]]:
    """Cut the pieces into lists that one strided copy moves: full blocks in neighbouring slots and host blocks.

    blocks_in_reach: no copy crosses a multiple of this many host blocks.
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
    """Owns the resident pool, the ring, the layer buffer, the host pool and the swap pool."""

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
        """group_slots: the most host blocks in a group; None means `DeviceSplit.group_slots`."""
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
        self._memory: dict[range, Tensor] = {}  # views of neighbouring slots: slicing the ring in every layer is slower
        self._schedule = RingSchedule()  # of the current pass

    @property
    def order(self) -> TransferOrder:
        """For CPU attention, which reads the host pool."""
        return self._order

    @property
    def transfers(self) -> TransferCount:
        """Copies and bytes since the engine was created, counted where they are issued."""
        return self._copies.transfers

    @property
    def blocks_in_flight(self) -> tuple[int, ...]:
        """Physical ids of the host blocks in ring slots: of the acquired group and of those that are being loaded."""
        first = self._schedule.next_index
        groups = self._schedule.groups[first : first + self._num_groups]
        return tuple(self.split.resident_blocks + use.host_block for group in groups for use in group)

    def count_cpu_attention(self, blocks: int, num_bytes: int) -> None:
        """Count host blocks, one layer of each, that the CPU attended to."""
        self._copies.count("cpu_attention", blocks, num_bytes)

    # ---- the ring

    def begin(self, groups: Sequence[Sequence[RingUse]]) -> None:
        """Announce a forward pass: the groups of host blocks that it attends to, in order. The first loads start now.

        Every group has between 1 and `group_slots` uses. For each, in exactly this order, the pass calls `acquire`,
        then `store` if it wrote tokens, then `release`.
        """
        assert self._schedule.is_finished, "the last pass did not attend to all groups that it announced"
        assert all(len(group) <= self.group_slots for group in groups)
        self._schedule = RingSchedule(groups)
        for index in range(min(self._num_groups, len(groups))):
            self._fill(index)

    def acquire(self, first: RingUse) -> tuple[range, Tensor]:
        """The slots of the next announced group, ready for compute: `[slots, 2, kv_heads, block_size, head_dim]`.

        first: the first use of the group that the caller attends to. Raises EngineError if another one is next.
        """
        self._schedule.check_next(first)
        slots = self._slots(self._schedule.next_index)
        self._order.before_compute(self._ring_group)
        if slots not in self._memory:
            self._memory[slots] = self.ring[slots.start : slots.stop]
        return slots, self._memory[slots]

    def store(self, pieces: Sequence[SlotTokens]) -> None:
        """Copy newly written tokens from slots of the acquired group to their host blocks."""
        self._store(self._ring_group, pieces)

    def release(self) -> None:
        """Compute no longer needs the acquired slots: start loading the group that uses them next."""
        self._order.after_compute(self._ring_group)
        following = self._schedule.next_index + self._num_groups
        self._schedule.advance()
        if following < len(self._schedule.groups):
            self._fill(following)

    def abandon(self) -> None:
        """After a failed pass: let copies under way finish, and forget the rest of the pass."""
        self._schedule = RingSchedule()
        self._order.reset()

    @property
    def _ring_group(self) -> int:
        """The group of slots that the next announced group uses."""
        return self._schedule.next_index % self._num_groups

    def _slots(self, index: int) -> range:
        first = index % self._num_groups * self.group_slots
        return range(first, first + len(self._schedule.groups[index]))

    def _fill(self, index: int) -> None:
        uses = zip(self._slots(index), self._schedule.groups[index], strict=True)
        pieces = [SlotTokens(slot, use.layer, use.host_block, 0, use.stored_tokens) for slot, use in uses]
        self._load(index % self._num_groups, pieces)

    # ---- the layer buffer; `index` is the block's index in its sequence

    def fill_buffer(self, index: int, use: RingUse) -> None:
        """Start a layer of the block: load its stored tokens once compute has released the slot."""
        piece = SlotTokens(self.split.ring_slots + index, use.layer, use.host_block, 0, use.stored_tokens)
        self._load(self._num_groups + index, [piece])

    def buffered(self, index: int) -> Tensor:
        """The block's memory `[2, kv_heads, block_size, head_dim]`, ready for compute."""
        self._order.before_compute(self._num_groups + index)
        return self.layer_buffer[index]

    def store_buffered(self, index: int, layer: int, host_block: int, first_token: int, num_tokens: int) -> None:
        """Copy newly written tokens from the buffer to the host block."""
        piece = SlotTokens(self.split.ring_slots + index, layer, host_block, first_token, num_tokens)
        self._store(self._num_groups + index, [piece])

    def release_buffer(self, index: int) -> None:
        """All attention to the block's layer has been issued on the compute stream."""
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
        """Copy part of one host block's layer, or all of several neighbouring ones, to their slots."""
        slot, host = self._slot(pieces[0].slot), self.host[pieces[0].host_block, pieces[0].layer]
        self._copy(slot, host, self.layout.block_layer_bytes, self.layout.block_bytes, pieces, "h2d", stream)

    def offload_slot_layer(self, pieces: Sequence[SlotTokens], stream: Stream) -> None:
        """Copy part of one slot, or all of several neighbouring ones, to their layer of the host blocks."""
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
        """dst, src: one layer of the first block on each side; pitches: bytes from one block to the next."""
        layout, first, count = self.layout, pieces[0].first_token, pieces[0].num_tokens
        if count == layout.block_size:  # all of it is contiguous
            copy = PitchedCopy(dst, src, dpitch, spitch, layout.block_layer_bytes, len(pieces), kind)
        else:  # tokens are contiguous within a head, so each head of K and V is one row
            pitch, width, height = layout.head_pitch, count * layout.row_bytes, layout.rows_per_token
            copy = PitchedCopy(dst[0, 0, first:], src[0, 0, first:], pitch, pitch, width, height, kind)
        self._copies.put(copy, stream, len(pieces))

    def _slot(self, slot: int) -> Tensor:
        """A slot's memory; slots of the layer buffer are numbered after those of the ring."""
        in_buffer = slot - self.split.ring_slots
        return self.ring[slot] if in_buffer < 0 else self.layer_buffer[in_buffer]

    # ---- copies of all layers of a block

    def move_blocks(self, moves: Sequence[BlockMove]) -> None:
        """Copy the blocks of a step in order. Call it between forward passes; the next one waits for the copies."""
        self._mover.move_blocks(moves)

    def synchronize(self) -> None:
        """Block the host until no copy is under way."""
        self._order.synchronize()
