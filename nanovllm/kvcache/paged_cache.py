"""The room where every KV block that is attended lives on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nanovllm.device import Device
from nanovllm.forward_context import ForwardContext, SequenceSlice, flat_positions, positions_of
from nanovllm.kvcache.block_mover import BlockMover, CountedCopies
from nanovllm.kvcache.hybrid_manager import BlockMove
from nanovllm.kvcache.layout import KVLayout
from nanovllm.kvcache.room import AttentionGeometry, KVRoom, KVStats, StepTraffic, first_visible_block
from nanovllm.kvcache.transfer_order import TransferOrder
from nanovllm.ops.attention import AttentionBackend, AttentionState, KVSegment, SegmentTable


class PagedKVCache(KVRoom):
    """One pool of blocks, written by slot mapping and attended in place through block tables; swap blocks beside it."""

    def __init__(
        self,
        device: Device,
        layout: KVLayout,
        dtype: torch.dtype,
        geometry: AttentionGeometry,
        backend: AttentionBackend,
        num_blocks: int,
        num_swap_blocks: int = 0,
    ) -> None:
        self.layout = layout
        self._device = device
        self._geometry = geometry
        self._backend = backend
        self._pool = device.empty("KV blocks", layout.device_pool_shape(num_blocks), dtype)
        self._swap = device.empty_host("swap blocks", layout.host_pool_shape(num_swap_blocks), dtype)
        self._order = TransferOrder(device, num_slots=0)
        self._copies = CountedCopies(device)
        self._mover = BlockMover(self._copies, self._order, layout, self._pool, self._swap[:0], self._swap)
        self._sequences: Sequence[SequenceSlice] = ()  # of the step under way
        # Of the step under way: where each row's K/V go, and what each sequence attends to, by sliding window.
        self._slot_blocks = self._slot_offsets = torch.empty(0, dtype=torch.int64)
        self._tables: dict[int | None, SegmentTable] = {}

    def begin_step(self, sequences: Sequence[SequenceSlice], moves: Sequence[BlockMove]) -> StepTraffic:
        self._mover.move_blocks(moves)
        self._sequences = sequences
        block_size = self.layout.block_size
        device = self._device.torch_device
        positions = flat_positions(sequences, device)
        places = [torch.tensor(s.block_table)[positions_of(s) // block_size] for s in sequences]
        self._slot_blocks, self._slot_offsets = torch.cat(places).to(device), positions % block_size
        self._tables = {
            window: SegmentTable([self._segment(seq, window) for seq in sequences])
            for window in set(self._geometry.windows)
        }
        return StepTraffic([0] * len(sequences), [0] * len(sequences))

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, ctx: ForwardContext) -> Tensor:
        pool = self._pool[layer]  # [blocks, 2, kv_heads, block_size, head_dim]
        if self._device.follows_kernels:
            self._declare(pool)
        pool[self._slot_blocks, 0, :, self._slot_offsets] = k
        pool[self._slot_blocks, 1, :, self._slot_offsets] = v
        window = self._geometry.windows[layer]
        state = AttentionState.empty(q)
        self._backend.attend(q, pool, self._tables[window], state, self._geometry.scale, window)
        return state.out.to(q.dtype)

    def _segment(self, seq: SequenceSlice, window: int | None) -> KVSegment:
        first = first_visible_block(seq.context_len, window, self.layout.block_size)
        return KVSegment(
            query_start=seq.query_start,
            query_len=seq.query_len,
            query_position=seq.context_len,
            first_position=first * self.layout.block_size,
            kv_end=seq.total_len,
            blocks=seq.block_table[first:],
        )

    def _declare(self, pool: Tensor) -> None:
        """Say which blocks the layer reads, and which of them it writes first."""
        block_size = self.layout.block_size
        written = {place for seq in self._sequences for place in seq.block_table[seq.context_len // block_size :]}
        read = {place for seq in self._sequences for place in seq.block_table}
        self._device.declare_kernel("write K/V", writes=[pool[place] for place in written])
        self._device.declare_kernel("attend", reads=[pool[place] for place in read])

    def abandon_step(self) -> None:
        self._order.reset()

    def stats(self) -> KVStats:
        num_blocks = self._pool.shape[1]
        return KVStats(
            block_size=self.layout.block_size,
            bytes_per_block=self.layout.block_bytes,
            num_gpu_blocks=num_blocks,
            resident_blocks=num_blocks,
            ring_slots=0,
            num_cpu_blocks=0,
            num_swap_blocks=len(self._swap),
            device_bytes=self._pool.nbytes,
            host_bytes=self._swap.nbytes,
            transfers=self._copies.transfers,
        )
