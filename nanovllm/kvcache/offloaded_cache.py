"""The KV cache with offload: resident blocks on the device, all others in host memory."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from nanovllm.forward_context import ForwardContext
from nanovllm.kvcache.base import AttentionGeometry, KVCacheBase, KVStats, StepTraffic
from nanovllm.kvcache.chunked_attention import ChunkedAttention, CpuAttention
from nanovllm.kvcache.hybrid_manager import BlockMove
from nanovllm.kvcache.offload_engine import OffloadEngine
from nanovllm.kvcache.step_plan import LayerPlan, group_block_reads, plan_block_reads
from nanovllm.ops.attention import AttentionBackend, SequenceMetadata


class OffloadedKVCache(KVCacheBase):
    """Plans the block reads of each step, announces them to the `OffloadEngine`, and attends layer by layer.

    cpu_attention: attends to a share of the host blocks on the CPU; None loads all of them.
    """

    def __init__(
        self,
        engine: OffloadEngine,
        geometry: AttentionGeometry,
        backend: AttentionBackend,
        num_gpu_blocks: int,
        cpu_attention: CpuAttention | None = None,
    ) -> None:
        self.layout = engine.layout
        self.engine = engine
        self.cpu_attention = cpu_attention
        self.attention = ChunkedAttention(engine, geometry, backend, cpu_attention)
        self._windows = geometry.windows
        self._num_gpu_blocks = num_gpu_blocks
        self._plans: dict[int | None, LayerPlan] = {}  # of the current step, by sliding window

    def begin_step(self, sequences: Sequence[SequenceMetadata], moves: Sequence[BlockMove]) -> StepTraffic:
        """See `KVCacheBase`. Announces the ring groups of all layers: `attend` must use them up in this order."""
        self._plans = self._plan(sequences)
        self.engine.move_blocks(moves)
        if self.cpu_attention is not None:
            self.cpu_attention.begin_step(self._plans)
        groups = [
            (layer, group.reads) for layer, window in enumerate(self._windows) for group in self._plans[window].ring
        ]
        self.engine.begin([[self.attention.ring_use(layer, read) for read in reads] for layer, reads in groups])
        # A shared block is loaded once; its bytes count for its first reader.
        traffic = StepTraffic([0] * len(sequences), [0] * len(sequences))
        for read in (read for _, reads in groups for read in reads):
            traffic.h2d_bytes[read.readers[0]] += read.stored_tokens * self.layout.token_layer_bytes
            traffic.d2h_bytes[read.readers[0]] += read.new_tokens * self.layout.token_layer_bytes
        return traffic

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, ctx: ForwardContext) -> Tensor:
        """See `forward_context.KVCache`. Overwrites q. Layers must come in order, as `begin_step` announced them."""
        return self.attention.attend(layer, self._plans[self._windows[layer]], q, k, v, ctx.sequences)

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
            blocks_in_flight=engine.blocks_in_flight,
        )

    def _plan(self, sequences: Sequence[SequenceMetadata]) -> dict[int | None, LayerPlan]:
        """The plan of a layer with each sliding window."""
        block_size, split, cpu_attention = self.layout.block_size, self.engine.split, self.cpu_attention
        reads = {window: plan_block_reads(sequences, block_size, window) for window in set(self._windows)}
        chosen = {} if cpu_attention is None else cpu_attention.choose(reads, sequences)
        return {
            window: group_block_reads(
                window_reads,
                sequences,
                block_size,
                split.resident_blocks,
                self.engine.group_slots,
                chosen.get(window, ()),
                cpu_attention is not None and cpu_attention.concurrent,
            )
            for window, window_reads in reads.items()
        }
