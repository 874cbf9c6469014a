"""The CPU arm: attention over blocks that stay on the host, while the link and the device work on the others.

Where the device shares the host's cores and memory, the arm is a call among the others, in the order of the blocks, and
the result is the same to the bit as without it. Elsewhere it runs on a stream of its own: queries go down, the CPU
attends, a partial state comes up and is merged last, in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Protocol

import torch
from torch import Tensor

from nanovllm.device import Busy, BusyMeter, Device, PitchedCopy, Stream
from nanovllm.forward_context import SequenceSlice
from nanovllm.kvcache.decode_shares import (
    MAX_ARM_TOKENS,
    Bandwidths,
    HostRead,
    LayerLoad,
    arm_query_len,
    blocks_for_arm,
    blocks_of_share,
    corrected,
)
from nanovllm.kvcache.offload_engine import OffloadEngine
from nanovllm.kvcache.room import AttentionGeometry
from nanovllm.kvcache.step_plan import ArmRun, BlockVisit, LayerPlan, arm_candidates, leading_short
from nanovllm.ops import select_cpu_backend
from nanovllm.ops.attention import AttentionBackend, AttentionState
from nanovllm.ops.merge import merge_states_

_GRANULE = 16  # bytes that partial states are padded to


def arm_backend(device: Device, head_dim: int) -> AttentionBackend:
    """The CPU backend of an arm. Beside the device it leaves a core to the thread that drives it."""
    threads = None if device.shares_host else max(1, torch.get_num_threads() - 1)
    return select_cpu_backend(head_dim, threads)


class SharePolicy(Protocol):
    """Decides how many of a layer's host blocks the arm takes."""

    def blocks_for_arm(self, load: LayerLoad) -> int: ...

    def observe(self, link: Busy, arm: Busy) -> None:
        """What both have done by now, as running totals."""
        ...


class ForcedShare:
    """The same share of the blocks in every step, whatever that costs."""

    def __init__(self, share: float) -> None:
        self.share = share

    def blocks_for_arm(self, load: LayerLoad) -> int:
        return blocks_of_share(len(load.reads), self.share)

    def observe(self, link: Busy, arm: Busy) -> None:
        return


class BalancedShare:
    """The share that the rates make best; they begin as measured at start and follow what real steps show."""

    def __init__(self, rates: Bandwidths, weight_bytes: int) -> None:
        self.rates = rates
        self._at_start = rates
        self._weight_bytes = weight_bytes  # of a layer
        self._link, self._arm = Busy(), Busy()

    def blocks_for_arm(self, load: LayerLoad) -> int:
        return blocks_for_arm(replace(load, weight_bytes=self._weight_bytes), self.rates)

    def observe(self, link: Busy, arm: Busy) -> None:
        start, now = self._at_start, self.rates
        new_link, new_arm = link - self._link, arm - self._arm
        link_rate = corrected(now.link, start.link, new_link.num_bytes, new_link.seconds)
        host_rate = corrected(now.host, start.host, new_arm.num_bytes, new_arm.seconds)
        # On one processor the device reads with the same kernel from the same memory.
        device_rate = host_rate if now.one_processor else now.device
        self.rates = replace(now, link=link_rate, host=host_rate, device=device_rate)
        self._link, self._arm = link, arm


class HostArm:
    """Attends to the arm's share of a step's host blocks, and counts it. `policy` may be replaced between steps."""

    def __init__(
        self, engine: OffloadEngine, geometry: AttentionGeometry, backend: AttentionBackend, policy: SharePolicy
    ) -> None:
        self.policy = policy
        self.beside = not engine.device.shares_host
        self._engine = engine
        self._device = engine.device
        self._geometry = geometry
        self._backend = backend
        self._most_tokens = arm_query_len(geometry.num_heads, engine.layout.num_kv_heads)
        self._busy = BusyMeter()
        self._launched = False  # in the step under way
        self._staging: Staging | None = None
        if self.beside:
            self._staging = Staging(engine, geometry.num_heads)
            engine.order.put_arm_beside()

    # ---- steps

    def choose(self, visits: Sequence[BlockVisit], sequences: Sequence[SequenceSlice]) -> frozenset[int]:
        """Indices of the visits that the arm takes in a layer with these visits."""
        resident_blocks, token_bytes = self._engine.split.resident_blocks, self._engine.layout.token_layer_bytes
        num_short = leading_short(sequences, self._most_tokens, MAX_ARM_TOKENS)
        found = arm_candidates(visits, resident_blocks, num_short)
        if not found:
            return frozenset()
        reads = [HostRead(visits[i].stored_tokens * token_bytes, len(visits[i].readers)) for i in found]
        candidates = set(found)
        others = [visit for index, visit in enumerate(visits) if index not in candidates]
        load = LayerLoad(
            reads,
            link_bytes=token_bytes * sum(v.stored_tokens for v in others if v.place >= resident_blocks),
            device_bytes=token_bytes * sum(v.stored_tokens * len(v.readers) for v in others),
        )
        return frozenset(found[: self.policy.blocks_for_arm(load)])

    def begin_step(self, plans: Sequence[LayerPlan]) -> None:
        """Let the arm's work wait for what it reads. No block that it reads is written in the same step."""
        if any(plan.arm_runs for plan in plans):
            self._engine.order.before_arm()

    def end_step(self) -> None:
        """Raises EngineError if a call of the step failed; on some devices nobody who waits for a call learns of it."""
        if self._launched:
            self._launched = False
            self._engine.order.finish_arm()

    def observe(self) -> None:
        """Let the policy know how fast link and arm have been. Waits for nothing."""
        self.policy.observe(self._device.link_busy(), self._busy.read())

    # ---- layers

    def attend_in_order(self, layer: int, run: ArmRun, q: Tensor, state: AttentionState) -> None:
        """Attention over a run on the compute stream, merged into `state`."""
        self._device.declare_kernel("attend on the host", reads=self._memory_of(layer, [run]))
        self._attend(layer, [run], q, state)
        self._device.end_kernel()
        self._count([run])

    def start(self, layer: int, plan: LayerPlan, q: Tensor) -> None:
        """Put attention over `plan.beside` on the arm's own stream, with copies of the queries and of the result."""
        if not plan.beside:
            return
        staging, order = self._staging, self._engine.order
        assert staging is not None, "an arm that shares the host has nothing beside the other items"
        rows, device = plan.beside_rows, self._device
        device.declare_kernel("write the arm's queries", writes=(staging.queries[:rows].flatten(),))
        staging.queries[:rows] = q[:rows]
        device.end_kernel()
        staging.copy_queries(rows, order.before_queries())
        stream = order.before_arm_call()
        device.declare_kernel(
            "attend on the host",
            reads=chain(self._memory_of(layer, plan.beside), [staging.host_queries[:rows].flatten()]),
            writes=(staging.used(staging.host_partial, rows),),
            stream=stream,
        )
        stream.launch(self._call(layer, plan.beside, staging, rows))
        self._launched = True
        self._count(plan.beside)
        staging.copy_partial(rows, order.before_partial())
        order.after_partial()

    def merge(self, plan: LayerPlan, state: AttentionState) -> None:
        """Merge what `start` set going into `state`, in place."""
        if not plan.beside:
            return
        staging, rows = self._staging, plan.beside_rows
        assert staging is not None
        self._engine.order.before_merge()
        self._device.declare_kernel("merge the arm's state", reads=(staging.used(staging.partial, rows),))
        partial = staging.state(staging.partial, rows)
        merge_states_(state.out[:rows], state.lse[:, :rows], partial.out, partial.lse)
        self._device.end_kernel()

    # ---- helpers

    def _call(self, layer: int, runs: Sequence[ArmRun], staging: Staging, rows: int) -> Callable[[], None]:
        @torch.inference_mode()
        def call() -> None:
            state = staging.state(staging.host_partial, rows)
            state.out.zero_()
            state.lse.fill_(float("-inf"))
            self._attend(layer, runs, staging.host_queries[:rows], state)

        return call

    def _attend(self, layer: int, runs: Sequence[ArmRun], q: Tensor, state: AttentionState) -> None:
        pool = self._engine.host[:, layer]  # [blocks, 2, kv_heads, block_size, head_dim]
        window = self._geometry.windows[layer]
        token_bytes = self._engine.layout.token_layer_bytes
        for run in runs:
            with self._busy.running(run.read_tokens * token_bytes):
                self._backend.attend(q, pool, run.table, state, self._geometry.scale, window)

    def _count(self, runs: Sequence[ArmRun]) -> None:
        for run in runs:
            self._engine.count_arm(len(run.visits), run.stored_tokens * self._engine.layout.token_layer_bytes)

    def _memory_of(self, layer: int, runs: Sequence[ArmRun]) -> Iterator[Tensor]:
        for run in runs:
            for visit in run.visits:
                yield self._engine.host[self._host_block(visit), layer][:, :, : visit.stored_tokens]

    def _host_block(self, visit: BlockVisit) -> int:
        return visit.place - self._engine.split.resident_blocks


class Staging:
    """Buffers on both sides for the queries of a step's short sequences and for a partial state of theirs.

    A partial state of n rows is one piece of memory, so that it is one copy: output `[n, heads, head_dim]`, then LSE
    `[heads, n]`, fp32. There is one of each buffer, since a layer's partial state is merged before the next layer has
    queries.
    """

    def __init__(self, engine: OffloadEngine, heads: int) -> None:
        self._device = device = engine.device
        self._heads, self._head_dim = heads, engine.layout.head_dim
        head_dim, dtype = engine.layout.head_dim, engine.host.dtype
        queries = (MAX_ARM_TOKENS, heads, head_dim)
        partial = (MAX_ARM_TOKENS * heads * (head_dim + 1) + _GRANULE,)
        self.queries = device.empty("arm queries", queries, dtype)
        self.partial = device.empty("arm state", partial, torch.float32)
        self.host_queries = device.empty_host("arm queries on the host", queries, dtype)
        self.host_partial = device.empty_host("arm state on the host", partial, torch.float32)

    def state(self, buffer: Tensor, rows: int) -> AttentionState:
        """The state of `rows` query rows that a partial buffer holds."""
        heads, head_dim = self._heads, self._head_dim
        floats = rows * heads * head_dim
        lse = buffer[floats : floats + rows * heads].view(heads, rows)
        return AttentionState(buffer[:floats].view(rows, heads, head_dim), lse)

    def used(self, buffer: Tensor, rows: int) -> Tensor:
        """The part of a partial buffer that a state of `rows` rows takes, padded to whole granules."""
        floats, granule = rows * self._heads * (self._head_dim + 1), _GRANULE // 4
        return buffer[: -(-floats // granule) * granule]

    def copy_queries(self, rows: int, stream: Stream) -> None:
        self._copy(self.host_queries[:rows].flatten(), self.queries[:rows].flatten(), stream, down=True)

    def copy_partial(self, rows: int, stream: Stream) -> None:
        self._copy(self.used(self.partial, rows), self.used(self.host_partial, rows), stream, down=False)

    def _copy(self, dst: Tensor, src: Tensor, stream: Stream, *, down: bool) -> None:
        width = src.nbytes
        self._device.copy_2d(PitchedCopy(dst, src, width, width, width, 1, "d2h" if down else "h2d"), stream)
