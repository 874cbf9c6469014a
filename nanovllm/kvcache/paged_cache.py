"""The room where every KV block that is attended lives on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nanovllm.device import Device
from nanovllm.forward_context import ForwardContext, SequenceMetadata, positions_of
from nanovllm.kvcache.base import AttentionGeometry, KVCacheBase, KVStats, StepTraffic, first_visible_block
from nanovllm.kvcache.block_mover import BlockMover, CountedCopies
from nanovllm.kvcache.decode_tables import DecodeTables
from nanovllm.kvcache.hybrid_manager import BlockMove
from nanovllm.kvcache.layout import KVLayout
from nanovllm.kvcache.transfer_order import TransferOrder
from nanovllm.ops import row_attention
from nanovllm.ops.attention import AttentionBackend, AttentionMetadata, AttentionState, KVMetadata
from nanovllm.ops.native_attention import NativeAttention, PagedStep
from nanovllm.ops.store_kv import store_kv
from nanovllm.ops.upload import upload


class PagedKVCache(KVCacheBase):
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
        self._order = TransferOrder(device, num_groups=0)
        self._copies = CountedCopies(device)
        self._mover = BlockMover(self._copies, self._order, layout, self._pool, self._swap[:0], self._swap)
        self._sequences: Sequence[SequenceMetadata] = ()  # of the step under way
        # Of the step under way: where each row's K/V go, and what each sequence attends to, by sliding window. Made by
        # the first layer that attends: a graph has tables of its own.
        self._slots: Tensor | None = None
        self._tables: dict[int | None, AttentionMetadata] = {}
        self._few_rows: dict[int | None, PagedStep | None] = {}  # what attends in a step of few rows on the CPU

    def begin_step(self, sequences: Sequence[SequenceMetadata], moves: Sequence[BlockMove]) -> StepTraffic:
        self._mover.move_blocks(moves)
        self._sequences, self._slots = sequences, None
        return StepTraffic([0] * len(sequences), [0] * len(sequences))

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, ctx: ForwardContext) -> Tensor:
        pool = self._pool[layer]  # [blocks, 2, kv_heads, block_size, head_dim]
        slots = self._slots if self._slots is not None else self._make_tables()
        self._device.declare_kernel("write K/V", writes=(pool[block] for block in self._blocks(written=True)))
        window = self._geometry.windows[layer]
        few_rows = self._few_rows.get(window)
        if few_rows is not None:
            self._device.declare_kernel("attend", reads=(pool[block] for block in self._blocks()))
            few_rows.attend(layer, q, k, v)
            self._device.end_kernel()
            return q
        store_kv(pool, k, v, slots)
        state = AttentionState.empty(q)
        self._device.declare_kernel("attend", reads=(pool[block] for block in self._blocks()))
        self._backend.attend(q, pool, self._tables[window], state, self._geometry.scale, window)
        self._device.end_kernel()
        return state.output(q)

    def decode_tables(self, max_rows: int, max_len: int) -> DecodeTables | None:
        """Tables for graphs of steps of up to max_rows rows; None if a graph cannot record attention."""
        attention = row_attention(self._backend)
        return None if attention is None else DecodeTables(self._pool, self._geometry, attention, max_rows, max_len)

    def _make_tables(self) -> Tensor:
        """The slots and tables of the step under way."""
        block_size, slots = self.layout.block_size, []
        for sequence in self._sequences:
            positions = positions_of(sequence)
            blocks = torch.tensor(sequence.block_table)[positions // block_size]
            slots.append(blocks * block_size + positions % block_size)
        self._slots = upload(torch.cat(slots), self._device.torch_device)
        self._tables = {
            window: AttentionMetadata([self._segment(seq, window) for seq in self._sequences])
            for window in set(self._geometry.windows)
        }
        if isinstance(self._backend, NativeAttention):
            heads, scale = self._geometry.num_heads, self._geometry.scale
            self._few_rows = {
                window: self._backend.paged_step(self._pool, self._slots, table, heads, scale, window)
                for window, table in self._tables.items()
            }
        return self._slots

    def _segment(self, seq: SequenceMetadata, window: int | None) -> KVMetadata:
        first = first_visible_block(seq.context_len, window, self.layout.block_size)
        return KVMetadata(
            query_start=seq.query_start,
            query_len=seq.query_len,
            query_position=seq.context_len,
            first_position=first * self.layout.block_size,
            kv_end=seq.total_len,
            blocks=seq.block_table[first:],
        )

    def _blocks(self, *, written: bool = False) -> set[int]:
        """The blocks that the step attends to, or those of them that it writes first."""
        block_size = self.layout.block_size
        return {
            block
            for seq in self._sequences
            for block in seq.block_table[seq.context_len // block_size if written else 0 :]
        }

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
            host_bytes=0,
            swap_bytes=self._swap.nbytes,
            transfers=self._copies.transfers,
        )
