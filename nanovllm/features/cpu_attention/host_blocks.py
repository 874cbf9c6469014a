"""CPU attention of host blocks: the CPU attends to blocks in host memory while the others are loaded through the ring.

Where the device shares the host's cores and memory, CPU attention is a call among the others, in the order of the
blocks, and results are bit-identical to those without it. Elsewhere it runs concurrently with the device, on its own
stream: see `concurrent.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from nanovllm.device import Busy, BusyMeter, Device
from nanovllm.features.cpu_attention.bandwidth import measure_bandwidths
from nanovllm.features.cpu_attention.concurrent import ConcurrentCpuAttention
from nanovllm.features.cpu_attention.shares import (
    MAX_CPU_ATTENTION_TOKENS,
    ONE_PROCESSOR,
    Bandwidths,
    HostRead,
    LayerLoad,
    blocks_for_cpu_attention,
    can_attend_concurrently,
    corrected,
    cpu_attention_query_len,
)
from nanovllm.kvcache.base import AttentionGeometry
from nanovllm.kvcache.offload_engine import OffloadEngine
from nanovllm.kvcache.step_plan import BlockRead, CpuAttentionGroup, LayerPlan
from nanovllm.ops import select_cpu_backend
from nanovllm.ops.attention import AttentionBackend, AttentionState, SequenceMetadata

logger = logging.getLogger(__name__)


def make_cpu_attention(
    engine: OffloadEngine, geometry: AttentionGeometry, backend: AttentionBackend, layer_weight_bytes: int
) -> HostBlockAttention | None:
    """CPU attention for the host blocks of `engine`; None, with a log line, if the kernel does not take the head size.

    backend: of the device; layer_weight_bytes: weights of one layer. Measures bandwidths on a device with its own
    processor.
    """
    device, head_dim = engine.device, engine.layout.head_dim
    if not (device.shares_host or can_attend_concurrently(head_dim)):
        logger.info("no CPU attention: its kernel takes heads of a multiple of 16, not of %d", head_dim)
        return None
    host_backend = cpu_attention_backend(device, head_dim)
    rates = ONE_PROCESSOR
    if not device.shares_host:
        with device.compute():
            rates = measure_bandwidths(engine, geometry, backend, host_backend)
        gb_s = (rate / 1e9 for rate in (rates.link, rates.host, rates.device))
        logger.info("KV bandwidths in GB/s: link %.1f, CPU attention %.1f, device attention %.1f", *gb_s)
    return HostBlockAttention(engine, geometry, host_backend, BalancedShare(rates, layer_weight_bytes))


def cpu_attention_threads() -> int:
    """Threads of CPU attention next to a device: one core is left to the thread that drives the device."""
    return max(1, torch.get_num_threads() - 1)


def cpu_attention_backend(device: Device, head_dim: int) -> AttentionBackend:
    """The attention backend that CPU attention uses on this device's host."""
    return select_cpu_backend(head_dim, None if device.shares_host else cpu_attention_threads())


class SharePolicy(Protocol):
    """Decides how many of a layer's host blocks the CPU attends to."""

    def blocks_for_cpu_attention(self, load: LayerLoad) -> int: ...

    def observe(self, link: Busy, cpu: Busy) -> None:
        """What the link and CPU attention have done since the engine started, as running totals."""
        ...


class BalancedShare:
    """The share that minimises a layer's time. Rates start as measured and follow what the steps achieve."""

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
    """Implements `kvcache.chunked_attention.CpuAttention`. `policy` may be replaced between steps."""

    def __init__(
        self, engine: OffloadEngine, geometry: AttentionGeometry, backend: AttentionBackend, policy: SharePolicy
    ) -> None:
        """backend: attends in order on a device that shares the host. Concurrent attention uses the C++ kernel."""
        self.policy = policy
        self.concurrent = not engine.device.shares_host
        self._engine = engine
        self._device = engine.device
        self._geometry = geometry
        self._backend = backend
        self._max_query_len = cpu_attention_query_len(geometry.num_heads, engine.layout.num_kv_heads)
        self._busy = BusyMeter()
        self._concurrent: ConcurrentCpuAttention | None = None
        if self.concurrent:
            self._concurrent = ConcurrentCpuAttention(engine, geometry, cpu_attention_threads())

    # ---- steps

    def choose(
        self, reads: Mapping[int | None, Sequence[BlockRead]], sequences: Sequence[SequenceMetadata]
    ) -> dict[int | None, frozenset[int]]:
        """See `CpuAttention`. First corrects the rates from what earlier steps achieved; waits for nothing."""
        busy = self._busy.read() if self._concurrent is None else self._concurrent.busy()
        self.policy.observe(self._device.link_busy(), busy)
        num_short = leading_short(sequences, self._max_query_len, MAX_CPU_ATTENTION_TOKENS)
        return {window: self._choose(window_reads, num_short) for window, window_reads in reads.items()}

    def begin_step(self, plans: Mapping[int | None, LayerPlan]) -> None:
        """Order the step's reads of the host pool after earlier stores to it. No step writes a block that it reads."""
        if any(plan.cpu_attention_groups for plan in plans.values()):
            self._engine.order.before_cpu_attention()
        if self._concurrent is not None:
            self._concurrent.begin_step(plans)

    def end_step(self) -> None:
        if self._concurrent is not None:
            self._concurrent.end_step()

    # ---- layers

    def attend_in_order(self, layer: int, group: CpuAttentionGroup, q: Tensor, state: AttentionState) -> None:
        self._device.declare_kernel("attend on the host", reads=self._memory_of(layer, [group]))
        pool = self._engine.host[:, layer]  # [blocks, 2, kv_heads, block_size, head_dim]
        with self._busy.running(group.read_tokens * self._engine.layout.token_layer_bytes):
            self._backend.attend(q, pool, group.table, state, self._geometry.scale, self._geometry.windows[layer])
        self._device.end_kernel()
        self._count([group])

    def start(self, layer: int, plan: LayerPlan, q: Tensor) -> None:
        if plan.concurrent:
            assert self._concurrent is not None, "a device that shares the host has no concurrent groups"
            self._concurrent.start(layer, plan, q, self._memory_of(layer, plan.concurrent))
            self._count(plan.concurrent)

    def merge(self, plan: LayerPlan, state: AttentionState) -> None:
        if plan.concurrent:
            assert self._concurrent is not None
            self._concurrent.merge(plan, state)

    # ---- helpers

    def _choose(self, reads: Sequence[BlockRead], num_short: int) -> frozenset[int]:
        resident_blocks, token_bytes = self._engine.split.resident_blocks, self._engine.layout.token_layer_bytes
        candidates = cpu_attention_candidates(reads, resident_blocks, num_short)
        if not candidates:
            return frozenset()
        host_reads = [HostRead(reads[i].stored_tokens * token_bytes, len(reads[i].readers)) for i in candidates]
        others = [reads[i] for i in set(range(len(reads))) - set(candidates)]
        load = LayerLoad(
            host_reads,
            link_bytes=token_bytes * sum(r.stored_tokens for r in others if r.physical_id >= resident_blocks),
            device_bytes=token_bytes * sum(r.stored_tokens * len(r.readers) for r in others),
        )
        return frozenset(candidates[: self.policy.blocks_for_cpu_attention(load)])

    def _count(self, groups: Sequence[CpuAttentionGroup]) -> None:
        token_bytes = self._engine.layout.token_layer_bytes
        for group in groups:
            self._engine.count("cpu_attention", len(group.reads), group.stored_tokens * token_bytes)

    def _memory_of(self, layer: int, groups: Sequence[CpuAttentionGroup]) -> Iterator[Tensor]:
        first_host_id = self._engine.split.resident_blocks
        for group in groups:
            for read in group.reads:
                yield self._engine.host[read.physical_id - first_host_id, layer][:, :, : read.stored_tokens]


def leading_short(sequences: Sequence[SequenceMetadata], max_query_len: int, max_rows: int) -> int:
    """How many sequences at the start of the batch have at most `max_query_len` new tokens, and `max_rows` in total.

    Decoding sequences are at the start of a batch, so these sequences' rows are its first ones.
    """
    for index, seq in enumerate(sequences):
        if seq.query_len > max_query_len or seq.query_start + seq.query_len > max_rows:
            return index
    return len(sequences)


def cpu_attention_candidates(reads: Sequence[BlockRead], resident_blocks: int, num_short: int) -> list[int]:
    """Indices of the block reads that the CPU may attend to, in the order in which it takes them.

    These are host blocks that only the first `num_short` sequences read, and that get no new tokens: a block with new
    tokens passes through the ring, which writes and stores them. A shared block is loaded once, but the CPU would read
    it once for each reader. So blocks with few readers come first, and among those the last blocks of the sequences.
    """
    found = [
        index
        for index, read in enumerate(reads)
        if read.physical_id >= resident_blocks and not read.new_tokens and read.readers[-1] < num_short
    ]
    return sorted(found, key=lambda index: (len(reads[index].readers), -index))
