"""The KV cache without offload: all blocks that are attended are on the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from nanovllm.data.batch import BlockMove, StateMove
from nanovllm.device import Device
from nanovllm.kvcache.base import AttendedPool, AttentionGeometry, KVCacheBase, StepTraffic
from nanovllm.kvcache.pools import KVPools
from nanovllm.layers.forward_context import ForwardContext
from nanovllm.memory.budget import DeviceSplit
from nanovllm.memory.layout import KVLayout
from nanovllm.ops.attention import AttentionBackend, AttentionMetadata, SequenceMetadata
from nanovllm.ops.cpu_attention import MAX_STEP_ROWS, NativeAttention, PagedStep
from nanovllm.ops.row_kernels import narrow_, store_kv
from nanovllm.ops.upload import upload


class PagedKVCache(KVCacheBase):
    """One pool of blocks, written by slot mapping and attended through block tables, and swap blocks on the host."""

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
        pools = KVPools(device, layout, dtype, DeviceSplit(0, num_blocks), num_swap_blocks=num_swap_blocks)
        super().__init__(pools, geometry, backend, num_blocks)
        self._pool = pools.resident
        self.attended_pool = AttendedPool(self._pool, geometry, backend)
        self._sequences: Sequence[SequenceMetadata] = ()  # of the current step
        # Of the current step: the slot mapping, and the attention metadata by sliding window. Built by the first layer
        # that attends, since a step with a CUDA graph needs neither.
        self._slots: Tensor | None = None
        self._tables: dict[int | None, AttentionMetadata] = {}
        self._few_rows: dict[int | None, PagedStep] = {}  # faster attention for steps of few rows on the CPU

    def begin_step(
        self,
        sequences: Sequence[SequenceMetadata],
        moves: Sequence[BlockMove],
        state_moves: Sequence[StateMove] = (),
    ) -> StepTraffic:
        self.pools.move_blocks(moves, state_moves)
        self._sequences, self._slots = sequences, None
        return StepTraffic([0] * len(sequences), [0] * len(sequences))

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, ctx: ForwardContext) -> Tensor:
        slots = self._slots if self._slots is not None else self._make_tables()
        self._device.declare_kernel("write K/V", writes=self._blocks(layer, written=True))
        window = self._geometry.windows[layer]
        few_rows = self._few_rows.get(window)
        if few_rows is not None:
            self._device.declare_kernel("attend", reads=self._blocks(layer))
            few_rows.attend(layer, q, k, v, self._geometry.sinks_of(layer))
            self._device.end_kernel()
            return q
        pool = self._pool[layer]  # [blocks, 2, kv_heads, block_size, head_dim]
        store_kv(pool, k, v, slots)
        state = self._geometry.before_keys(layer, q)
        self._device.declare_kernel("attend", reads=self._blocks(layer))
        self._backend.attend(q, pool, self._tables[window], state, self._geometry.scale, window)
        self._device.end_kernel()
        return narrow_(q, state.out)

    def _make_tables(self) -> Tensor:
        """Build the slot mapping and the attention metadata of the current step."""
        block_size, slots = self.layout.block_size, []
        for sequence in self._sequences:
            positions = sequence.positions()
            blocks = torch.tensor(sequence.block_table)[positions // block_size]
            slots.append(blocks * block_size + positions % block_size)
        self._slots = upload(torch.cat(slots), self._device.torch_device)
        self._tables = {
            window: AttentionMetadata([seq.visible(window, block_size) for seq in self._sequences])
            for window in set(self._geometry.windows)
        }
        self._few_rows = {}
        if isinstance(self._backend, NativeAttention) and len(self._slots) <= MAX_STEP_ROWS:
            dtype, heads, scale = self._geometry.dtype, self._geometry.num_heads, self._geometry.scale
            for window, table in self._tables.items():
                of_step = (self._slots, table, dtype, heads, scale, window)
                self._few_rows[window] = PagedStep(self._pool, *of_step, self._backend.num_threads)
        return self._slots

    def _blocks(self, layer: int, *, written: bool = False) -> Iterator[Tensor]:
        """A layer of the blocks that the step attends to, or only of those that it writes, once each."""
        block_size, pool = self.layout.block_size, self._pool[layer]
        blocks = (
            block
            for seq in self._sequences
            for block in seq.block_table[seq.context_len // block_size if written else 0 :]
        )
        yield from (pool[block] for block in dict.fromkeys(blocks))
