"""The room whose blocks live on two tiers: resident ones are attended in place, the others stream through the ring, or
are left to the CPU arm."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from nanovllm.forward_context import ForwardContext, SequenceMetadata
from nanovllm.kvcache.base import AttentionGeometry, KVCacheBase, KVStats, StepTraffic
from nanovllm.kvcache.host_block_attention import HostBlockAttention
from nanovllm.kvcache.hybrid_manager import BlockMove
from nanovllm.kvcache.layerwise_cache import LayerwiseKVCache
from nanovllm.kvcache.offload_engine import OffloadEngine, RingUse, SlotTokens
from nanovllm.kvcache.step_plan import (
    BlockRead,
    CpuAttentionGroup,
    LayerPlan,
    ResidentGroup,
    RingGroup,
    group_block_reads,
    plan_block_reads,
)
from nanovllm.ops.attention import AttentionBackend, AttentionState


class OffloadedKVCache(KVCacheBase):
    """Attention over the blocks of a sequence in their order, each wherever it lives."""

    def __init__(
        self,
        engine: OffloadEngine,
        geometry: AttentionGeometry,
        backend: AttentionBackend,
        num_gpu_blocks: int,
        cpu_attention: HostBlockAttention | None = None,
    ) -> None:
        self.layout = engine.layout
        self.engine = engine
        self.cpu_attention = cpu_attention
        self._geometry = geometry
        self._backend = backend
        self._num_gpu_blocks = num_gpu_blocks
        self.layerwise = LayerwiseKVCache(engine, geometry, backend)
        self._plans: dict[int | None, LayerPlan] = {}  # of this step, by sliding window

    # ---- steps

    def begin_step(self, sequences: Sequence[SequenceMetadata], moves: Sequence[BlockMove]) -> StepTraffic:
        if self.cpu_attention is not None:
            self.cpu_attention.observe()
        self._plans = {window: self._plan(sequences, window) for window in set(self._geometry.windows)}
        self.engine.move_blocks(moves)
        if self.cpu_attention is not None:
            self.cpu_attention.begin_step(self._plans)
        layers = enumerate(self._geometry.windows)
        groups = [(layer, group.reads) for layer, window in layers for group in self._plans[window].ring]
        self.engine.begin([[self._ring_use(layer, read) for read in reads] for layer, reads in groups])
        # A shared block is loaded once; it counts for its first reader.
        traffic = StepTraffic([0] * len(sequences), [0] * len(sequences))
        for read in (read for _, reads in groups for read in reads):
            traffic.h2d_bytes[read.readers[0]] += read.stored_tokens * self.layout.token_layer_bytes
            traffic.d2h_bytes[read.readers[0]] += read.new_tokens * self.layout.token_layer_bytes
        return traffic

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, ctx: ForwardContext) -> Tensor:
        window = self._geometry.windows[layer]
        state, plan = AttentionState.empty(q), self._plans[window]
        if self.cpu_attention is not None:
            self.cpu_attention.start(layer, plan, q)
        for item in plan.items:
            if isinstance(item, CpuAttentionGroup):
                assert self.cpu_attention is not None, "only an arm is given runs"
                self.cpu_attention.attend_in_order(layer, item, q, state)
            elif isinstance(item, ResidentGroup):
                pool = self.engine.resident[layer]
                for read in item.reads:
                    self._write(read, pool[read.physical_id], k, v, ctx)
                reads = (pool[read.physical_id][:, :, : read.held_tokens] for read in item.reads)
                self.engine.device.declare_kernel("attend", reads=reads)
                self._backend.attend(q, pool, item.table, state, self._geometry.scale, window)
                self.engine.device.end_kernel()
            else:
                assert isinstance(item, RingGroup)
                self._attend_streamed(layer, item, q, k, v, ctx, state)
        if self.cpu_attention is not None:
            self.cpu_attention.merge(plan, state)
        return state.output(q)

    def end_step(self) -> None:
        if self.cpu_attention is not None:
            self.cpu_attention.end_step()

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
            layerwise_memory=engine.layerwise_memory,
            layer_buffer_bytes=engine.layer_buffer.nbytes,
        )

    # ---- helpers

    def _plan(self, sequences: Sequence[SequenceMetadata], window: int | None) -> LayerPlan:
        group_slots = self.engine.group_slots
        block_size, resident_blocks = self.layout.block_size, self.engine.split.resident_blocks
        reads = plan_block_reads(sequences, block_size, window)
        if self.cpu_attention is None:
            return group_block_reads(reads, sequences, block_size, resident_blocks, group_slots)
        taken = self.cpu_attention.choose(reads, sequences)
        return group_block_reads(
            reads, sequences, block_size, resident_blocks, group_slots, taken, self.cpu_attention.concurrent
        )

    def _ring_use(self, layer: int, read: BlockRead) -> RingUse:
        return RingUse(layer, self._host_block(read), read.stored_tokens)

    def _host_block(self, read: BlockRead) -> int:
        return read.physical_id - self.engine.split.resident_blocks

    def _attend_streamed(
        self, layer: int, group: RingGroup, q: Tensor, k: Tensor, v: Tensor, ctx: ForwardContext, state: AttentionState
    ) -> None:
        slots, blocks = self.engine.acquire()
        written = [(index, read) for index, read in enumerate(group.reads) if read.new_tokens]
        for index, read in written:
            self._write(read, blocks[index], k, v, ctx)
        if written:
            self.engine.store([self._new_tokens(slots[index], layer, read) for index, read in written])
        reads = (block[:, :, : read.held_tokens] for block, read in zip(blocks, group.reads, strict=True))
        self.engine.device.declare_kernel("attend", reads=reads)
        window = self._geometry.windows[layer]
        self._backend.attend(q, blocks, group.table, state, self._geometry.scale, window)
        self.engine.device.end_kernel()
        self.engine.release()

    def _new_tokens(self, slot: int, layer: int, read: BlockRead) -> SlotTokens:
        return SlotTokens(slot, layer, self._host_block(read), read.stored_tokens, read.new_tokens)

    def _write(self, read: BlockRead, block: Tensor, k: Tensor, v: Tensor, ctx: ForwardContext) -> None:
        """Write the visit's new tokens, if any, into the block `[2, kv_heads, block_size, head_dim]`."""
        if not read.new_tokens:
            return
        begin, end = read.stored_tokens, read.held_tokens
        seq = ctx.sequences[read.readers[0]]
        row = seq.query_start + read.first_position + begin - seq.context_len
        new = block[:, :, begin:end]
        self.engine.device.declare_kernel("write K/V", writes=(new,))
        new[0] = k[row : row + read.new_tokens].transpose(0, 1)
        new[1] = v[row : row + read.new_tokens].transpose(0, 1)
