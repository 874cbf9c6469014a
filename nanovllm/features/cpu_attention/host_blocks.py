"""CPU attention of host blocks: the CPU attends to blocks in host memory while the others are loaded through the ring.

Where the device shares the host's cores and memory, CPU attention is a call among the others, in the order of the
blocks, and results are bit-identical to those without it. Elsewhere it runs concurrently with the device: queries are
copied to the host, C++ attends on a stream of its own, and the partial result is copied back and merged last, in fp32.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain

import torch
from torch import Tensor

from nanovllm.device import Busy, Device, PitchedCopy, Stream
from nanovllm.features.cpu_attention.bandwidth import measure_bandwidths
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
from nanovllm.ops.cpu_attention import HostAttention, Meter
from nanovllm.ops.merge import merge_states_

logger = logging.getLogger(__name__)

_GRANULE = 16  # bytes that partial states are padded to


def make_cpu_attention(
    engine: OffloadEngine, geometry: AttentionGeometry, backend: AttentionBackend, layer_weight_bytes: int
) -> HostBlockAttention | None:
    """CPU attention for the host blocks of `engine`; None, with a log line, if the kernel does not take the head size.

    backend: of the device; layer_weight_bytes: weights of one layer. Measures bandwidths on a device with its own
    processor.
    """
    device, head_dims = engine.device, engine.layout.head_dims
    unsupported = [head_dim for head_dim in head_dims if not can_attend_concurrently(head_dim)]
    if unsupported and not device.shares_host:
        logger.info("no CPU attention: its kernel takes heads of a multiple of 16, not of %d", unsupported[0])
        return None
    host_backend = cpu_attention_backend(device, (unsupported or head_dims)[0])
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


class BalancedShare:
    """The share of a layer's host blocks for the CPU that minimises the layer's time.

    Rates start as measured and follow what the steps achieve.
    """

    def __init__(self, rates: Bandwidths, weight_bytes: int) -> None:
        self.rates = rates
        self._at_start = rates
        self._weight_bytes = weight_bytes  # of a layer
        self._link, self._cpu_attention = Busy(), Busy()

    def blocks_for_cpu_attention(self, load: LayerLoad) -> int:
        return blocks_for_cpu_attention(replace(load, weight_bytes=self._weight_bytes), self.rates)

    def observe(self, link: Busy, cpu: Busy) -> None:
        """Correct the rates by what link and CPU attention did since the engine started, given as running totals."""
        start, now = self._at_start, self.rates
        new_link, new_cpu_attention = link - self._link, cpu - self._cpu_attention
        link_rate = corrected(now.link, start.link, new_link.num_bytes, new_link.seconds)
        host_rate = corrected(now.host, start.host, new_cpu_attention.num_bytes, new_cpu_attention.seconds)
        self.rates = replace(now, link=link_rate, host=host_rate)
        self._link, self._cpu_attention = link, cpu


class HostBlockAttention:
    """Implements `kvcache.chunked_attention.CpuAttention`. `policy` may be replaced between steps."""

    def __init__(
        self, engine: OffloadEngine, geometry: AttentionGeometry, backend: AttentionBackend, policy: BalancedShare
    ) -> None:
        """backend: attends in order on a device that shares the host. Concurrent attention uses the C++ kernel."""
        self.policy = policy
        self._engine = engine
        self._device = engine.device
        self._geometry = geometry
        self._backend = backend
        self._max_query_len = cpu_attention_query_len(geometry.num_heads, engine.layout.num_kv_heads)
        self._concurrent: ConcurrentCpuAttention | None = None
        if not engine.device.shares_host:
            self._concurrent = ConcurrentCpuAttention(engine, geometry, cpu_attention_threads())
        self.concurrent = self._concurrent is not None

    # ---- steps

    def choose(
        self, reads: Sequence[Sequence[BlockRead]], sequences: Sequence[SequenceMetadata]
    ) -> list[frozenset[int]]:
        """See `CpuAttention`. First corrects the rates from what earlier steps achieved; waits for nothing."""
        if self._concurrent is not None:
            self.policy.observe(self._device.link_busy(), self._concurrent.busy())
        num_short = leading_short(sequences, self._max_query_len, MAX_CPU_ATTENTION_TOKENS)
        layouts = zip(reads, self._engine.layout.of_groups, strict=True)
        return [self._choose(of_group, layout.token_layer_bytes, num_short) for of_group, layout in layouts]

    def begin_step(self, plans: Sequence[LayerPlan]) -> None:
        """Order the step's reads of the host pool after earlier stores to it. No step writes a block that it reads."""
        if any(plan.cpu_attention_groups for plan in plans):
            self._engine.order.before_cpu_attention()
        if self._concurrent is not None:
            self._concurrent.begin_step(plans)

    def end_step(self) -> None:
        if self._concurrent is not None:
            self._concurrent.end_step()

    # ---- layers

    def attend_in_order(self, layer: int, group: CpuAttentionGroup, q: Tensor, state: AttentionState) -> None:
        groups = self._engine.layout.groups
        index, plane = groups.of_layer[layer]
        pool = self._engine.host_of[index][:, plane]  # [blocks, 2, kv_heads, block_size, head_dim]
        self._device.declare_kernel("attend on the host", reads=self._memory_of(pool, [group]))
        self._backend.attend(q, pool, group.table, state, self._geometry.scale, groups[index].window)
        self._device.end_kernel()
        self._count(index, [group])

    def start(self, layer: int, plan: LayerPlan, q: Tensor) -> None:
        if plan.concurrent:
            assert self._concurrent is not None, "a device that shares the host has no concurrent groups"
            index, plane = self._engine.layout.groups.of_layer[layer]
            reads = self._memory_of(self._engine.host_of[index][:, plane], plan.concurrent)
            self._concurrent.start(layer, plan, q, reads)
            self._count(index, plan.concurrent)

    def merge(self, layer: int, plan: LayerPlan, state: AttentionState) -> None:
        if plan.concurrent:
            assert self._concurrent is not None
            self._concurrent.merge(layer, plan, state)

    # ---- helpers

    def _choose(self, reads: Sequence[BlockRead], token_bytes: int, num_short: int) -> frozenset[int]:
        resident_blocks = self._engine.split.resident_blocks
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

    def _count(self, kv_group: int, groups: Sequence[CpuAttentionGroup]) -> None:
        token_bytes = self._engine.layout.of_groups[kv_group].token_layer_bytes
        for group in groups:
            self._engine.count("cpu_attention", len(group.reads), group.stored_tokens * token_bytes)

    def _memory_of(self, pool: Tensor, groups: Sequence[CpuAttentionGroup]) -> Iterator[Tensor]:
        first_host_id = self._engine.split.resident_blocks
        for group in groups:
            for read in group.reads:
                yield pool[read.physical_id - first_host_id][:, :, : read.stored_tokens]


class ConcurrentCpuAttention:
    """The concurrent groups of a step, prepared when the step begins and launched layer by layer."""

    def __init__(self, engine: OffloadEngine, geometry: AttentionGeometry, num_threads: int) -> None:
        self._engine = engine
        self._device = engine.device
        self._geometry = geometry
        self._num_threads = num_threads
        by_size = {head_dim: Staging(engine.device, geometry, head_dim) for head_dim in engine.layout.head_dims}
        self._staging = [by_size[layout.head_dim] for layout in engine.layout.of_groups]  # by KV group
        self._meter = Meter()
        self._prepared: Mapping[int, HostAttention] = {}  # of the step, by KV group
        self._launched = False  # in the current step
        engine.order.add_cpu_attention_streams()

    def begin_step(self, plans: Sequence[LayerPlan]) -> None:
        """Prepare the concurrent block groups of the plans, which are by KV group."""
        self._prepared = {index: self._prepare(index, plan) for index, plan in enumerate(plans) if plan.concurrent}

    def end_step(self) -> None:
        """Raises EngineError if a task of the step failed. On some devices, streams that wait for a task do not."""
        if self._launched:
            self._launched = False
            self._engine.order.finish_cpu_attention()

    def busy(self) -> Busy:
        """Bytes read since the start, and the time that took."""
        return Busy(*self._meter.read())

    def start(self, layer: int, plan: LayerPlan, q: Tensor, reads: Iterable[Tensor]) -> None:
        """Issue attention over `plan.concurrent`, with copies of the queries and of the result.

        reads: the parts of the host pool that are attended, for the ordering check.
        """
        group, plane = self._engine.layout.groups.of_layer[layer]
        staging, order = self._staging[group], self._engine.order
        rows, device = plan.concurrent_rows, self._device
        device.declare_kernel("write queries for CPU attention", writes=(staging.queries[:rows].flatten(),))
        staging.queries[:rows] = q[:rows]
        device.end_kernel()
        staging.copy_queries(rows, order.before_queries())
        stream = order.before_cpu_attention_call()
        device.declare_kernel(
            "attend on the host",
            reads=chain(reads, [staging.host_queries[:rows].flatten()]),
            writes=(staging.used(staging.host_partial, rows),),
            stream=stream,
        )
        stream.launch(self._prepared[group].task(plane * self._engine.layout.block_layer_bytes))
        self._launched = True
        staging.copy_partial(rows, order.before_partial())
        order.after_partial()

    def merge(self, layer: int, plan: LayerPlan, state: AttentionState) -> None:
        """Merge the result of `start` into `state`, in place."""
        staging, rows = self._staging[self._engine.layout.groups.of_layer[layer][0]], plan.concurrent_rows
        self._engine.order.before_merge()
        self._device.declare_kernel("merge CPU attention", reads=(staging.used(staging.partial, rows),))
        partial = staging.state(staging.partial, rows)
        merge_states_(state.out[:rows], state.lse[:, :rows], partial.out, partial.lse)
        self._device.end_kernel()

    def _prepare(self, kv_group: int, plan: LayerPlan) -> HostAttention:
        staging, rows = self._staging[kv_group], plan.concurrent_rows
        token_bytes = self._engine.layout.of_groups[kv_group].token_layer_bytes
        return HostAttention(
            staging.host_queries[:rows],
            self._engine.host_of[kv_group][:, 0],
            [group.table for group in plan.concurrent],
            staging.state(staging.host_partial, rows),
            self._geometry.scale,
            self._engine.layout.groups[kv_group].window,
            num_threads=self._num_threads,
            read_bytes=sum(group.read_tokens for group in plan.concurrent) * token_bytes,
            meter=self._meter,
        )


class Staging:
    """Buffers on device and host for the queries of a step's short sequences, and for their partial state.

    A partial state of n rows is contiguous, so that it takes one copy: output `[n, heads, head_dim]`, then LSE
    `[heads, n]`, fp32. One buffer of each kind suffices, since a layer's partial state is merged before the next layer
    has queries.
    """

    def __init__(self, device: Device, geometry: AttentionGeometry, head_dim: int) -> None:
        self._device = device
        self._heads, self._head_dim = heads, head_dim = geometry.num_heads, head_dim
        dtype = geometry.dtype
        queries = (MAX_CPU_ATTENTION_TOKENS, heads, head_dim)
        partial = (MAX_CPU_ATTENTION_TOKENS * heads * (head_dim + 1) + _GRANULE,)
        self.queries = device.empty("CPU attention queries", queries, dtype)
        self.partial = device.empty("CPU attention state", partial, torch.float32)
        self.host_queries = device.empty_host("CPU attention queries on the host", queries, dtype)
        self.host_partial = device.empty_host("CPU attention state on the host", partial, torch.float32)

    def state(self, buffer: Tensor, rows: int) -> AttentionState:
        """The first `rows` query rows of a partial buffer as a state."""
        heads, head_dim = self._heads, self._head_dim
        floats = rows * heads * head_dim
        lse = buffer[floats : floats + rows * heads].view(heads, rows)
        return AttentionState(buffer[:floats].view(rows, heads, head_dim), lse)

    def used(self, buffer: Tensor, rows: int) -> Tensor:
        """The part of a partial buffer that a state of `rows` rows takes, padded to a multiple of _GRANULE bytes."""
        floats, granule = rows * self._heads * (self._head_dim + 1), _GRANULE // 4
        return buffer[: -(-floats // granule) * granule]

    def copy_queries(self, rows: int, stream: Stream) -> None:
        dst, src = self.host_queries[:rows].flatten(), self.queries[:rows].flatten()
        self._device.copy_2d(PitchedCopy(dst, src, src.nbytes, src.nbytes, src.nbytes, 1, "d2h"), stream)

    def copy_partial(self, rows: int, stream: Stream) -> None:
        dst, src = self.used(self.partial, rows), self.used(self.host_partial, rows)
        self._device.copy_2d(PitchedCopy(dst, src, src.nbytes, src.nbytes, src.nbytes, 1, "h2d"), stream)


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
