"""Attention over a long context in chunks: each group of KV blocks is attended where it is, and the partial results are
merged in fp32.

A layer goes through the groups of its `LayerPlan` in order. Resident groups are attended in the device pool. The
`OffloadEngine` loads ring groups, in the order that the step announced, and they are attended in the ring slots. Groups
for CPU attention go to `CpuAttention`, if there is one: in order with the others, or concurrently and merged last.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from nanovllm.kvcache.base import AttentionGeometry
from nanovllm.kvcache.offload_engine import OffloadEngine, RingUse, SlotTokens
from nanovllm.kvcache.step_plan import BlockRead, CpuAttentionGroup, LayerPlan, ResidentGroup, RingGroup
from nanovllm.ops.attention import AttentionBackend, AttentionState, SequenceMetadata
from nanovllm.ops.merge import merge_states_
from nanovllm.ops.triton_support import use_triton


class CpuAttention(Protocol):
    """CPU attention of host blocks: what the offloaded KV cache needs of it. Implemented by `nanovllm.cpu_attention`.

    Each step calls `choose`, `begin_step`, the three attention methods for every layer, and `end_step`.
    """

    concurrent: bool  # whether it runs concurrently with the device, or in order with the other groups

    def choose(
        self, reads: Mapping[int | None, Sequence[BlockRead]], sequences: Sequence[SequenceMetadata]
    ) -> Mapping[int | None, Collection[int]]:
        """Indices of the block reads that the CPU attends to. Both mappings are keyed by sliding window."""
        ...

    def begin_step(self, plans: Mapping[int | None, LayerPlan]) -> None:
        """Prepare the step's groups. Called after the block moves; `plans` is keyed by sliding window."""
        ...

    def attend_in_order(self, layer: int, group: CpuAttentionGroup, q: Tensor, state: AttentionState) -> None:
        """Attend to a group on the compute stream and merge the result into `state`, in place."""
        ...

    def start(self, layer: int, plan: LayerPlan, q: Tensor) -> None:
        """Start attention over `plan.concurrent`, which runs while the device attends to `plan.items`."""
        ...

    def merge(self, plan: LayerPlan, state: AttentionState) -> None:
        """Merge the result of `start` into `state`, in place."""
        ...

    def end_step(self) -> None:
        """Raises EngineError if concurrent work of the step failed."""
        ...


class ChunkedAttention:
    """Stores the new K/V of a layer and attends to all block groups of its plan."""

    def __init__(
        self,
        engine: OffloadEngine,
        geometry: AttentionGeometry,
        backend: AttentionBackend,
        cpu_attention: CpuAttention | None,
    ) -> None:
        self._engine = engine
        self._device = engine.device
        self._geometry = geometry
        self._backend = backend
        self._cpu_attention = cpu_attention

    def attend(
        self, layer: int, plan: LayerPlan, q: Tensor, k: Tensor, v: Tensor, sequences: Sequence[SequenceMetadata]
    ) -> Tensor:
        """The output `[tokens, heads, head_dim]`, which overwrites q.

        q: [tokens, heads, head_dim]; k, v: [tokens, kv_heads, head_dim]. Uses up the next ring groups that were
        announced to the engine: layers must be attended in order, each once a step. Raises EngineError otherwise.
        """
        state, cpu_attention = AttentionState.empty(q), self._cpu_attention
        if cpu_attention is not None:
            cpu_attention.start(layer, plan, q)
        for group in plan.items:
            if isinstance(group, RingGroup):
                self._attend_ring_group(layer, group, q, k, v, sequences, state)
            elif isinstance(group, ResidentGroup):
                self._attend_resident_group(layer, group, q, k, v, sequences, state)
            else:
                assert isinstance(group, CpuAttentionGroup) and cpu_attention is not None
                cpu_attention.attend_in_order(layer, group, q, state)
        if cpu_attention is not None:
            cpu_attention.merge(plan, state)
        return state.write_output_(q)

    def ring_use(self, layer: int, read: BlockRead) -> RingUse:
        """How the ring announces and loads the block."""
        return RingUse(layer, self._host_block(read), read.stored_tokens)

    def _attend_resident_group(
        self,
        layer: int,
        group: ResidentGroup,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sequences: Sequence[SequenceMetadata],
        state: AttentionState,
    ) -> None:
        pool = self._engine.resident[layer]
        for read in group.reads:
            if read.new_tokens:
                self._write(read, pool[read.physical_id], k, v, sequences)
        reads = (pool[read.physical_id][:, :, : read.held_tokens] for read in group.reads)
        self._device.declare_kernel("attend", reads=reads)
        self._backend.attend(q, pool, group.table, state, self._geometry.scale, self._geometry.windows[layer])
        self._device.end_kernel()

    def _attend_ring_group(
        self,
        layer: int,
        group: RingGroup,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sequences: Sequence[SequenceMetadata],
        state: AttentionState,
    ) -> None:
        slots, blocks = self._engine.acquire(self.ring_use(layer, group.reads[0]))
        written = [(index, read) for index, read in enumerate(group.reads) if read.new_tokens]
        for index, read in written:
            self._write(read, blocks[index], k, v, sequences)
        if written:
            self._engine.store(
                [
                    SlotTokens(slots[index], layer, self._host_block(read), read.stored_tokens, read.new_tokens)
                    for index, read in written
                ]
            )
        reads = (block[:, :, : read.held_tokens] for block, read in zip(blocks, group.reads, strict=True))
        self._device.declare_kernel("attend", reads=reads)
        self._backend.attend(q, blocks, group.table, state, self._geometry.scale, self._geometry.windows[layer])
        self._device.end_kernel()
        self._engine.release()

    def _host_block(self, read: BlockRead) -> int:
        return read.physical_id - self._engine.split.resident_blocks

    def _write(
        self, read: BlockRead, block: Tensor, k: Tensor, v: Tensor, sequences: Sequence[SequenceMetadata]
    ) -> None:
        """Write the new tokens into the block `[2, kv_heads, block_size, head_dim]`."""
        begin, end = read.stored_tokens, read.held_tokens
        seq = sequences[read.readers[0]]
        row = seq.query_start + read.first_position + begin - seq.context_len
        new = block[:, :, begin:end]
        self._device.declare_kernel("write K/V", writes=(new,))
        new[0] = k[row : row + read.new_tokens].transpose(0, 1)
        new[1] = v[row : row + read.new_tokens].transpose(0, 1)


def merge_attention_outputs(o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over two disjoint sets of keys as one: (output in o1's dtype, LSE fp32), both new.

    o1, o2: [tokens, heads, head_dim], any floating dtype; lse1, lse2: natural log, fp32 [heads, tokens], -inf where no
    key was seen. Computed in fp32 and rounded once. Keep the running output of many merges in fp32, so that the error
    does not grow with their number. `ops.merge.merge_states_` has the formula and the edge cases. On a GPU with Triton
    the merge is one launch. Raises ValueError for shapes that do not match.
    """
    if not o1.shape == o2.shape or not lse1.shape == lse2.shape == (o1.shape[1], o1.shape[0]):
        raise ValueError(
            f"outputs must be [tokens, heads, head_dim] and LSEs [heads, tokens], alike on both sides; got outputs "
            f"{tuple(o1.shape)} and {tuple(o2.shape)}, LSEs {tuple(lse1.shape)} and {tuple(lse2.shape)}"
        )
    if use_triton(o1):
        from nanovllm.ops.triton_merge import merge_parts_triton

        out, lse = torch.empty_like(o1), torch.empty_like(lse1)
        merge_parts_triton(out, lse, o1, lse1, o2.unsqueeze(0), lse2.unsqueeze(0))
        return out, lse
    out, lse = o1.to(torch.float32, copy=True), lse1.clone()
    merge_states_(out, lse, o2, lse2)
    return out.to(o1.dtype), lse
