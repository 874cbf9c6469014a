"""CUDA graphs of decode steps: recorded calls of the model, with static inputs and a KV cache made for recording.

Where attention can be recorded, one graph computes a complete step. Elsewhere a recording is cut at each call of
attention, which runs eagerly between the replays, as do the copies and the host's part of weights that stream. A last
graph computes the most likely token of each row.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.config import EngineConfig
from nanovllm.device import Device, Graph
from nanovllm.features.cuda_graphs.between_graphs import AttentionBetweenGraphs, Call, Cuts, weights_between_graphs
from nanovllm.features.cuda_graphs.decode_tables import DecodeTables
from nanovllm.features.cuda_graphs.recorded_states import RecordedStates
from nanovllm.features.cuda_graphs.run_ahead import NextStep
from nanovllm.features.cuda_graphs.shapes import Shape, step_shapes
from nanovllm.kvcache.base import AttendedPool, AttentionGeometry, KVCacheBase
from nanovllm.kvcache.forward_pass import ComputedRows, FlatBatch
from nanovllm.kvcache.states import StatePool
from nanovllm.layers.causal_lm import CausalLM
from nanovllm.layers.forward_context import ForwardContext, KVCache
from nanovllm.layers.linear import RowAdapters
from nanovllm.memory.layout import layout_of, of_rank
from nanovllm.memory.sizing import StateSlots
from nanovllm.ops import row_attention
from nanovllm.ops.attention import AttentionBackend, SequenceMetadata
from nanovllm.ops.kv_quantization import stored_dtype
from nanovllm.ops.row_kernels import likeliest
from nanovllm.ops.upload import refill

logger = logging.getLogger(__name__)

TRIED_SHAPES = 4  # recorded to estimate the memory of all shapes but the largest
TAIL_ROWS = 64  # of the largest step whose tokens are chosen in a graph: logits take a megabyte a row


@dataclass(slots=True)
class RecordedStep:
    """The graphs of steps of one shape, and the tensors in which they leave their results."""

    shape: Shape
    inputs: Tensor  # int64 [2, rows]: token ids and positions
    calls: Sequence[Call] = ()  # between the graphs
    hidden: Tensor | None = None  # [rows, hidden], after the final norm
    tokens: Tensor | None = None  # int64 [rows], see `ops.row_kernels.likeliest`; None if no graph computes them
    graphs: Sequence[Graph] = ()


class RecordedAdapters(Protocol):
    """The adapters of rows whose products are recorded before the rows are known."""

    def of_rows(self, rows: int) -> RowAdapters:
        """Those of a step of so many rows, whose content is that of the latest `fill`."""
        ...

    def fill(self, sequences: Sequence[tuple[int | None, int]]) -> None:
        """Take the sequences of a step, as `LoRAManager.of_rows`."""
        ...


class DecodeGraphs:
    """Records its graphs when made. All shapes share the memory of their inputs, of which a smaller one uses the first
    rows, and that in which they compute. See `engine.model_runner.DecodeRunner`.
    """

    def __init__(
        self,
        device: Device,
        model: CausalLM,
        shapes: Sequence[Shape],
        tables: DecodeTables | None,
        states: RecordedStates | None = None,
        adapters: RecordedAdapters | None = None,
        runs_ahead: bool = False,
    ) -> None:
        """shapes: from the smallest on. tables: for recorded attention, None if it runs eagerly. runs_ahead: whether a
        step begins before the tokens of the one before are read, see `run_ahead`.
        """
        self._device = device
        self._model = model
        self._tables = tables
        self._states = states
        self._adapters = adapters
        self._runs_ahead = runs_ahead
        most = max(shape.rows for shape in shapes)
        self._inputs = torch.zeros(2 * most, dtype=torch.int64, device=model.device)
        self._steps = [RecordedStep(shape, self._inputs[: 2 * shape.rows].view(2, -1)) for shape in shapes]
        # The largest first: the others then allocate from the memory that it took.
        largest_first = self._steps[::-1]
        graphs = device.capture([self._work(step) for step in largest_first])
        for step, of_step in zip(largest_first, graphs, strict=True):
            step.graphs = of_step
        self.num_graphs = sum(map(len, graphs))
        self._ahead: tuple[RecordedStep, NextStep, Sequence[int]] | None = None  # with the token ids, once computed
        self.most_rows = most

    def run(self, batch: FlatBatch, kv_cache: KVCache) -> ComputedRows | None:
        """See `engine.model_runner.DecodeRunner`."""
        rows = batch.inputs.shape[1]
        weights = self._model.layer_weights
        step = self._step_for(batch) if weights is None or weights.is_recorded(rows) else None
        ahead = self._ahead
        self._ahead = None
        if step is None:
            return None
        if ahead is None or step is not ahead[0] or not ahead[1].is_step(batch, ahead[2]):
            self._fill(step, batch)
            self._replay(step, rows, batch.sequences, kv_cache)
        assert step.hidden is not None
        tail = None if step.tokens is None else lambda: self._tokens(step, batch, kv_cache)
        starts = [sequence.query_start for sequence in batch.sequences]
        return ComputedRows(step.hidden[:rows], batch.scheduled, starts, tail)

    def forget(self) -> None:
        """See `engine.model_runner.DecodeRunner`."""
        self._ahead = None

    def _fill(self, step: RecordedStep, batch: FlatBatch) -> None:
        if self._states is not None:
            self._states.fill(batch.scheduled, step.shape)
        if self._adapters is not None and step.shape.adapters:
            self._adapters.fill([(seq.adapter, len(seq.token_ids)) for seq in batch.scheduled])
        self._fill_rows(step, batch.inputs, batch.sequences)

    def _fill_rows(self, step: RecordedStep, inputs: Tensor, sequences: Sequence[SequenceMetadata]) -> None:
        refill(self._inputs, F.pad(inputs, (0, step.shape.rows - inputs.shape[1])).flatten())
        if self._tables is not None:
            self._tables.fill(sequences, step.shape)
            self._tables.declare(self._device, sequences)

    def _replay(
        self, step: RecordedStep, rows: int, sequences: tuple[SequenceMetadata, ...], kv_cache: KVCache
    ) -> None:
        ctx = ForwardContext(step.inputs[1, :rows], sequences, kv_cache)
        replays = iter(step.graphs)
        next(replays).replay()
        self._device.end_kernel()
        for call in step.calls:
            call(rows, ctx)
            next(replays).replay()

    def _tokens(self, step: RecordedStep, batch: FlatBatch, kv_cache: KVCache) -> Sequence[int]:
        """The tokens of a step. Begins the next one, if it is known, before it waits for them."""
        assert step.tokens is not None
        step.graphs[-1].replay()
        rows = batch.inputs.shape[1]
        arrived = self._device.read(step.tokens)
        following = None
        if self._tables is not None and self._runs_ahead:
            following = NextStep.after(batch, self._tables.groups)
        if following is not None:
            self._fill_rows(step, following.inputs, following.sequences)
            torch.clamp(step.tokens[:rows], min=0, out=step.inputs[0, :rows])  # NOT_FINITE is no token
            self._replay(step, rows, following.sequences, kv_cache)
        token_ids = arrived().tolist()[:rows]
        if following is not None:
            self._ahead = step, following, token_ids
        return token_ids

    def _step_for(self, batch: FlatBatch) -> RecordedStep | None:
        width = max((seq.query_len for seq in batch.sequences), default=0)
        sizes = batch.inputs.shape[1], len(batch.sequences), width
        has_adapters = any(seq.adapter is not None for seq in batch.scheduled)
        return next((step for step in self._steps if step.shape.takes(*sizes, has_adapters)), None)

    def _work(self, step: RecordedStep) -> Callable[[Callable[[], None]], None]:
        shape = step.shape
        model = self._model
        has_tail = model.group is None and shape.rows <= TAIL_ROWS

        def work(cut: Callable[[], None]) -> None:
            cuts = Cuts(cut)
            kv_cache: KVCache = AttentionBetweenGraphs(cuts) if self._tables is None else self._tables.of_shape(shape)
            states, parts = self._states.of_shape(shape) if self._states is not None else (None, ())
            adapters = [self._adapters.of_rows(shape.rows)] if self._adapters is not None and shape.adapters else []
            token_ids, positions = step.inputs
            ctx = ForwardContext(positions, (), kv_cache, adapters=adapters, states=states, state_parts=parts)
            with weights_between_graphs(model, cuts):
                step.hidden = model(token_ids, ctx)
            step.calls = cuts.calls
            if has_tail:
                cut()
                step.tokens = likeliest(model.compute_logits(step.hidden))

        return work


@torch.inference_mode()
def record_decode_graphs(
    device: Device,
    model: CausalLM,
    kv_cache: KVCacheBase,
    max_len: int,
    config: EngineConfig,
    adapters: Callable[[int], RecordedAdapters | None] | None = None,
) -> DecodeGraphs | None:
    """The graphs of an engine whose longest sequence has `max_len` tokens.

    adapters: gives those of steps of so many rows, None if no graph can record them. None, so that every step is eager,
    with a warning, if recording fails.
    """
    start = time.perf_counter()
    free = device.free_memory()
    try:
        with device.compute():
            graphs = record(device, model, kv_cache.attended_pool, kv_cache.pools.states, max_len, config, adapters)
    except Exception as error:  # torch, CUDA and compilers raise errors of many types
        logger.warning("decode runs without CUDA graphs, recording them failed: %s", error)
        return None
    seconds = time.perf_counter() - start
    mib = (free - device.free_memory()) / 2**20
    text = "CUDA graphs: %d for decode steps of up to %d rows, recorded in %.1f s, %.0f MiB"
    logger.info(text, graphs.num_graphs, graphs.most_rows, seconds, mib)
    return graphs


def record(
    device: Device,
    model: CausalLM,
    pool: AttendedPool | None,
    states: StatePool | None,
    max_len: int,
    config: EngineConfig,
    adapters: Callable[[int], RecordedAdapters | None] | None = None,
    tried: slice = slice(None),
) -> DecodeGraphs:
    """tried: of the shapes, from the smallest on."""
    attention = None if pool is None else row_attention(pool.backend)
    streams = model.layer_weights is not None
    shapes = step_shapes(config, attention is not None, states is not None, streams)
    if states is not None:
        shapes = [shape for shape in shapes if not shape.keeps_rows or shape.rows <= states.num_kept_rows]
    of_graphs = adapters(max(shape.rows for shape in shapes)) if adapters is not None else None
    shapes = [shape for shape in shapes if of_graphs is not None or not shape.adapters][tried]
    tables = None
    if pool is not None and attention is not None:
        tables = DecodeTables(pool, attention, shapes, max_len)
    recorded = None if states is None else RecordedStates(states, shapes, model.device)
    # What is copied between graphs waits for the device: a step begun ahead would hold back the tokens before it.
    runs_ahead = tables is not None and states is None and not config.num_speculative_tokens and not streams
    return DecodeGraphs(device, model, shapes, tables, recorded, of_graphs, runs_ahead)


@torch.inference_mode()
def graph_bytes(device: Device, model: CausalLM, backend: AttentionBackend, config: EngineConfig) -> int:
    """Bytes of device memory that graphs will take, measured by recording some over a KV cache of one block.

    The largest shape takes the memory that all share. The memory of the others is extrapolated from TRIED_SHAPES of
    them. 0 if recording fails.
    """
    if not device.captures:
        return 0
    kept = list[DecodeGraphs]()
    try:
        with device.compute():
            pool = _scratch_pool(model, backend, config)
            states = _scratch_states(device, model, config)
            records_attention = pool is not None and row_attention(backend) is not None
            streams = model.layer_weights is not None
            others = len(step_shapes(config, records_attention, states is not None, streams)) - 1
            few = min(TRIED_SHAPES, others)
            free = [device.free_memory()]
            for tried in (slice(-1, None), slice(0, few))[: 1 + (few > 0)]:
                max_len = config.max_model_len or model.max_model_len
                kept.append(record(device, model, pool, states, max_len, config, None, tried))
                free.append(device.free_memory())
    except Exception:  # `record_decode_graphs` will fail in the same way, and logs why
        return 0
    return max(0, free[0] - free[1]) + max(0, free[1] - free[-1]) * others // max(1, few)


def _scratch_states(device: Device, model: CausalLM, config: EngineConfig) -> StatePool | None:
    """State slots for the recording of graphs, of which none is used."""
    if model.network.recurrent is None:
        return None
    rows = config.max_num_seqs + config.num_speculative_tokens
    return StatePool(device, model.network, model.dtype, StateSlots(1, 0, 1, 0, rows), model.recurrences)


def _scratch_pool(model: CausalLM, backend: AttentionBackend, config: EngineConfig) -> AttendedPool | None:
    """The pool that the engine will have, as a single block that takes the part of every block of every layer."""
    network = model.network
    if config.enable_cpu_offload:
        return None
    layout = of_rank(layout_of(config, network), network)
    shape = layout.block_shape
    dtype = stored_dtype(config.kv_cache_dtype, model.dtype)
    pool = torch.zeros(shape, dtype=dtype, device=model.device).expand(layout.planes, 1, *shape)
    geometry = AttentionGeometry(network.attention_scale, network.num_heads, model.dtype, model.sinks)
    return AttendedPool(layout.views(pool), layout.groups, geometry, backend)
