"""CUDA graphs of decode steps.

Where attention can be recorded, one graph computes a complete step. Elsewhere there is one graph for each piece of the
model between two attention calls, and attention runs eagerly between the replays. Piece 0 computes the first layer's q,
k and v from the token ids. Piece i computes the q, k and v of layer i from the attention output of layer i - 1, which
is in the memory of its queries. The last piece ends with the final norm.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.config import EngineConfig
from nanovllm.device import Device, Graph
from nanovllm.features.cuda_graphs.decode_tables import DecodeTables
from nanovllm.kvcache.base import AttendedPool, AttentionGeometry, KVCacheBase
from nanovllm.layers.forward_context import ForwardContext, KVCache
from nanovllm.memory.layout import layout_of, of_rank
from nanovllm.models.decoder import AttentionLayer, Decoder
from nanovllm.ops import row_attention
from nanovllm.ops.attention import AttentionBackend, SequenceMetadata
from nanovllm.ops.kv_quantization import stored_dtype
from nanovllm.ops.upload import refill

logger = logging.getLogger(__name__)

LARGEST_BUCKET = 512
TRIED_BUCKETS = 4  # recorded to estimate the memory of all buckets but the largest


def bucket_sizes(config: EngineConfig) -> list[int]:
    """Batch sizes that have graphs: 1, 2, 4, then every multiple of 8, and the largest that a step can have.

    A step takes the next larger one, so it computes fewer than 8 padded rows. Steps above LARGEST_BUCKET run eagerly.
    Under offload a bucket takes a graph for each layer and one more, and steps wait for the link: there the sizes are
    powers of two, which makes 330 graphs for 32 layers instead of 2,211.
    """
    most = min(config.max_num_seqs, config.max_num_batched_tokens, LARGEST_BUCKET)
    doubled = [2**power for power in range(3, LARGEST_BUCKET.bit_length())]
    larger = doubled if config.enable_cpu_offload else range(8, most, 8)
    return [size for size in (1, 2, 4, *larger) if size < most] + [most]


@dataclass(frozen=True, slots=True)
class StepMemory:
    """The tensors that the pieces of a step exchange, with one row per sequence."""

    x: Tensor  # [rows, hidden]: the residual stream, and at the end the hidden states after the final norm
    cos: Tensor  # [rows, rotary embeddings, head_dim], each as of `RotaryEmbedding.cos_sin`
    sin: Tensor  # [rows, rotary embeddings, head_dim / 2]
    q: Tensor  # [rows, heads, head_dim]: the queries of a layer, then its attention output
    k: Tensor  # [rows, kv_heads, head_dim]
    v: Tensor
    query_scale: Tensor  # [rows, 1, 1], if the network has one

    @classmethod
    def of(cls, model: Decoder, rows: int) -> StepMemory:
        """Memory for at most `rows` rows, filled with zeros, so that padded rows never compute on arbitrary content."""
        spec, head_dim = model.spec, model.spec.head_dim

        def zeros(*shape: int, dtype: torch.dtype = model.dtype) -> Tensor:
            return torch.zeros(rows, *shape, dtype=dtype, device=model.device)

        return cls(
            x=zeros(spec.hidden_size),
            cos=zeros(len(spec.ropes), head_dim, dtype=torch.float32),
            sin=zeros(len(spec.ropes), head_dim // 2, dtype=torch.float32),
            q=zeros(spec.num_heads, head_dim),
            k=zeros(spec.num_kv_heads, head_dim),
            v=zeros(spec.num_kv_heads, head_dim),
            query_scale=zeros(1, 1),
        )

    def first(self, rows: int) -> StepMemory:
        """The first rows of the same memory."""
        return StepMemory(*(getattr(self, field.name)[:rows] for field in fields(self)))


def run_piece(model: Decoder, index: int, step: StepMemory, inputs: Tensor) -> None:
    """Run one of `num_layers + 1` pieces. inputs: int64 [3, rows], token ids, positions and RoPE lengths."""
    if index == 0:
        token_ids, positions, rope_lengths = inputs
        step.x.copy_(model.embed(token_ids))
        for rope, rotary in enumerate(model.rotaries):
            cos, sin = rotary.cos_sin(positions, rope_lengths)
            step.cos[:, rope : rope + 1].copy_(cos)
            step.sin[:, rope : rope + 1].copy_(sin)
        if (scale := model.rotaries[0].query_scale(positions, model.dtype)) is not None:
            step.query_scale.copy_(scale)
    else:
        model.layers[index - 1].finish_(step.x, step.q.flatten(1))
    if index < model.spec.num_layers:
        layer = model.layers[index]
        assert isinstance(layer, AttentionLayer), "graphs have no slots of recurrent states"
        cos, sin = (angles[:, layer.rope : layer.rope + 1] for angles in (step.cos, step.sin))
        layer.project(step.x, cos, sin, step.q, step.k, step.v)
        if model.spec.rope.query_beta:
            step.q.mul_(step.query_scale)
    else:
        model.normalize_(step.x)


@dataclass(frozen=True, slots=True)
class Bucket:
    """The graphs of steps of up to `rows` rows, in order, and the memory that they read and write."""

    inputs: Tensor  # int64 [3, rows]: token ids, positions, RoPE lengths
    step: StepMemory
    graphs: Sequence[Graph]


class DecodeGraphs:
    """Records its graphs when made. All buckets share one memory, of which a smaller bucket uses the first rows."""

    def __init__(self, device: Device, model: Decoder, tables: DecodeTables | None, sizes: Sequence[int]) -> None:
        """tables: for recorded attention, None if it runs eagerly; sizes: batch sizes of the buckets, ascending."""
        self._device = device
        self._model = model
        self._tables = tables
        self._sizes = sizes
        self._inputs = torch.zeros(3 * sizes[-1], dtype=torch.int64, device=model.device)
        memory = StepMemory.of(model, sizes[-1])
        # The largest bucket first: the others then allocate from the memory that it took.
        cut = [(self._inputs[: 3 * rows].view(3, rows), memory.first(rows)) for rows in reversed(sizes)]
        graphs = device.capture([work for inputs, step in cut for work in self._works(inputs, step)])
        count = len(graphs) // len(sizes)
        self._buckets = [Bucket(*cut[i], graphs[i * count : (i + 1) * count]) for i in range(len(sizes))][::-1]
        self.num_graphs = len(graphs)

    def take(self, sequences: Sequence[SequenceMetadata]) -> bool:
        """Whether a step of these sequences has graphs: each computes one token, and the largest bucket holds them."""
        return 0 < len(sequences) <= self._sizes[-1] and all(seq.query_len == 1 for seq in sequences)

    def run(self, inputs: Tensor, sequences: tuple[SequenceMetadata, ...], kv_cache: KVCache) -> Tensor:
        """See `engine.model_runner.DecodeRunner`."""
        rows = len(sequences)
        bucket = self._buckets[bisect_left(self._sizes, rows)]
        padding = bucket.inputs.shape[1] - rows
        refill(self._inputs, F.pad(inputs, (0, padding)).flatten())
        if self._tables is not None:
            self._tables.fill(sequences, rows + padding)
            self._tables.declare(self._device, sequences)
            bucket.graphs[0].replay()
            self._device.end_kernel()
        else:
            _, positions, rope_lengths = bucket.inputs[:, :rows]
            ctx = ForwardContext(positions, rope_lengths, sequences, kv_cache)
            self._run_pieces(bucket.graphs, bucket.step.first(rows), ctx)
        return bucket.step.x[:rows]

    def _run_pieces(self, graphs: Sequence[Graph], step: StepMemory, ctx: ForwardContext) -> None:
        for layer, graph in enumerate(graphs[:-1]):
            graph.replay()
            step.q.copy_(ctx.kv_cache.attend(layer, step.q, step.k, step.v, ctx))
        graphs[-1].replay()

    def _works(self, inputs: Tensor, step: StepMemory) -> list[Callable[[], None]]:
        """The functions that a bucket records, a graph of each."""
        num_layers = self._model.spec.num_layers

        def piece(index: int) -> Callable[[], None]:
            return lambda: run_piece(self._model, index, step, inputs)

        def complete_step(tables: DecodeTables) -> None:
            for layer in range(num_layers):
                run_piece(self._model, layer, step, inputs)
                step.q.copy_(tables.attend(layer, step.q, step.k, step.v))
            run_piece(self._model, num_layers, step, inputs)

        tables = self._tables
        return [piece(index) for index in range(num_layers + 1)] if tables is None else [lambda: complete_step(tables)]


@torch.inference_mode()
def record_decode_graphs(
    device: Device, model: Decoder, kv_cache: KVCacheBase, max_len: int, config: EngineConfig
) -> DecodeGraphs | None:
    """The graphs of an engine whose longest sequence has `max_len` tokens.

    None, so that every step is eager, with a warning, if recording fails.
    """
    sizes, start, free = bucket_sizes(config), time.perf_counter(), device.free_memory()
    try:
        with device.compute():
            tables = _decode_tables(kv_cache.attended_pool, sizes[-1], max_len)
            graphs = DecodeGraphs(device, model, tables, sizes)
    except Exception as error:  # torch, CUDA and compilers raise errors of many types
        logger.warning("decode runs without CUDA graphs, recording them failed: %s", error)
        return None
    seconds, mib = time.perf_counter() - start, (free - device.free_memory()) / 2**20
    text = "CUDA graphs: %d for decode steps of up to %d sequences, recorded in %.1f s, %.0f MiB"
    logger.info(text, graphs.num_graphs, sizes[-1], seconds, mib)
    return graphs


@torch.inference_mode()
def graph_bytes(device: Device, model: Decoder, backend: AttentionBackend, config: EngineConfig) -> int:
    """Bytes of device memory that graphs will take, measured by recording some over a KV cache of one block.

    The largest bucket takes the memory that all share. The memory of the others is extrapolated from TRIED_BUCKETS of
    them. 0 if recording fails.
    """
    sizes, free, kept = bucket_sizes(config), [device.free_memory()], list[DecodeGraphs]()
    few = sizes[:-1][:TRIED_BUCKETS]
    try:
        for part in (sizes[-1:], few):
            if part:
                with device.compute():
                    pool, max_len = _scratch_pool(model, backend, config), config.max_model_len
                    tables = _decode_tables(pool, part[-1], max_len or model.spec.max_model_len)
                    kept.append(DecodeGraphs(device, model, tables, part))
            free.append(device.free_memory())
    except Exception:  # `record_decode_graphs` will fail in the same way, and logs why
        return 0
    return free[0] - free[1] + (free[1] - free[2]) * (len(sizes) - 1) // max(1, len(few))


def _scratch_pool(model: Decoder, backend: AttentionBackend, config: EngineConfig) -> AttendedPool | None:
    """The pool that the engine will have, as a single block that takes the part of every block of every layer."""
    spec = model.spec
    if config.enable_cpu_offload:
        return None
    layout = of_rank(layout_of(config, spec, model.dtype.itemsize), spec)
    shape = layout.block_shape
    dtype = stored_dtype(config.kv_cache_dtype, model.dtype)
    pool = torch.zeros(shape, dtype=dtype, device=model.device).expand(layout.planes, 1, *shape)
    geometry = AttentionGeometry(spec.attention_scale, spec.num_heads, model.dtype, model.sinks)
    return AttendedPool(layout.views(pool), layout.groups, geometry, backend)


def _decode_tables(attended: AttendedPool | None, max_rows: int, max_len: int) -> DecodeTables | None:
    """Tables for graphs of steps of up to `max_rows` rows; None if a graph cannot record attention."""
    attention = None if attended is None else row_attention(attended.backend)
    if attended is None or attention is None:
        return None
    return DecodeTables(attended.pools, attended.groups, attended.geometry, attention, max_rows, max_len)
