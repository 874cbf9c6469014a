"""The executor of one process: turns batches into tensors, runs the model, samples. Tensors begin here."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from nanovllm.config import EngineConfig
from nanovllm.device import Device, create_device
from nanovllm.engine.batch import Batch, ScheduledSequence, StepResult
from nanovllm.engine.block_manager import WATERMARK
from nanovllm.engine.profiling import measure_memory
from nanovllm.engine.span_runner import SpanRunner
from nanovllm.errors import ConfigError, EngineError
from nanovllm.forward_context import ForwardContext, SequenceSlice, flat_positions
from nanovllm.kvcache.layout import KVLayout
from nanovllm.kvcache.offload_engine import OffloadEngine
from nanovllm.kvcache.offloaded_cache import OffloadedKVCache
from nanovllm.kvcache.paged_cache import PagedKVCache
from nanovllm.kvcache.room import AttentionGeometry, KVRoom, KVStats
from nanovllm.kvcache.sizing import KVPlan, plan_kv_cache
from nanovllm.layers.sampler import sample
from nanovllm.models.hf_config import load_decoder_spec
from nanovllm.models.loader import load_model
from nanovllm.models.spec import DecoderSpec
from nanovllm.ops import is_chunk_invariant, select_cpu_backend

logger = logging.getLogger(__name__)


class ModelRunner:
    """Owns the device, the model and the KV memory."""

    def __init__(self, config: EngineConfig) -> None:
        self.spec = load_decoder_spec(config.model)
        self.dtype = _resolve_dtype(config.dtype, self.spec)
        self.device = create_device(config.device)
        self._closed = False
        self.model = load_model(
            config.model, self.spec, self.dtype, self.device.torch_device, config.load_format, config.seed
        )
        layout = KVLayout(
            num_layers=self.spec.num_layers,
            num_kv_heads=self.spec.num_kv_heads,
            head_dim=self.spec.head_dim,
            block_size=config.block_size,
            itemsize=self.dtype.itemsize,
        )
        layer_major = is_chunk_invariant(select_cpu_backend(self.spec.head_dim))
        memory = measure_memory(self.device, self.model, config, layer_major)
        self.plan = plan_kv_cache(config, layout, self.spec.max_model_len, memory, WATERMARK)
        self.kv_cache = _make_room(self.device, self.spec, layout, self.dtype, self.plan, config.enable_cpu_offload)
        self._spans: SpanRunner | None = None
        if isinstance(self.kv_cache, OffloadedKVCache):
            self._spans = SpanRunner(self.model, self.kv_cache.spans)
        logger.info(
            "# GPU blocks: %d, # CPU blocks: %d; longest prompt: %d tokens; layer buffer: %d tokens",
            self.plan.num_gpu_blocks,
            self.plan.num_cpu_blocks,
            self.plan.max_model_len,
            self.plan.span_blocks * config.block_size,
        )

    @torch.inference_mode()
    def execute(self, batch: Batch) -> StepResult:
        """Run one step. After a failure the runner can be used again; what the step was writing is undefined."""
        if self._closed:
            raise EngineError("the engine is closed: make a new LLM")
        slices = _slices(batch.whole)
        try:
            traffic = self.kv_cache.begin_step(slices, batch.moves)
            if self._spans is not None:
                self._spans.begin_step(batch.span, traffic)
            hidden = self._forward(batch.whole, slices)
            if self._spans is not None and batch.span is not None:
                hidden = torch.cat((hidden, self._spans.run(batch.span)))
            tokens = self._sample(hidden, batch.sequences)
        except BaseException:
            self.kv_cache.abandon_step()
            if self._spans is not None:
                self._spans.drop()
            raise
        return StepResult(tokens, traffic.h2d_bytes, traffic.d2h_bytes)

    def kv_stats(self) -> KVStats:
        return self._last_stats if self._closed else self.kv_cache.stats()

    def close(self) -> None:
        """End the device's streams, release weights and KV memory. Safe to call twice."""
        if not self._closed:
            self._closed = True
            self._last_stats = self.kv_cache.stats()
            self.device.close()
            del self.model, self.kv_cache, self._spans

    def _forward(self, sequences: Sequence[ScheduledSequence], slices: tuple[SequenceSlice, ...]) -> Tensor:
        """Take sequences through all layers. Returns the last hidden state of those with a token due: [due, hidden]."""
        if not sequences:
            return torch.empty(0, self.spec.hidden_size, dtype=self.dtype, device=self.device.torch_device)
        hidden = self.model(self._input_ids(sequences), self._context(slices, sequences))
        due = [s.query_start + s.query_len - 1 for s, seq in zip(slices, sequences, strict=True) if seq.sampling]
        return hidden[torch.tensor(due, dtype=torch.int64, device=hidden.device)]

    def _input_ids(self, sequences: Sequence[ScheduledSequence]) -> Tensor:
        token_ids = [token for seq in sequences for token in seq.token_ids]
        return torch.tensor(token_ids, dtype=torch.int64, device=self.device.torch_device)

    def _context(self, slices: tuple[SequenceSlice, ...], sequences: Sequence[ScheduledSequence]) -> ForwardContext:
        positions = flat_positions(slices, self.device.torch_device)
        prompt_lens = torch.tensor([seq.prompt_len for seq in sequences], device=positions.device)
        query_lens = torch.tensor([s.query_len for s in slices], device=positions.device)
        rope_lengths = torch.maximum(positions + 1, torch.repeat_interleave(prompt_lens, query_lens))
        return ForwardContext(positions, rope_lengths, slices, self.kv_cache)

    def _sample(self, hidden: Tensor, sequences: Sequence[ScheduledSequence]) -> list[int | None]:
        """Logits are computed only where a token is due: hidden is [due, hidden]."""
        due = [i for i, seq in enumerate(sequences) if seq.sampling is not None]
        tokens: list[int | None] = [None] * len(sequences)
        if not due:
            return tokens
        logits = self.model.compute_logits(hidden)
        rows = [row for i in due if (row := sequences[i].sampling) is not None]
        for i, token in zip(due, sample(logits, rows), strict=True):
            tokens[i] = token
        return tokens


def _slices(sequences: Sequence[ScheduledSequence]) -> tuple[SequenceSlice, ...]:
    slices: list[SequenceSlice] = []
    start = 0
    for seq in sequences:
        slices.append(SequenceSlice(start, len(seq.token_ids), seq.context_len, seq.block_table))
        start += len(seq.token_ids)
    return tuple(slices)


def _resolve_dtype(name: str, spec: DecoderSpec) -> torch.dtype:
    resolved = spec.dtype if name == "auto" else name
    dtype = getattr(torch, resolved, None)
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ConfigError(f"dtype={resolved!r}: must be one of bfloat16, float16, float32")
    assert isinstance(dtype, torch.dtype)
    return dtype


def _make_room(
    device: Device, spec: DecoderSpec, layout: KVLayout, dtype: torch.dtype, plan: KVPlan, offload: bool
) -> KVRoom:
    geometry = AttentionGeometry(scale=spec.head_dim**-0.5, windows=tuple(spec.sliding_windows))
    backend = select_cpu_backend(spec.head_dim)
    logger.info("attention backend: %s", backend.name)
    if not offload:
        return PagedKVCache(device, layout, dtype, geometry, backend, plan.num_gpu_blocks)
    engine = OffloadEngine(device, layout, dtype, plan.split, plan.num_cpu_blocks, plan.span_blocks)
    return OffloadedKVCache(engine, geometry, backend, plan.num_gpu_blocks)
