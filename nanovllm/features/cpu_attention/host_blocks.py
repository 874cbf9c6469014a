"""CPU attention of host blocks: the CPU attends to blocks in host memory while the others are loaded through the ring.

Where the device shares the host's cores and memory, CPU attention is a call among the others, in the order of the
blocks, and results are bit-identical to those without it. Elsewhere it runs concurrently with the device: a kernel
writes the queries to host memory, C++ attends on a stream of its own, and the merge, last and in fp32, reads the
partial state where it is. No copy has to wait behind loads of many MiB.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain

import torch
from torch import Tensor

from nanovllm.device import Device
from nanovllm.errors import ConfigError, quoted
from nanovllm.features.cpu_attention.balance import BalancedShare, StepTimes
from nanovllm.features.cpu_attention.bandwidth import measure_bandwidths
from nanovllm.features.cpu_attention.shares import (
    MAX_CPU_ATTENTION_TOKENS,
    ONE_PROCESSOR,
    HostRead,
    LayerLoad,
    can_attend_concurrently,
    cpu_attention_query_len,
)
from nanovllm.features.cpu_attention.step_clock import StepClock
from nanovllm.kvcache.base import AttentionGeometry
from nanovllm.kvcache.offload_engine import OffloadEngine
from nanovllm.kvcache.step_plan import BlockRead, CpuAttentionGroup, LayerPlan
from nanovllm.ops import select_cpu_backend
from nanovllm.ops.attention import AttentionBackend, AttentionState, SequenceMetadata
from nanovllm.ops.cpu_attention import HostAttention
from nanovllm.ops.merge import merge_attention_outputs

logger = logging.getLogger(__name__)

THREADS = "NANOVLLM_CPU_ATTENTION_THREADS"  # in the environment
LEFT_CORES = 2  # for the thread that drives the device and for the thread of the driver that runs the tasks' beginnings

_GRANULE = 16  # bytes that partial states are padded to


def make_cpu_attention(
    engine: OffloadEngine, geometry: AttentionGeometry, backend: AttentionBackend, layer_weight_bytes: int
) -> HostBlockAttention | None:
    """CPU attention for the host blocks of `engine`; None, with a log line, if the kernel does not take the head size.

    backend: of the device; layer_weight_bytes: weights of one layer. Measures bandwidths on a device with its own
    processor.
    """
    device = engine.device
    head_dims = engine.layout.head_dims
    unsupported = [head_dim for head_dim in head_dims if not can_attend_concurrently(head_dim)]
    host_backend = cpu_attention_backend(device, (unsupported or head_dims)[0])
    if device.shares_host:
        policy = BalancedShare(ONE_PROCESSOR, layer_weight_bytes)
        return HostBlockAttention(engine, geometry, host_backend, policy)
    if unsupported:
        logger.info("no CPU attention: its kernel takes heads of a multiple of 16, not of %d", unsupported[0])
        return None
    if device.mapped(device.empty_host("probe", (_GRANULE,), torch.uint8)) is None:
        logger.info("no CPU attention: the device's kernels cannot reach host memory")
        return None
    engine.order.add_cpu_attention_stream()
    with device.compute():
        rates = measure_bandwidths(engine, geometry, backend, host_backend)
    told = "KV bandwidths in GB/s: link %.1f, CPU attention %.1f, device attention %.1f"
    logger.info(told, rates.link / 1e9, rates.host / 1e9, rates.device / 1e9)
    return HostBlockAttention(engine, geometry, host_backend, BalancedShare(rates, layer_weight_bytes))


def cpu_attention_threads() -> int:
    """Threads of CPU attention next to a device: NANOVLLM_CPU_ATTENTION_THREADS, or as many as torch computes with on
    the cores that this process may use, but for two. Raises ConfigError for another value than a positive number."""
    given = os.environ.get(THREADS)
    if given is None:
        return max(1, min(torch.get_num_threads(), len(os.sched_getaffinity(0))) - LEFT_CORES)
    if not given.isdecimal() or int(given) < 1:
        raise ConfigError(f"{THREADS}={quoted(given)}: must be a positive number of threads")
    return int(given)


def cpu_attention_backend(device: Device, head_dim: int) -> AttentionBackend:
    """The attention backend that CPU attention uses on this device's host."""
    return select_cpu_backend(head_dim, None if device.shares_host else cpu_attention_threads())


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
        self._is_decode = False  # whether the step has no longer chunk, which would take most of its time
        self._concurrent: ConcurrentCpuAttention | None = None
        if not engine.device.shares_host:
            self._concurrent = ConcurrentCpuAttention(engine, geometry, cpu_attention_threads())
        self.concurrent = self._concurrent is not None

    # ---- steps

    def choose(
        self, reads: Sequence[Sequence[BlockRead]], sequences: Sequence[SequenceMetadata]
    ) -> list[frozenset[int]]:
        """See `CpuAttention`. First tells the policy what earlier steps took; waits for nothing."""
        if self._concurrent is not None:
            self._concurrent.clock.tell()
        num_short = leading_short(sequences, self._max_query_len, MAX_CPU_ATTENTION_TOKENS)
        self._is_decode = num_short == len(sequences)
        layouts = zip(reads, self._engine.layout.of_groups, strict=True)
        return [self._choose(of_group, layout.token_layer_bytes, num_short) for of_group, layout in layouts]

    def begin_step(self, plans: Sequence[LayerPlan]) -> None:
        """Order the step's reads of the host pool after earlier stores to it. No step writes a block that it reads."""
        if any(plan.cpu_attention_groups for plan in plans):
            self._engine.order.before_cpu_attention()
        if self._concurrent is not None:
            self._concurrent.begin_step(plans, self.policy.observe if self._is_decode else None)

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
        if self._concurrent is not None:
            index, plane = self._engine.layout.groups.of_layer[layer]
            reads = self._memory_of(self._engine.host_of[index][:, plane], plan.concurrent)
            self._concurrent.start(layer, plan, q, reads)
            self._count(index, plan.concurrent)

    def merge(self, layer: int, plan: LayerPlan, state: AttentionState) -> None:
        if self._concurrent is not None:
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
        self.clock = StepClock(engine)
        self._engine = engine
        self._device = engine.device
        self._geometry = geometry
        self._num_threads = num_threads
        by_size = {head_dim: Staging(engine.device, geometry, head_dim) for head_dim in engine.layout.head_dims}
        self._staging = [by_size[layout.head_dim] for layout in engine.layout.of_groups]  # by KV group
        self._prepared: Mapping[int, HostAttention] = {}  # of the step, by KV group
        self._launched = False  # in the current step

    def begin_step(self, plans: Sequence[LayerPlan], observe: Callable[[StepTimes], None] | None) -> None:
        """Prepare the concurrent block groups of the plans, which are by KV group; observe: see `StepClock`."""
        self._prepared = {index: self._prepare(index, plan) for index, plan in enumerate(plans) if plan.concurrent}
        self.clock.begin_step(plans, observe)

    def end_step(self) -> None:
        """Raises EngineError if a task of the step failed. On some devices, streams that wait for a task do not."""
        if self._launched:
            self._launched = False
            self._engine.order.finish_cpu_attention()

    def start(self, layer: int, plan: LayerPlan, q: Tensor, reads: Iterable[Tensor]) -> None:
        """Issue attention over `plan.concurrent`.

        reads: the parts of the host pool that are attended, for the ordering check.
        """
        self.clock.layer_begins(layer)
        if not plan.concurrent:
            return
        group, plane = self._engine.layout.groups.of_layer[layer]
        staging = self._staging[group]
        order = self._engine.order
        rows = plan.concurrent_rows
        device = self._device
        queries = staging.host_queries[:rows].flatten()
        device.declare_kernel("write queries for CPU attention", writes=(queries,))
        torch.mul(q[:rows], 1, out=staging.queries[:rows])  # no copy, which might be one of the copy engines
        device.end_kernel()
        stream = order.before_cpu_attention_call()
        partial = staging.used(rows)
        device.declare_kernel("attend on the host", reads=chain(reads, [queries]), writes=(partial,), stream=stream)
        stream.launch(self._prepared[group].task(plane * self._engine.layout.block_layer_bytes))
        self._launched = True
        self.clock.cpu_part_ends(layer, stream)
        order.after_cpu_attention_call()

    def merge(self, layer: int, plan: LayerPlan, state: AttentionState) -> None:
        """Merge the result of `start` into `state`, in place."""
        if plan.concurrent:
            staging = self._staging[self._engine.layout.groups.of_layer[layer][0]]
            rows = plan.concurrent_rows
            self.clock.device_part_ends(layer)
            self._engine.order.before_merge()
            self._device.declare_kernel("merge CPU attention", reads=(staging.used(rows),))
            partial = staging.state(staging.partial, rows)
            merge_attention_outputs(state.out[:rows], state.lse[:, :rows], partial.out, partial.lse)
            self._device.end_kernel()
        self.clock.layer_ends(layer)

    def _prepare(self, kv_group: int, plan: LayerPlan) -> HostAttention:
        staging = self._staging[kv_group]
        rows = plan.concurrent_rows
        return HostAttention(
            staging.host_queries[:rows],
            self._engine.host_of[kv_group][:, 0],
            [group.table for group in plan.concurrent],
            staging.state(staging.host_partial, rows),
            self._geometry.scale,
            self._engine.layout.groups[kv_group].window,
            num_threads=self._num_threads,
        )


class Staging:
    """Host buffers for the queries of a step's short sequences and for their partial state, as both sides see them.

    A partial state of n rows is contiguous: output `[n, heads, head_dim]`, then LSE `[heads, n]`, fp32. One buffer of
    each kind suffices, since a layer's partial state is merged before the next layer has queries.
    """

    def __init__(self, device: Device, geometry: AttentionGeometry, head_dim: int) -> None:
        heads = geometry.num_heads
        self._heads = heads
        self._head_dim = head_dim
        queries = (MAX_CPU_ATTENTION_TOKENS, heads, head_dim)
        partial = (MAX_CPU_ATTENTION_TOKENS * heads * (head_dim + 1) + _GRANULE,)
        self.host_queries = device.empty_host("CPU attention queries", queries, geometry.dtype)
        self.host_partial = device.empty_host("CPU attention state", partial, torch.float32)
        mapped = device.mapped(self.host_queries), device.mapped(self.host_partial)
        assert mapped[0] is not None and mapped[1] is not None, "without it there is no CPU attention"
        # the same memory, for kernels
        self.queries = mapped[0]
        self.partial = mapped[1]

    def state(self, buffer: Tensor, rows: int) -> AttentionState:
        """The first `rows` query rows of a partial buffer as a state."""
        heads = self._heads
        head_dim = self._head_dim
        floats = rows * heads * head_dim
        lse = buffer[floats : floats + rows * heads].view(heads, rows)
        return AttentionState(buffer[:floats].view(rows, heads, head_dim), lse)

    def used(self, rows: int) -> Tensor:
        """The part of the partial buffer that a state of `rows` rows takes, padded to a multiple of _GRANULE bytes."""
        floats = rows * self._heads * (self._head_dim + 1)
        granule = _GRANULE // 4
        return self.host_partial[: -(-floats // granule) * granule]


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
    candidates = [
        index
        for index, read in enumerate(reads)
        if read.physical_id >= resident_blocks and not read.new_tokens and read.readers[-1] < num_short
    ]
    return sorted(candidates, key=lambda index: (len(reads[index].readers), -index))
