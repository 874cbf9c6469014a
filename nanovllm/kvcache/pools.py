"""The pools of KV blocks, on the device and on the host, and the copies of whole blocks between them.

Physical block ids number the resident blocks of the device first, then the host blocks, then the swap blocks, which are
host memory too and need the same orderings, but are never attended. States of recurrent layers have slots of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from nanovllm.data.batch import BlockMove, StateMove
from nanovllm.device import CopyKind, Device, PitchedCopy, Stream
from nanovllm.kvcache.states import MOVE_KINDS, StatePool
from nanovllm.kvcache.transfer_order import TransferOrder
from nanovllm.memory.budget import DeviceSplit, TransferCount
from nanovllm.memory.layout import KVLayout


class KVPools:
    """Owns the resident, the host and the swap pool. All that a KV cache without offload needs."""

    def __init__(
        self,
        device: Device,
        layout: KVLayout,
        dtype: torch.dtype,
        split: DeviceSplit,
        num_host_blocks: int = 0,
        num_swap_blocks: int = 0,
    ) -> None:
        self.device = device
        self.layout = layout
        self.split = split
        self.num_host_blocks = num_host_blocks
        self.resident = device.empty("resident blocks", layout.device_pool_shape(split.resident_blocks), dtype)
        self.host = device.empty_host("host blocks", layout.host_pool_shape(num_host_blocks), dtype)
        self.swap = device.empty_host("swap blocks", layout.host_pool_shape(num_swap_blocks), dtype)
        self.resident_of = layout.views(self.resident)  # by KV group, in the shape of its blocks
        self.host_of = layout.views(self.host)
        self.states: StatePool | None = None  # of recurrent layers
        self.order = TransferOrder(device)
        self._counts = {kind: [0, 0] for kind in ("h2d", "d2h", "d2d", "h2h", "cpu_attention")}  # copies, bytes

    @property
    def transfers(self) -> TransferCount:
        """Copies and bytes since the engine was created, counted where they are issued."""
        return TransferCount(*self._counts["h2d"], *self._counts["d2h"], *self._counts["cpu_attention"])

    def count(self, kind: CopyKind | Literal["cpu_attention"], number: int, num_bytes: int) -> None:
        """Count copies, or layers of host blocks that the CPU attended to."""
        self._counts[kind][0] += number
        self._counts[kind][1] += num_bytes

    def move_blocks(self, moves: Sequence[BlockMove], state_moves: Sequence[StateMove] = ()) -> None:
        """Copy the blocks and states of a step in order. Call it between passes; the next one waits for the copies."""
        if self.states is not None:
            self.states.replay(state_moves)
        with self.order.moves(bool(moves) or bool(state_moves)) as stream:
            for move in moves:
                self._move(move, stream)
            if self.states is not None:
                self.states.copy(state_moves, stream, self.count)
        if self.states is not None:
            self.states.clear(state_moves)

    def copy_state(self, src: int, dst: int, layers: range) -> None:
        """Copy what the recurrent layers among these have in a slot, between earlier and later computation.

        A pass calls it for one range of layers after the other. The first with recurrent layers counts as the copy.
        """
        assert self.states is not None
        with self.order.moves(any_moves=True) as stream:
            self.states.copy_layers(src, dst, layers, stream, self.count)

    def _move(self, move: BlockMove, stream: Stream) -> None:
        layout = self.layout
        first_host = self.split.resident_blocks
        dst = self.block(move.dst)
        src = self.block(move.src)
        kind = MOVE_KINDS[move.src >= first_host][move.dst >= first_host]
        if move.num_tokens is None:  # one strided copy for all planes
            dpitch = dst.stride(0) * dst.element_size()
            spitch = src.stride(0) * src.element_size()
            width = layout.block_layer_bytes
            height = layout.planes
            number = self.device.copy_2d(PitchedCopy(dst, src, dpitch, spitch, width, height, kind), stream)
            self.count(kind, number, width * height)
            return
        # The heads of K and V are equally far apart within a plane only: one strided copy for each of them.
        layout = layout.of_groups[move.group]
        pitch = layout.head_pitch
        width = move.num_tokens * layout.row_bytes
        height = layout.rows_per_token
        for plane in range(self.layout.planes):
            self.device.copy_2d(PitchedCopy(dst[plane], src[plane], pitch, pitch, width, height, kind), stream)
        self.count(kind, 1, self.layout.planes * width * height)

    def block(self, physical_id: int) -> Tensor:
        """`[planes, 2, kv_heads, block_size, head_dim]`, each plane contiguous, in the shape of `layout`."""
        if physical_id < self.split.resident_blocks:
            return self.resident[:, physical_id]
        physical_id -= self.split.resident_blocks
        return self.host[physical_id] if physical_id < len(self.host) else self.swap[physical_id - len(self.host)]

    def abandon(self) -> None:
        """After a failed pass: let copies under way finish, and forget the rest of the pass."""
        self.order.reset()

    def synchronize(self) -> None:
        """Block the host until no copy is under way."""
        self.order.synchronize()
