"""The KV cache with offload: attention over a long context, block group after block group. Resident groups are attended
in place, host groups in ring slots after a copy, or in host memory by the CPU; partial results are merged in fp32.

A layer goes through the groups of its `LayerPlan` in order. Resident groups are attended in the device pool. The
`OffloadEngine` loads ring groups, in the order that the step announced, and they are attended in the ring slots. Groups
for CPU attention go to `CpuAttention`, if there is one: in order with the others, or concurrently and merged last.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import chain
from typing import Protocol

from torch import Tensor

from nanovllm.data.batch import BlockMove, StateMove
from nanovllm.kvcache.base import AttentionGeometry, KVCacheBase, KVStats, StepTraffic
from nanovllm.kvcache.offload_engine import OffloadEngine
from nanovllm.kvcache.step_plan import (
    BlockRead,
    CpuAttentionGroup,
    LayerPlan,
    RingGroup,
    group_block_reads,
    plan_block_reads,
)
from nanovllm.layers.forward_context import ForwardContext
from nanovllm.ops.attention import AttentionBackend, AttentionState, SequenceMetadata
from nanovllm.ops.kv_quantization import has_scales
from nanovllm.ops.merge import (
    merge_attention_outputs as merge_attention_outputs,  # where users of the cache look for it
)
from nanovllm.ops.row_kernels import as_stored, narrow_


class CpuAttention(Protocol):
    """CPU attention of host blocks: what the offloaded KV cache needs of it. Implemented in `features/cpu_attention`.

    Each step calls `choose` and `begin_step`; for every layer `start`, `attend_in_order` for each group in its
    turn, and `merge`; then `end_step`.
    """

    concurrent: bool  # whether it runs concurrently with the device, or in order with the other groups

    def choose(
        self, reads: Sequence[Sequence[BlockRead]], sequences: Sequence[SequenceMetadata]
    ) -> Sequence[Collection[int]]:
        """Indices of the block reads that the CPU attends to. Reads and result are by KV group."""
        ...

    def begin_step(self, plans: Sequence[LayerPlan]) -> None:
        """Prepare the step's block groups, after the block moves. plans: by KV group."""
        ...

    def attend_in_order(self, layer: int, group: CpuAttentionGroup, q: Tensor, state: AttentionState) -> None:
        """Attend to a group on the compute stream and merge the result into `state`, in place."""
        ...

    def start(self, layer: int, plan: LayerPlan, q: Tensor) -> None:
        """Start attention over `plan.concurrent`, which runs while the device attends to `plan.items`."""
        ...

    def merge(self, layer: int, plan: LayerPlan, state: AttentionState) -> None:
        """Merge the result of `start` into `state`, in place."""
        ...

    def end_step(self) -> None:
        """Raises EngineError if concurrent work of the step failed."""
        ...


class OffloadedKVCache(KVCacheBase):
    """Plans the block reads of each step, announces them to the `OffloadEngine`, and attends layer by layer."""

    def __init__(
        self,
        engine: OffloadEngine,
        geometry: AttentionGeometry,
        backend: AttentionBackend,
        num_gpu_blocks: int,
        cpu_attention: CpuAttention | None = None,
    ) -> None:
        """cpu_attention: attends to a share of the host blocks on the CPU; None loads all of them."""
        super().__init__(engine, geometry, backend, num_gpu_blocks)
        self.engine = engine
        self.cpu_attention = cpu_attention
        self._stores_scales = has_scales(engine.ring.dtype)
        self._plans: list[LayerPlan] = []  # of the current step, by KV group

    def begin_step(
        self,
        sequences: Sequence[SequenceMetadata],
        moves: Sequence[BlockMove],
        state_moves: Sequence[StateMove] = (),
    ) -> StepTraffic:
        """See `KVCacheBase`. Announces the ring groups of all layers: `attend` must use them up in this order."""
        engine = self.engine
        groups = self.layout.groups
        of_groups = [[seq.of_group(index) for seq in sequences] for index in range(len(groups))]
        reads = [
            plan_block_reads(of_group, group.block_size, group.window)
            for of_group, group in zip(of_groups, groups, strict=True)
        ]
        chosen: Sequence[Collection[int]] = [()] * len(groups)  # by KV group: which reads the CPU attends to
        concurrent = False
        if self.cpu_attention is not None:
            chosen = self.cpu_attention.choose(reads, sequences)
            concurrent = self.cpu_attention.concurrent
        limits = (engine.split.resident_blocks, engine.group_slots)
        self._plans = [
            group_block_reads(of_reads, of_group, group.block_size, *limits, by_cpu, concurrent)
            for of_reads, of_group, group, by_cpu in zip(reads, of_groups, groups, chosen, strict=True)
        ]
        engine.move_blocks(moves, state_moves)
        if self.cpu_attention is not None:
            self.cpu_attention.begin_step(self._plans)
        # A shared block is loaded once; its bytes count for its first reader.
        traffic = StepTraffic([0] * len(sequences), [0] * len(sequences))
        ring = [[block_group.reads for block_group in plan.ring] for plan in self._plans]
        for layout, of_group in zip(self.layout.of_groups, ring, strict=True):
            loaded_bytes = layout.num_readers * layout.token_layer_bytes
            stored_bytes = layout.token_bytes
            for read in chain.from_iterable(of_group):
                traffic.h2d_bytes[read.readers[0]] += read.stored_tokens * loaded_bytes
                traffic.d2h_bytes[read.readers[0]] += read.new_tokens * stored_bytes
        engine.begin([(layer, uses) for layer, (index, _) in enumerate(groups.of_layer) for uses in ring[index]])
        return traffic

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, ctx: ForwardContext) -> Tensor:
        """See `forward_context.KVCache`. Overwrites q.

        Uses up the next ring groups that were announced to the engine: layers must be attended in order, each once a
        step. A ring group that is attended out of turn raises EngineError.
        """
        if self._stores_scales:
            k = as_stored(k, self.engine.ring.dtype)
            v = as_stored(v, self.engine.ring.dtype)
        groups = self.layout.groups
        index, plane = groups.of_layer[layer]  # its KV group, and its place among the layers of a block
        window = groups[index].window
        resident = self.engine.resident_of[index]
        plan = self._plans[index]
        state = self._geometry.before_keys(layer, q)
        cpu_attention = self.cpu_attention
        if cpu_attention is not None:
            cpu_attention.start(layer, plan, q)
        for group in plan.items:
            if isinstance(group, CpuAttentionGroup):
                assert cpu_attention is not None
                cpu_attention.attend_in_order(layer, group, q, state)
                continue
            in_ring = isinstance(group, RingGroup)
            pool = self.engine.acquire(layer, group.reads[0].physical_id) if in_ring else resident[plane]
            for at, read in group.written:
                self._write(read, pool[at], k, v, ctx.sequences)
            # A layer that shares an earlier layer's K/V writes the same rows into its slot; the host already has them.
            if in_ring and group.written and not groups.is_shared(layer):
                self.engine.write_back()
            blocks = zip(group.indices, group.reads, strict=True)
            self._device.declare_kernel("attend", reads=(pool[at][:, :, : read.held_tokens] for at, read in blocks))
            self._backend.attend(q, pool, group.table, state, self._geometry.scale, window)
            self._device.end_kernel()
            if in_ring:
                self.engine.release()
        if cpu_attention is not None:
            cpu_attention.merge(layer, plan, state)
        return narrow_(q, state.out)

    def end_step(self) -> None:
        if self.cpu_attention is not None:
            self.cpu_attention.end_step()

    def stats(self) -> KVStats:
        engine = self.engine
        stats = super().stats()
        return replace(
            stats,
            device_bytes=stats.device_bytes + engine.ring.nbytes,
            layerwise_memory=engine.layerwise_memory,
            layer_buffer_bytes=engine.layer_buffer.nbytes,
            blocks_in_flight=engine.blocks_in_flight,
        )

    def _write(
        self, read: BlockRead, block: Tensor, k: Tensor, v: Tensor, sequences: Sequence[SequenceMetadata]
    ) -> None:
        """Write the new tokens into the block `[2, kv_heads, block_size, head_dim]`."""
        seq = sequences[read.readers[0]]
        row = seq.query_start + read.first_position + read.stored_tokens - seq.context_len
        new = block[:, :, read.stored_tokens : read.held_tokens]
        self._device.declare_kernel("write K/V", writes=(new,))
        new[0] = k[row : row + read.new_tokens].transpose(0, 1)
        new[1] = v[row : row + read.new_tokens].transpose(0, 1)
