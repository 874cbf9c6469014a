"""KV memory with offload: the pools, a ring of slots on the device, and the copies of single layers between them.

        host memory                                       device memory
    +------------------+    load_to_slot_layer (h2d)    +----------------------------+
    |  host            | -----------------------------> |  ring: each slot has one   | --+
    |  (all layers of  | <----------------------------- |  layer of one block        |   |   attention per block
    |  other blocks)   |   offload_slot_layer (d2h)     +----------------------------+   +-> group, merged by
    |                  | <------- move_blocks --------> |  resident (all layers)     | --+   LSE in fp32
    +--------+---------+                                +----------------------------+            ^
             |                                                                                    |
             +---------------- CPU attention of a share of the blocks, in decode -----------------+

The device holds *resident* blocks (all layers) and a *ring* of slots (one layer of one block each); the host holds the
other blocks. A forward pass announces the host blocks that it will attend to, layer after layer, before it begins
(`begin`). So loads run ahead of attention through the ring, across layer boundaries too. The blocks of one
attention call form a group, in neighbouring slots. The ring has places for N such groups: group i of the pass uses
place i % N, and its loads start as soon as group i - N has released it. Neighbouring host blocks of a group are one
strided copy.

For layer-by-layer prefill of a long prompt the device also holds a *layer buffer*: one layer of the first blocks of one
sequence, so that a part of the prompt loads earlier KV once and not once per chunk. Each of its blocks has a number
after those of the ring's places, and is ordered like one; `layerwise_cache` fills and releases them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nanovllm.device import CopyKind, Device, PitchedCopy, Stream
from nanovllm.errors import EngineError
from nanovllm.kvcache.pools import KVPools
from nanovllm.memory.budget import DeviceSplit
from nanovllm.memory.layerwise import NO_LAYERWISE, LayerwiseMemory
from nanovllm.memory.layout import KVLayout


@dataclass(slots=True)
class BlockTokens:
    """The tokens of a block in a step. A ring slot loads those that the host has, and the new ones go to the host."""

    physical_id: int
    stored_tokens: int  # are in the block before the step
    new_tokens: int  # after these; the step writes them


RingUses = tuple[int, Sequence[BlockTokens]]  # a layer, and the host blocks of one group of slots


class OffloadEngine(KVPools):
    """The pools of a KV cache with offload, the ring and the layer buffer. `TransferOrder` orders all copies."""

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
        self.group_slots = group_slots or split.group_slots(layout.block_layer_bytes)
        self._num_places = min(split.ring_slots, max(1, split.ring_slots // self.group_slots))
        super().__init__(device, layout, dtype, split, num_host_blocks, num_swap_blocks)
        self.layerwise_memory = layerwise_memory
        self.ring = device.empty("ring slots", layout.ring_shape(split.ring_slots), dtype)
        self.layer_buffer = device.empty("layer buffer", layout.ring_shape(layerwise_memory.buffer_blocks), dtype)
        self._ring = layout.views(self.ring)  # by KV group
        self._buffer = layout.views(self.layer_buffer)
        self._blocks_in_reach = max(1, device.rows_in_reach(self.host))  # no copy crosses a multiple of it
        self._blocks: dict[tuple[int, int, int], Tensor] = {}  # views of the ring: slicing it in every layer is slower
        self._announced: Sequence[RingUses] = ()  # that the current pass announced, in order
        self._next = 0  # index of the group to attend to next

    @property
    def blocks_in_flight(self) -> tuple[int, ...]:
        """Physical ids of the host blocks in ring slots: of the acquired group and of those that are being loaded."""
        groups = self._announced[self._next : self._next + self._num_places]
        return tuple(use.physical_id for _, uses in groups for use in uses)

    # ---- the ring

    def begin(self, groups: Sequence[RingUses]) -> None:
        """Announce a forward pass: the groups of host blocks that it attends to, in order. The first loads start now.

        Every group has between 1 and `group_slots` uses. For each, in exactly this order, the pass calls `acquire`,
        then `write_back` if it wrote tokens for the host, then `release`.
        """
        assert self._next == len(self._announced), "the last pass did not attend to all groups that it announced"
        assert all(len(uses) <= self.group_slots for _, uses in groups)
        self._announced = groups
        self._next = 0
        for place, (layer, uses) in enumerate(groups[: self._num_places]):
            self.load_to_slot_layer(place, layer, uses)

    def acquire(self, layer: int, physical_id: int) -> Tensor:
        """The blocks of the next announced group, ready for compute: `[slots, 2, kv_heads, block_size, head_dim]`.

        layer, physical_id: of the first block of the group that the caller attends to. Loads are issued ahead in the
        order of `begin`, so a group attended out of turn would read the slots of another one: that raises EngineError.
        """
        next_layer, uses = self._announced[self._next] if self._next < len(self._announced) else (0, ())
        if not uses or (next_layer, uses[0].physical_id) != (layer, physical_id):
            announced = f"layer {next_layer} of block {uses[0].physical_id}" if uses else "no further group"
            raise EngineError(
                f"the pass attends to a group that begins with layer {layer} of block {physical_id}, but announced "
                f"{announced} next; attend to the groups in the order given to begin()"
            )
        place = self._next % self._num_places
        self.order.before_compute(place)
        key = place, len(uses), self.layout.groups.of_layer[layer][0]
        if key not in self._blocks:
            first = place * self.group_slots
            self._blocks[key] = self._ring[key[2]][first : first + len(uses)]
        return self._blocks[key]

    def write_back(self) -> None:
        """Copy the new tokens of the acquired group, which are written, to their host blocks."""
        self.offload_slot_layer(self._next % self._num_places, *self._announced[self._next])

    def release(self) -> None:
        """Compute no longer needs the acquired slots: start loading the group that uses them next."""
        place = self._next % self._num_places
        following = self._next + self._num_places
        self._next += 1
        self.order.after_compute(place)
        if following < len(self._announced):
            self.load_to_slot_layer(place, *self._announced[following])

    def abandon(self) -> None:
        """See `KVPools`."""
        self._announced = ()
        self._next = 0
        super().abandon()

    # ---- the layer buffer; `index` is the block's index in its sequence

    def fill_buffer(self, index: int, layer: int, use: BlockTokens) -> None:
        """Load the stored tokens of a layer of the block, once compute has released the slot."""
        self.load_to_slot_layer(self._num_places + index, layer, [use])

    def acquire_buffer(self, index: int) -> None:
        """Compute uses the block of `layer_buffer` from now on, after its load."""
        self.order.before_compute(self._num_places + index)

    def store_buffered(self, index: int, layer: int, use: BlockTokens) -> None:
        """Copy newly written tokens from the buffer to the host block."""
        self.offload_slot_layer(self._num_places + index, layer, [use])

    def release_buffer(self, index: int) -> None:
        """All attention to the block's layer has been issued on the compute stream."""
        self.order.after_compute(self._num_places + index)

    # ---- copies of one layer of the blocks in a place of the ring; after these places, one for each buffered block

    def load_to_slot_layer(self, place: int, layer: int, uses: Sequence[BlockTokens]) -> None:
        """Copy the stored tokens of the blocks to the slots of the place, after earlier attention to them."""
        self._copy(place, layer, uses, "h2d", self.order.before_fill(place))
        self.order.after_fill(place)

    def offload_slot_layer(self, place: int, layer: int, uses: Sequence[BlockTokens]) -> None:
        """Copy the new tokens, once they are written, from the slots of the place to the host blocks."""
        self._copy(place, layer, uses, "d2h", self.order.before_store(place))
        self.order.after_store(place)

    def _copy(self, place: int, layer: int, uses: Sequence[BlockTokens], kind: CopyKind, stream: Stream) -> None:
        """Copy the stored tokens of the uses into the slots of the place, or their new tokens from there."""
        in_buffer = place - self._num_places
        memory = self._buffer if in_buffer >= 0 else self._ring
        first_slot = in_buffer if in_buffer >= 0 else place * self.group_slots
        kv_group, plane = self.layout.groups.of_layer[layer]
        layout = self.layout.of_groups[kv_group]
        slots = memory[kv_group]
        host = self.host_of[kv_group]
        tokens = [use.stored_tokens if kind == "h2d" else use.new_tokens for use in uses]
        blocks = [use.physical_id - self.split.resident_blocks for use in uses]
        for first, count in self._runs(blocks, tokens, layout.block_size):
            first_token = 0 if kind == "h2d" else uses[first].stored_tokens
            ends = slots[first_slot + first], host[blocks[first], plane]
            self._copy_run(layout, *ends, first_token, tokens[first], count, kind, stream)

    def _runs(self, blocks: Sequence[int], tokens: Sequence[int], block_size: int) -> Iterator[tuple[int, int]]:
        """The uses that have tokens, as (first, number) of those that one call copies.

        These are full blocks that are neighbours on the host, within reach of a copy, or a single use.
        """
        first = 0
        while first < len(blocks):
            end = first + 1
            while (
                end < len(blocks)
                and tokens[end] == tokens[first] == block_size
                and blocks[end] == blocks[end - 1] + 1
                and blocks[end] // self._blocks_in_reach == blocks[first] // self._blocks_in_reach
            ):
                end += 1
            if tokens[first]:
                yield first, end - first
            first = end

    def _copy_run(
        self,
        layout: KVLayout,
        slot: Tensor,
        host: Tensor,
        first_token: int,
        tokens: int,
        count: int,
        kind: CopyKind,
        stream: Stream,
    ) -> None:
        """Copy tokens of `count` neighbouring blocks between their slots and one layer of them on the host.

        layout: of the blocks' KV group.
        """
        if tokens == layout.block_size:  # a layer of a block is contiguous
            slot_pitch = self.layout.block_layer_bytes
            host_pitch = self.layout.block_bytes
            width = layout.block_layer_bytes
            height = count
        else:  # tokens are contiguous within a head, so each head of K and V is one row
            slot = slot[0, 0, first_token:]
            host = host[0, 0, first_token:]
            slot_pitch = host_pitch = layout.head_pitch
            width = tokens * layout.row_bytes
            height = layout.rows_per_token
        ends = (slot, host, slot_pitch, host_pitch) if kind == "h2d" else (host, slot, host_pitch, slot_pitch)
        self.device.copy_2d(PitchedCopy(*ends, width, height, kind), stream)
        self.count(kind, count, width * height)
