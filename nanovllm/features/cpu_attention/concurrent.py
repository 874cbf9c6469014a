"""CPU attention that runs concurrently with a device.

Queries are copied to the host, C++ attends on a stream of its own, and the partial result is copied back and merged
last, in fp32.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain

import torch
from torch import Tensor

from nanovllm.device import Busy, PitchedCopy, Stream
from nanovllm.features.cpu_attention.shares import MAX_CPU_ATTENTION_TOKENS
from nanovllm.kvcache.base import AttentionGeometry
from nanovllm.kvcache.offload_engine import OffloadEngine
from nanovllm.kvcache.step_plan import LayerPlan
from nanovllm.ops.attention import AttentionState
from nanovllm.ops.cpu_attention import HostAttention, Meter
from nanovllm.ops.merge import merge_states_

_GRANULE = 16  # bytes that partial states are padded to


class ConcurrentCpuAttention:
    """The concurrent groups of a step, prepared when the step begins and launched layer by layer."""

    def __init__(self, engine: OffloadEngine, geometry: AttentionGeometry, num_threads: int) -> None:
        self._engine = engine
        self._device = engine.device
        self._geometry = geometry
        self._num_threads = num_threads
        self._staging = Staging(engine, geometry)
        self._meter = Meter()
        self._prepared: Mapping[int | None, HostAttention] = {}  # of the step, by sliding window
        self._launched = False  # in the current step
        engine.order.add_cpu_attention_streams()

    def begin_step(self, plans: Mapping[int | None, LayerPlan]) -> None:
        """Prepare the concurrent groups of the plans, which are keyed by sliding window."""
        self._prepared = {window: self._prepare(plan, window) for window, plan in plans.items() if plan.concurrent}

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
        staging, order = self._staging, self._engine.order
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
        attention = self._prepared[self._geometry.windows[layer]]
        stream.launch(attention.task(layer * self._engine.layout.block_layer_bytes))
        self._launched = True
        staging.copy_partial(rows, order.before_partial())
        order.after_partial()

    def merge(self, plan: LayerPlan, state: AttentionState) -> None:
        """Merge the result of `start` into `state`, in place."""
        staging, rows = self._staging, plan.concurrent_rows
        self._engine.order.before_merge()
        self._device.declare_kernel("merge CPU attention", reads=(staging.used(staging.partial, rows),))
        partial = staging.state(staging.partial, rows)
        merge_states_(state.out[:rows], state.lse[:, :rows], partial.out, partial.lse)
        self._device.end_kernel()

    def _prepare(self, plan: LayerPlan, window: int | None) -> HostAttention:
        staging, rows = self._staging, plan.concurrent_rows
        token_bytes = self._engine.layout.token_layer_bytes
        return HostAttention(
            staging.host_queries[:rows],
            self._engine.host[:, 0],
            [group.table for group in plan.concurrent],
            staging.state(staging.host_partial, rows),
            self._geometry.scale,
            window,
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

    def __init__(self, engine: OffloadEngine, geometry: AttentionGeometry) -> None:
        self._device = device = engine.device
        self._heads, self._head_dim = heads, head_dim = geometry.num_heads, engine.layout.head_dim
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
        self._copy(self.host_queries[:rows].flatten(), self.queries[:rows].flatten(), stream, down=True)

    def copy_partial(self, rows: int, stream: Stream) -> None:
        self._copy(self.used(self.partial, rows), self.used(self.host_partial, rows), stream, down=False)

    def _copy(self, dst: Tensor, src: Tensor, stream: Stream, *, down: bool) -> None:
        width = src.nbytes
        self._device.copy_2d(PitchedCopy(dst, src, width, width, width, 1, "d2h" if down else "h2d"), stream)
