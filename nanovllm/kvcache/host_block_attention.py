"""The CPU arm: attention over blocks that stay on the host, while the link and the device work on the others.

Where the device shares the host's cores and memory, the arm is a call among the others, in the order of the blocks, and
the result is the same to the bit as without it. Elsewhere it runs on a stream of its own, see
`concurrent_cpu_attention.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from nanovllm.device import Busy, BusyMeter, Device
from nanovllm.forward_context import SequenceMetadata
from nanovllm.kvcache.base import AttentionGeometry
from nanovllm.kvcache.concurrent_cpu_attention import ConcurrentCpuAttention
from nanovllm.kvcache.decode_shares import (
    MAX_CPU_ATTENTION_TOKENS,
    Bandwidths,
    HostRead,
    LayerLoad,
    blocks_for_cpu_attention,
    blocks_of_share,
    corrected,
    cpu_attention_query_len,
)
from nanovllm.kvcache.offload_engine import OffloadEngine
from nanovllm.kvcache.step_plan import BlockRead, CpuAttentionGroup, LayerPlan, cpu_attention_candidates, leading_short
from nanovllm.ops import select_cpu_backend
from nanovllm.ops.attention import AttentionBackend, AttentionState


def cpu_attention_threads() -> int:
    """Threads of an arm beside the device: one core is left to the thread that drives it."""
    return max(1, torch.get_num_threads() - 1)


def cpu_attention_backend(device: Device, head_dim: int) -> AttentionBackend:
    """The CPU backend that attends as an arm of the device does."""
    return select_cpu_backend(head_dim, None if device.shares_host else cpu_attention_threads())


class SharePolicy(Protocol):
    """Decides how many of a layer's host blocks the arm takes."""

    def blocks_for_cpu_attention(self, load: LayerLoad) -> int: ...

    def observe(self, link: Busy, cpu: Busy) -> None:
        """What both have done by now, as running totals."""
        ...


class ForcedShare:
    """The same share of the blocks in every step, whatever that costs."""

    def __init__(self, share: float) -> None:
        self.share = share

    def blocks_for_cpu_attention(self, load: LayerLoad) -> int:
        return blocks_of_share(len(load.reads), self.share)

    def observe(self, link: Busy, cpu: Busy) -> None:
        return


class BalancedShare:
    """The share that the rates make best; they begin as measured at start and follow what real steps show."""

    def __init__(self, rates: Bandwidths, weight_bytes: int) -> None:
        self.rates = rates
        self._at_start = rates
        self._weight_bytes = weight_bytes  # of a layer
        self._link, self._cpu_attention = Busy(), Busy()

    def blocks_for_cpu_attention(self, load: LayerLoad) -> int:
        return blocks_for_cpu_attention(replace(load, weight_bytes=self._weight_bytes), self.rates)

    def observe(self, link: Busy, cpu: Busy) -> None:
        start, now = self._at_start, self.rates
        new_link, new_cpu_attention = link - self._link, cpu - self._cpu_attention
        link_rate = corrected(now.link, start.link, new_link.num_bytes, new_link.seconds)
        host_rate = corrected(now.host, start.host, new_cpu_attention.num_bytes, new_cpu_attention.seconds)
        # On one processor the device reads with the same kernel from the same memory.
        device_rate = host_rate if now.one_processor else now.device
        self.rates = replace(now, link=link_rate, host=host_rate, device=device_rate)
        self._link, self._cpu_attention = link, cpu


class HostBlockAttention:
    """Attends to the arm's share of a step's host blocks, and counts it. `policy` may be replaced between steps."""

    def __init__(
        self, engine: OffloadEngine, geometry: AttentionGeometry, backend: AttentionBackend, policy: SharePolicy
    ) -> None:
        """backend: attends in order, where the device shares the host; beside a device C++ does without it."""
        self.policy = policy
        self.concurrent = not engine.device.shares_host
        self._engine = engine
        self._device = engine.device
        self._geometry = geometry
        self._backend = backend
        self._most_tokens = cpu_attention_query_len(geometry.num_heads, engine.layout.num_kv_heads)
        self._busy = BusyMeter()
        self._concurrent: ConcurrentCpuAttention | None = None
        if self.concurrent:
            self._concurrent = ConcurrentCpuAttention(engine, geometry, cpu_attention_threads())

    # ---- steps

    def choose(self, reads: Sequence[BlockRead], sequences: Sequence[SequenceMetadata]) -> frozenset[int]:
        """Indices of the visits that the arm takes in a layer with these visits."""
        resident_blocks, token_bytes = self._engine.split.resident_blocks, self._engine.layout.token_layer_bytes
        num_short = leading_short(sequences, self._most_tokens, MAX_CPU_ATTENTION_TOKENS)
        found = cpu_attention_candidates(reads, resident_blocks, num_short)
        if not found:
            return frozenset()
        host_reads = [HostRead(reads[i].stored_tokens * token_bytes, len(reads[i].readers)) for i in found]
        candidates = set(found)
        others = [read for index, read in enumerate(reads) if index not in candidates]
        load = LayerLoad(
            host_reads,
            link_bytes=token_bytes * sum(v.stored_tokens for v in others if v.physical_id >= resident_blocks),
            device_bytes=token_bytes * sum(v.stored_tokens * len(v.readers) for v in others),
        )
        return frozenset(found[: self.policy.blocks_for_cpu_attention(load)])

    def begin_step(self, plans: Mapping[int | None, LayerPlan]) -> None:
        """Let the arm's work wait for what it reads, and prepare it; plans by sliding window.

        No block that it reads is written in the same step.
        """
        if any(plan.cpu_attention_groups for plan in plans.values()):
            self._engine.order.before_cpu_attention()
        if self._concurrent is not None:
            self._concurrent.begin_step(plans)

    def end_step(self) -> None:
        """Raises EngineError if a part of the step's work failed that nobody has waited for."""
        if self._concurrent is not None:
            self._concurrent.end_step()

    def observe(self) -> None:
        """Let the policy know how fast link and arm have been. Waits for nothing."""
        busy = self._busy.read() if self._concurrent is None else self._concurrent.busy()
        self.policy.observe(self._device.link_busy(), busy)

    # ---- layers

    def attend_in_order(self, layer: int, run: CpuAttentionGroup, q: Tensor, state: AttentionState) -> None:
        """Attention over a run on the compute stream, merged into `state`."""
        self._device.declare_kernel("attend on the host", reads=self._memory_of(layer, [run]))
        pool = self._engine.host[:, layer]  # [blocks, 2, kv_heads, block_size, head_dim]
        with self._busy.running(run.read_tokens * self._engine.layout.token_layer_bytes):
            self._backend.attend(q, pool, run.table, state, self._geometry.scale, self._geometry.windows[layer])
        self._device.end_kernel()
        self._count([run])

    def start(self, layer: int, plan: LayerPlan, q: Tensor) -> None:
        """Put attention over `plan.beside` on the arm's own stream, with copies of the queries and of the result."""
        if plan.concurrent:
            assert self._concurrent is not None, "an arm that shares the host has nothing beside the other items"
            self._concurrent.start(layer, plan, q, self._memory_of(layer, plan.concurrent))
            self._count(plan.concurrent)

    def merge(self, plan: LayerPlan, state: AttentionState) -> None:
        """Merge what `start` set going into `state`, in place."""
        if plan.concurrent:
            assert self._concurrent is not None
            self._concurrent.merge(plan, state)

    # ---- helpers

    def _count(self, groups: Sequence[CpuAttentionGroup]) -> None:
        for run in groups:
            self._engine.count_cpu_attention(len(run.reads), run.stored_tokens * self._engine.layout.token_layer_bytes)

    def _memory_of(self, layer: int, groups: Sequence[CpuAttentionGroup]) -> Iterator[Tensor]:
        for run in groups:
            for read in run.reads:
                yield self._engine.host[self._host_block(read), layer][:, :, : read.stored_tokens]

    def _host_block(self, read: BlockRead) -> int:
        return read.physical_id - self._engine.split.resident_blocks
