"""The executor of one process: turns batches into tensors, runs the model, samples. Tensors begin here."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from nanovllm.config import EngineConfig
from nanovllm.device import Device, create_device
from nanovllm.device.trace import TracedDevice
from nanovllm.engine.batch import Batch, ScheduledSequence, StepResult
from nanovllm.engine.block_manager import WATERMARK
from nanovllm.engine.decode_graphs import record_decode_graphs
from nanovllm.engine.layerwise_runner import LayerwiseRunner
from nanovllm.engine.profiling import measure_memory
from nanovllm.engine.scoring import Scores, score
from nanovllm.errors import ConfigError, EngineError
from nanovllm.forward_context import ForwardContext, KVCache, SequenceMetadata, WatchedKVCache, flat_positions
from nanovllm.kvcache.bandwidth import measure_bandwidths
from nanovllm.kvcache.base import AttentionGeometry, KVCacheBase, KVStats
from nanovllm.kvcache.decode_shares import ONE_PROCESSOR, can_attend_concurrently
from nanovllm.kvcache.fitting import KVSizing
from nanovllm.kvcache.host_block_attention import BalancedShare, HostBlockAttention, cpu_attention_backend
from nanovllm.kvcache.layout import KVLayout
from nanovllm.kvcache.offload_engine import OffloadEngine
from nanovllm.kvcache.offloaded_cache import OffloadedKVCache
from nanovllm.kvcache.paged_cache import PagedKVCache
from nanovllm.kvcache.sizing import KVPlan
from nanovllm.kvcache.swap_space import asked_swap_bytes, plan_swap_space
from nanovllm.models.batch_invariance import keep_batch_invariance
from nanovllm.models.decoder import Decoder
from nanovllm.models.hf_config import load_decoder_spec
from nanovllm.models.loader import load_model
from nanovllm.models.non_finite import explain_non_finite_logits
from nanovllm.models.spec import DecoderSpec
from nanovllm.ops import select_backend
from nanovllm.ops.attention import AttentionBackend
from nanovllm.ops.upload import upload
from nanovllm.planner.machine import Rates
from nanovllm.planner.measure import Probe, measure_rates
from nanovllm.planner.network import Network
from nanovllm.planner.plan import Plan
from nanovllm.planner.report import log_lines

logger = logging.getLogger(__name__)


class ModelRunner:
    """Owns the device, the model and the KV memory. `on_layer` hears how far a step is: see `WatchedKVCache`."""

    on_layer: Callable[[float], None] | None = None

    def __init__(self, config: EngineConfig) -> None:
        self.spec = load_decoder_spec(config.model)
        self.dtype = _resolve_dtype(config.dtype, self.spec)
        self.device = create_device(config.device)
        self._closed = False
        backend = select_backend(self.device.torch_device, self.spec.head_dim)
        logger.info("attention backend: %s", backend.name)
        self.model = _load(config, self.spec, self.dtype, self.device)
        keep_batch_invariance(config, self.model, backend)
        layout = KVLayout(
            num_layers=self.spec.num_layers,
            num_kv_heads=self.spec.num_kv_heads,
            head_dim=self.spec.head_dim,
            block_size=config.block_size,
            itemsize=self.dtype.itemsize,
        )
        memory = measure_memory(self.device, self.model, backend, config)
        beside_swap = replace(memory, host_free=memory.host_free - asked_swap_bytes(config))
        self._sizing = KVSizing(config, layout, self.spec.max_model_len, beside_swap, WATERMARK)
        self.plan = self._sizing.plan()
        self.num_swap_blocks = plan_swap_space(config, layout, memory, self.plan)
        # Measuring the rates takes seconds, which are spent for those who read the log.
        if logger.isEnabledFor(logging.INFO):
            self._log_plan(config, backend)
        if config.trace is not None:
            self.device = TracedDevice(self.device, config.trace)
        self.kv_cache = _make_kv_cache(
            self.device, self.model, layout, self.plan, backend, config, self.num_swap_blocks
        )
        self._layerwise: LayerwiseRunner | None = None
        if isinstance(self.kv_cache, OffloadedKVCache):
            self._layerwise = LayerwiseRunner(self.model, self.kv_cache.layerwise)
        self._graphs = record_decode_graphs(self.device, self.model, self.kv_cache, self.plan.max_model_len, config)

    @torch.inference_mode()
    def execute(self, batch: Batch) -> StepResult:
        """Run one step. After a failure the runner can be used again; what the step was writing is undefined."""
        if self._closed:
            raise EngineError("the engine is closed: make a new LLM")
        slices = _slices(batch.whole)
        try:
            with self.device.compute():
                traffic = self.kv_cache.begin_step(slices, batch.moves)
                if self._layerwise is not None:
                    self._layerwise.begin_step(batch.layerwise, traffic)
                scores = self._run_batch(batch.whole, slices)
                if self._layerwise is not None and batch.layerwise is not None:
                    hidden = self._layerwise.run(batch.layerwise)
                    start = hidden.shape[0] - len(batch.layerwise.token_ids)
                    scores.extend(self._score(hidden, [batch.layerwise], [start]))
                self.kv_cache.end_step()
        except BaseException:
            self.kv_cache.abandon_step()
            if self._layerwise is not None:
                self._layerwise.drop()
            raise
        return StepResult(scores.samples, traffic.h2d_bytes, traffic.d2h_bytes, scores.prompt_logprobs, scores.errors)

    def plan_with_rates(self, rates: Rates) -> Plan:
        """The KV memory together with the network and the machine."""
        return Plan(Network(self.spec, str(self.dtype).removeprefix("torch.")), self._sizing, rates, self.plan)

    def advise(self, num_tokens: int) -> str:
        """What to do about a prompt of so many tokens, which are too many."""
        return self._sizing.advice(num_tokens)

    def kv_stats(self) -> KVStats:
        return self._last_stats if self._closed else self.kv_cache.stats()

    def close(self) -> None:
        """End the device's streams, release weights and KV memory. Safe to call twice."""
        if not self._closed:
            self._closed = True
            self._last_stats = self.kv_cache.stats()
            try:
                self.device.close()
            finally:
                del self.model, self.kv_cache, self._layerwise, self._graphs

    def _log_plan(self, config: EngineConfig, backend: AttentionBackend) -> None:
        ring_slots, chunk = self.plan.split.ring_slots, config.max_num_batched_tokens
        with closing(create_device(config.device)) as device:
            probe = Probe(device, self.model, backend, config.block_size, ring_slots, chunk)
            rates = measure_rates(probe)
        for line in log_lines(self.plan_with_rates(rates)):
            logger.info("%s", line)

    def _run_batch(self, sequences: Sequence[ScheduledSequence], slices: tuple[SequenceMetadata, ...]) -> Scores:
        """Take sequences through all layers: what was drawn for each, and log-probabilities of its prompt."""
        if not sequences:
            return Scores([], [], {})
        inputs, kv_cache = _inputs(sequences, slices), self._watched_cache()
        if self._graphs is not None and self._graphs.take(slices):
            hidden = self._graphs.run(inputs, slices, kv_cache)
        else:
            token_ids, positions, rope_lengths = upload(inputs, self.device.torch_device)
            hidden = self.model(token_ids, ForwardContext(positions, rope_lengths, slices, kv_cache))
        return self._score(hidden, sequences, [s.query_start for s in slices])

    def _score(self, hidden: Tensor, sequences: Sequence[ScheduledSequence], starts: Sequence[int]) -> Scores:
        return score(self.model, hidden, sequences, starts, lambda: self._why_not_finite)

    @cached_property
    def _why_not_finite(self) -> str:
        return explain_non_finite_logits(self.model)

    def _watched_cache(self) -> KVCache:
        if self.on_layer is None:
            return self.kv_cache
        return WatchedKVCache(self.kv_cache, self.spec.num_layers, self._tell_layer)

    def _tell_layer(self, share: float) -> None:
        """Tell the watcher; one that fails costs no request its answer."""
        try:
            if self.on_layer is not None:
                self.on_layer(share)
        except Exception:
            self.on_layer = None
            logger.exception("the function that watches the steps has failed, and is not called again")


def _inputs(sequences: Sequence[ScheduledSequence], slices: Sequence[SequenceMetadata]) -> Tensor:
    """Token ids, positions and RoPE lengths of a flat batch, on the host: int64 [3, tokens]."""
    token_ids = torch.tensor([token for seq in sequences for token in seq.token_ids], dtype=torch.int64)
    prompt_lens = torch.tensor([seq.prompt_len for seq in sequences])
    query_lens = torch.tensor([s.query_len for s in slices])
    positions = flat_positions(slices)
    rope_lengths = torch.maximum(positions + 1, torch.repeat_interleave(prompt_lens, query_lens))
    return torch.stack((token_ids, positions, rope_lengths))


def _slices(sequences: Sequence[ScheduledSequence]) -> tuple[SequenceMetadata, ...]:
    slices: list[SequenceMetadata] = []
    start = 0
    for seq in sequences:
        slices.append(SequenceMetadata(start, len(seq.token_ids), seq.context_len, seq.block_table))
        start += len(seq.token_ids)
    return tuple(slices)


def _resolve_dtype(name: str, spec: DecoderSpec) -> torch.dtype:
    resolved = spec.dtype if name == "auto" else name
    dtype = getattr(torch, resolved, None)
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ConfigError(f"dtype={resolved!r}: must be one of bfloat16, float16, float32")
    assert isinstance(dtype, torch.dtype)
    return dtype


def _load(config: EngineConfig, spec: DecoderSpec, dtype: torch.dtype, device: Device) -> Decoder:
    """The model on the device, written by the stream that reads it."""
    try:
        with device.compute():
            free = device.free_memory()
            return load_model(config.model, spec, dtype, device.torch_device, config.load_format, config.seed, free)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"model={config.model!r}: its weights do not fit into the {device.total_memory() / 2**30:.2f} GiB of the "
            "device; free device memory or use device='cpu'"
        ) from error


def _make_kv_cache(
    device: Device,
    model: Decoder,
    layout: KVLayout,
    plan: KVPlan,
    backend: AttentionBackend,
    config: EngineConfig,
    num_swap_blocks: int,
) -> KVCacheBase:
    spec = model.spec
    geometry = AttentionGeometry(spec.head_dim**-0.5, spec.num_heads, tuple(spec.sliding_windows))
    if not config.enable_cpu_offload:
        return PagedKVCache(device, layout, model.dtype, geometry, backend, plan.num_gpu_blocks, num_swap_blocks)
    engine = OffloadEngine(
        device, layout, model.dtype, plan.split, plan.num_cpu_blocks, num_swap_blocks, plan.layerwise_memory
    )
    cpu_attention = (
        _make_cpu_attention(engine, model, geometry, backend) if config.cpu_attention and plan.num_cpu_blocks else None
    )
    return OffloadedKVCache(engine, geometry, backend, plan.num_gpu_blocks, cpu_attention)


def _make_cpu_attention(
    engine: OffloadEngine, model: Decoder, geometry: AttentionGeometry, backend: AttentionBackend
) -> HostBlockAttention | None:
    if not (engine.device.shares_host or can_attend_concurrently(model.spec.head_dim)):
        logger.info("no CPU attention: its kernel takes heads of a multiple of 16, not of %d", model.spec.head_dim)
        return None
    host_backend = cpu_attention_backend(engine.device, model.spec.head_dim)
    rates = ONE_PROCESSOR
    if not engine.device.shares_host:
        with engine.device.compute():
            rates = measure_bandwidths(engine, geometry, backend, host_backend)
        gb_s = (rate / 1e9 for rate in (rates.link, rates.host, rates.device))
        logger.info("KV bandwidths in GB/s: link %.1f, CPU attention %.1f, device attention %.1f", *gb_s)
    return HostBlockAttention(engine, geometry, host_backend, BalancedShare(rates, model.layer_weight_bytes))
