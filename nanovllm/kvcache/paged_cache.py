"""The KV cache without offload: all blocks that are attended are on the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nanovllm.data.batch import BlockMove, StateMove
from nanovllm.device import Device
from nanovllm.kvcache.base import AttendedPool, AttentionGeometry, KVCacheBase, StepTraffic
from nanovllm.kvcache.pools import KVPools
from nanovllm.layers.forward_context import ForwardContext
from nanovllm.memory.budget import DeviceSplit
from nanovllm.memory.layout import KVLayout
from nanovllm.ops import row_attention
from nanovllm.ops.attention import (
    MAX_DECODE_ROWS,
    AttentionBackend,
    AttentionMetadata,
    RowAttention,
    SequenceMetadata,
)
from nanovllm.ops.cpu_attention import MAX_STEP_ROWS, NativeAttention, PagedStep
from nanovllm.ops.row_kernels import narrow_, store_kv
from nanovllm.ops.upload import upload


@dataclass(frozen=True, slots=True)
class GroupTables:
    """What the layers of a KV group share in a step."""

    slots: Tensor  # the slot mapping
    table: AttentionMetadata
    few_rows: PagedStep | None  # faster attention for steps of few rows on the CPU
    rows: RowAttention | None  # and on other devices, if all sequences have few

    def blocks(self, pool: Tensor, block_size: int, *, written: bool = False) -> Iterator[Tensor]:
        """One plane of the blocks that the step attends to, or only of those that it writes, once each."""
        seen = {
            block: None
            for seq in self.table.sequences
            for block in seq.block_table[(seq.context_len - seq.first_position) // block_size if written else 0 :]
        }
        yield from (pool[block] for block in seen)


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
        self._pools = pools.resident_of
        self.attended_pool = AttendedPool(self._pools, self.layout.groups, geometry, backend)
        self._sequences: Sequence[SequenceMetadata] = ()  # of the current step
        self._groups: list[GroupTables] = []  # of the current step, see `_make_tables`

    def begin_step(
        self,
        sequences: Sequence[SequenceMetadata],
        moves: Sequence[BlockMove],
        state_moves: Sequence[StateMove] = (),
    ) -> StepTraffic:
        self.pools.move_blocks(moves, state_moves)
        self._sequences = sequences
        self._groups = []
        return StepTraffic([0] * len(sequences), [0] * len(sequences))

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, ctx: ForwardContext) -> Tensor:
        if not self._groups:
            self._make_tables()
        group, plane = self.layout.groups.of_layer[layer]
        step = self._groups[group]
        window = self.layout.groups[group].window
        pool = self._pools[group][plane]
        block_size = self.layout.groups[group].block_size
        self._device.declare_kernel("write K/V", writes=step.blocks(pool, block_size, written=True))
        if step.few_rows is not None:
            self._device.declare_kernel("attend", reads=step.blocks(pool, block_size))
            step.few_rows.attend(plane, q, k, v, self._geometry.sinks_of(layer))
            self._device.end_kernel()
            return q
        store_kv(pool, k, v, step.slots)
        self._device.declare_kernel("attend", reads=step.blocks(pool, block_size))
        if step.rows is not None:
            sinks = self._geometry.sinks_of(layer)
            step.rows.attend_rows(q, pool, step.table.on(q.device), q, self._geometry.scale, window, sinks)
            self._device.end_kernel()
            return q
        state = self._geometry.before_keys(layer, q)
        self._backend.attend(q, pool, step.table, state, self._geometry.scale, window)
        self._device.end_kernel()
        return narrow_(q, state.out)

    def _make_tables(self) -> None:
        """Build what the layers of each group share in the current step.

        The first layer that attends does it, since a step with a CUDA graph needs none of it.
        """
        for index, group in enumerate(self.layout.groups):
            sequences = [sequence.of_group(index) for sequence in self._sequences]
            visible = [seq.visible(group.window, group.block_size) for seq in sequences]
            slots = upload(torch.cat([_slots(seq, group.block_size) for seq in sequences]), self._device.torch_device)
            table = AttentionMetadata(visible)
            few_rows = None
            if isinstance(self._backend, NativeAttention) and len(slots) <= MAX_STEP_ROWS:
                dtype = self._geometry.dtype
                heads = self._geometry.num_heads
                scale = self._geometry.scale
                of_step = (slots, table, dtype, heads, scale, group.window)
                few_rows = PagedStep(self._pools[index], *of_step, self._backend.num_threads)
            is_few = all(seq.query_len <= MAX_DECODE_ROWS for seq in visible)
            rows = row_attention(self._backend) if is_few else None
            self._groups.append(GroupTables(slots, table, few_rows, rows))


def _slots(sequence: SequenceMetadata, block_size: int) -> Tensor:
    """The slot mapping of a sequence's rows, int64 [query_len]."""
    first = sequence.context_len // block_size
    positions = sequence.positions()
    blocks = torch.tensor(sequence.block_table[first:])[positions // block_size - first]
    return blocks * block_size + positions % block_size
