"""KV memory on both tiers, and every copy between them.

The device holds *resident* blocks (all layers) and a *ring* of slots (one layer of one block each); the host holds
the rest. A forward pass visits host blocks in an order that is known when it begins, layer after layer, so loads run
ahead through the ring, across layer boundaries too: visit i uses slot i % N, and its load is issued as soon as visit
i - N has let go of that slot.

Besides, the device may hold a *layer buffer* for layer-major prefill: one layer of the first blocks of one sequence.
Its slots, numbered after the ring's, live by the same order; `span_cache.py` says when each is filled and released.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nanovllm.device import CopyKind, Device, PitchedCopy, Stream
from nanovllm.kvcache.budget import DeviceSplit, TransferCount
from nanovllm.kvcache.layout import KVLayout
from nanovllm.kvcache.prefill_plan import NO_SPANS, SpanMemory
from nanovllm.kvcache.transfer_order import TransferOrder


@dataclass(frozen=True, slots=True)
class RingUse:
    """One visit to a host block in one layer. `stored_tokens` are loaded; 0 if nothing of it is on the host yet."""

    layer: int
    host_block: int
    stored_tokens: int


class OffloadEngine:
    """Owns the resident pool, the ring and the host pool. Slots are addressed by the order of the ring's uses."""

    def __init__(
        self,
        device: Device,
        layout: KVLayout,
        dtype: torch.dtype,
        split: DeviceSplit,
        num_host_blocks: int,
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
        self._order = TransferOrder(device, num_streams=split.ring_slots)
        self._uses: Sequence[RingUse] = ()
        self._next_use = 0
        self._counts = {"h2d": [0, 0], "d2h": [0, 0]}  # copies, bytes

    @property
    def transfers(self) -> TransferCount:
        """Copies and bytes since the engine was made, counted where they are issued."""
        return TransferCount(*self._counts["h2d"], *self._counts["d2h"])

    # ---- the ring

    def begin(self, uses: Sequence[RingUse]) -> None:
        """Start a forward pass that visits host blocks in exactly this order; the first loads start now."""
        assert self._next_use == len(self._uses), "the last pass did not visit all that it announced"
        self._uses, self._next_use = uses, 0
        for index in range(min(self.split.ring_slots, len(uses))):
            self._fill(index)

    def acquire(self) -> tuple[int, Tensor]:
        """The next use's slot, ready for compute, and its memory `[2, kv_heads, block_size, head_dim]`."""
        slot = self._next_use % self.split.ring_slots
        self._order.before_compute(slot)
        return slot, self.ring[slot]

    def release(self, slot: int) -> None:
        """Compute is done with the slot: the use that needs it next may fill it."""
        self._order.after_compute(slot)
        following = self._next_use + self.split.ring_slots
        self._next_use += 1
        if following < len(self._uses):
            self._fill(following)

    def abandon(self) -> None:
        """A pass failed: let copies under way end, and forget the rest of it."""
        self._uses, self._next_use = (), 0
        self._order.reset()

    def _fill(self, index: int) -> None:
        self._fill_slot(index % self.split.ring_slots, self._uses[index])

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
        self._copy(PitchedCopy(dst[0, 0, first:], src[0, 0, first:], pitch, pitch, width, height, kind), stream)

    # ---- copies of whole blocks

    def move_blocks(self, moves: Sequence[tuple[int, int]]) -> None:
        """Carry out moves (source place, destination place) in order; see `hybrid_manager` for places.

        Called between forward passes; the next one starts when they are done.
        """
        if not moves:
            return
        resident_blocks = self.split.resident_blocks
        stream = self._order.before_moves()
        for src, dst in moves:
            if src < resident_blocks:
                self.offload_slot_to_cpu(src, dst - resident_blocks, stream)
            else:
                self.load_to_slot_all_layers(dst, src - resident_blocks, stream)
        self._order.after_moves()

    def load_to_slot_all_layers(self, resident_block: int, host_block: int, stream: Stream) -> None:
        """Copy all layers of a host block into a resident block."""
        self._order.before_load(stream, host_block)
        self._copy_layers(self.resident[:, resident_block], self.host[host_block], "h2d", stream)

    def offload_slot_to_cpu(self, resident_block: int, host_block: int, stream: Stream) -> None:
        """Copy all layers of a resident block to a host block."""
        self._order.before_move_to_host(host_block)
        self._copy_layers(self.host[host_block], self.resident[:, resident_block], "d2h", stream)
        self._order.after_move_to_host(host_block)

    def _copy_layers(self, dst: Tensor, src: Tensor, kind: CopyKind, stream: Stream) -> None:
        """dst, src: [layers, 2, kv_heads, block_size, head_dim], each layer contiguous. One strided copy for all."""
        width = self.layout.block_layer_bytes
        dpitch, spitch = (t.stride(0) * t.element_size() for t in (dst, src))
        self._copy(PitchedCopy(dst, src, dpitch, spitch, width, self.layout.num_layers, kind), stream)

    def _copy(self, copy: PitchedCopy, stream: Stream) -> None:
        self._counts[copy.kind][0] += self.device.copy_2d(copy, stream)
        self._counts[copy.kind][1] += copy.width * copy.height

    def synchronize(self) -> None:
        """Block the host until no copy is under way."""
        self._order.synchronize()
