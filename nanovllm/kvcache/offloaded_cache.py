"""The room whose blocks live on two tiers: resident ones are attended in place, the others stream through the ring, or
are left to the CPU arm."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from nanovllm.forward_context import ForwardContext, SequenceSlice
from nanovllm.kvcache.host_arm import HostArm
from nanovllm.kvcache.hybrid_manager import BlockMove
from nanovllm.kvcache.offload_engine import OffloadEngine, RingUse, SlotTokens
from nanovllm.kvcache.room import AttentionGeometry, KVRoom, KVStats, StepTraffic
from nanovllm.kvcache.span_cache import SpanKVCache
from nanovllm.kvcache.step_plan import ArmRun, BlockVisit, LayerPlan, ResidentRun, RingRun, group_visits, plan_visits
from nanovllm.ops.attention import AttentionBackend, AttentionState


class OffloadedKVCache(KVRoom):
    """Attention over the blocks of a sequence in their order, each wherever it lives."""

    def __init__(
        self,
        engine: OffloadEngine,
        geometry: AttentionGeometry,
        backend: AttentionBackend,
        num_gpu_blocks: int,
        arm: HostArm | None = None,
    ) -> None:
        self.layout = engine.layout
        self.engine = engine
        self.arm = arm
        self._geometry = geometry
        self._backend = backend
        self._num_gpu_blocks = num_gpu_blocks
        self.spans = SpanKVCache(engine, geometry, backend)
        self._plans: dict[int | None, LayerPlan] = {}  # of this step, by sliding window

    # ---- steps

    def begin_step(self, sequences: Sequence[SequenceSlice], moves: Sequence[BlockMove]) -> StepTraffic:
        if self.arm is not None:
            self.arm.observe()
        self._plans = {window: self._plan(sequences, window) for window in set(self._geometry.windows)}
        self.engine.move_blocks(moves)
        if self.arm is not None:
            self.arm.begin_step(self._plans)
        layers = enumerate(self._geometry.windows)
        runs = [(layer, run.visits) for layer, window in layers for run in self._plans[window].ring]
        self.engine.begin([[self._ring_use(layer, visit) for visit in visits] for layer, visits in runs])
        # A shared block is loaded once; it counts for its first reader.
        traffic = StepTraffic([0] * len(sequences), [0] * len(sequences))
        for visit in (visit for _, visits in runs for visit in visits):
            traffic.h2d_bytes[visit.readers[0]] += visit.stored_tokens * self.layout.token_layer_bytes
            traffic.d2h_bytes[visit.readers[0]] += visit.new_tokens * self.layout.token_layer_bytes
        return traffic

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, ctx: ForwardContext) -> Tensor:
        window = self._geometry.windows[layer]
        state, plan = AttentionState.empty(q), self._plans[window]
        if self.arm is not None:
            self.arm.start(layer, plan, q)
        for item in plan.items:
            if isinstance(item, ArmRun):
                assert self.arm is not None, "only an arm is given runs"
                self.arm.attend_in_order(layer, item, q, state)
            elif isinstance(item, ResidentRun):
                pool = self.engine.resident[layer]
                for visit in item.visits:
                    self._write(visit, pool[visit.place], k, v, ctx)
                reads = (pool[visit.place][:, :, : visit.held_tokens] for visit in item.visits)
                self.engine.device.declare_kernel("attend", reads=reads)
                self._backend.attend(q, pool, item.table, state, self._geometry.scale, window)
                self.engine.device.end_kernel()
            else:
                assert isinstance(item, RingRun)
                self._attend_streamed(layer, item, q, k, v, ctx, state)
        if self.arm is not None:
            self.arm.merge(plan, state)
        return state.output(q)

    def end_step(self) -> None:
        if self.arm is not None:
            self.arm.end_step()

    def abandon_step(self) -> None:
        self.engine.abandon()

    def stats(self) -> KVStats:
        engine = self.engine
        return KVStats(
            block_size=self.layout.block_size,
            bytes_per_block=self.layout.block_bytes,
            num_gpu_blocks=self._num_gpu_blocks,
            resident_blocks=engine.split.resident_blocks,
            ring_slots=engine.split.ring_slots,
            num_cpu_blocks=engine.num_host_blocks,
            num_swap_blocks=len(engine.swap),
            device_bytes=engine.resident.nbytes + engine.ring.nbytes,
            host_bytes=engine.host.nbytes,
            swap_bytes=engine.swap.nbytes,
            transfers=engine.transfers,
            spans=engine.spans,
            layer_buffer_bytes=engine.layer_buffer.nbytes,
        )

    # ---- helpers

    def _plan(self, sequences: Sequence[SequenceSlice], window: int | None) -> LayerPlan:
        group_slots = self.engine.group_slots
        block_size, resident_blocks = self.layout.block_size, self.engine.split.resident_blocks
        visits = plan_visits(sequences, block_size, window)
        if self.arm is None:
            return group_visits(visits, sequences, block_size, resident_blocks, group_slots)
        taken = self.arm.choose(visits, sequences)
        return group_visits(visits, sequences, block_size, resident_blocks, group_slots, taken, self.arm.beside)

    def _ring_use(self, layer: int, visit: BlockVisit) -> RingUse:
        return RingUse(layer, self._host_block(visit), visit.stored_tokens)

    def _host_block(self, visit: BlockVisit) -> int:
        return visit.place - self.engine.split.resident_blocks

    def _attend_streamed(
        self, layer: int, run: RingRun, q: Tensor, k: Tensor, v: Tensor, ctx: ForwardContext, state: AttentionState
    ) -> None:
        slots, blocks = self.engine.acquire()
        written = [(index, visit) for index, visit in enumerate(run.visits) if visit.new_tokens]
        for index, visit in written:
            self._write(visit, blocks[index], k, v, ctx)
        if written:
            self.engine.store([self._new_tokens(slots[index], layer, visit) for index, visit in written])
        reads = (block[:, :, : visit.held_tokens] for block, visit in zip(blocks, run.visits, strict=True))
        self.engine.device.declare_kernel("attend", reads=reads)
        window = self._geometry.windows[layer]
        self._backend.attend(q, blocks, run.table, state, self._geometry.scale, window)
        self.engine.device.end_kernel()
        self.engine.release()

    def _new_tokens(self, slot: int, layer: int, visit: BlockVisit) -> SlotTokens:
        return SlotTokens(slot, layer, self._host_block(visit), visit.stored_tokens, visit.new_tokens)

    def _write(self, visit: BlockVisit, block: Tensor, k: Tensor, v: Tensor, ctx: ForwardContext) -> None:
        """Write the visit's new tokens, if any, into the block `[2, kv_heads, block_size, head_dim]`."""
        if not visit.new_tokens:
            return
        begin, end = visit.stored_tokens, visit.held_tokens
        seq = ctx.sequences[visit.readers[0]]
        row = seq.query_start + visit.first_position + begin - seq.context_len
        new = block[:, :, begin:end]
        self.engine.device.declare_kernel("write K/V", writes=(new,))
        new[0] = k[row : row + visit.new_tokens].transpose(0, 1)
        new[1] = v[row : row + visit.new_tokens].transpose(0, 1)
