"""The executor of one process: turns batches into tensors, runs the model, samples. Tensors begin here."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from nanovllm.config import EngineConfig
from nanovllm.device import Device, create_device
from nanovllm.engine.batch import Batch, Sample, ScheduledSequence, StepResult
from nanovllm.engine.block_manager import WATERMARK
from nanovllm.engine.profiling import measure_memory
from nanovllm.errors import ConfigError, EngineError
from nanovllm.forward_context import ForwardContext, SequenceSlice, flat_positions
from nanovllm.kvcache.bandwidth import measure_rates
from nanovllm.kvcache.host_arm import BalancedShare, HostArm
from nanovllm.kvcache.layout import KVLayout
from nanovllm.kvcache.offload_engine import OffloadEngine
from nanovllm.kvcache.offloaded_cache import OffloadedKVCache
from nanovllm.kvcache.paged_cache import PagedKVCache
from nanovllm.kvcache.room import AttentionGeometry, KVRoom, KVStats
from nanovllm.kvcache.sizing import KVPlan, plan_kv_cache
from nanovllm.layers.sampler import sample
from nanovllm.models.decoder import Decoder
from nanovllm.models.hf_config import load_decoder_spec
from nanovllm.models.loader import load_model
from nanovllm.models.spec import DecoderSpec
from nanovllm.ops import select_cpu_backend
from nanovllm.ops.attention import AttentionBackend

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
        memory = measure_memory(self.device, self.model, config)
        self.plan = plan_kv_cache(config, layout, self.spec.max_model_len, memory, WATERMARK)
        self.kv_cache = _make_room(self.device, self.model, layout, self.plan, config)
        logger.info(
            "# GPU blocks: %d, # CPU blocks: %d; longest prompt: %d tokens",
            self.plan.num_gpu_blocks,
            self.plan.num_cpu_blocks,
            self.plan.max_model_len,
        )

    @torch.inference_mode()
    def execute(self, batch: Batch) -> StepResult:
        """Run one step. After a failure the runner can be used again; what the step was writing is undefined."""
        if self._closed:
            raise EngineError("the engine is closed: make a new LLM")
        slices = _slices(batch.sequences)
        try:
            traffic = self.kv_cache.begin_step(slices, batch.moves)
            hidden = self.model(self._input_ids(batch), self._context(slices, batch.sequences))
            samples = self._sample(hidden, batch.sequences, slices)
        except BaseException:
            self.kv_cache.abandon_step()
            raise
        return StepResult(samples, traffic.h2d_bytes, traffic.d2h_bytes)

    def kv_stats(self) -> KVStats:
        return self._last_stats if self._closed else self.kv_cache.stats()

    def close(self) -> None:
        """End the device's streams, release weights and KV memory. Safe to call twice."""
        if not self._closed:
            self._closed = True
            self._last_stats = self.kv_cache.stats()
            self.device.close()
            del self.model, self.kv_cache

    def _input_ids(self, batch: Batch) -> Tensor:
        token_ids = [token for seq in batch.sequences for token in seq.token_ids]
        return torch.tensor(token_ids, dtype=torch.int64, device=self.device.torch_device)

    def _context(self, slices: tuple[SequenceSlice, ...], sequences: Sequence[ScheduledSequence]) -> ForwardContext:
        positions = flat_positions(slices, self.device.torch_device)
        prompt_lens = torch.tensor([seq.prompt_len for seq in sequences], device=positions.device)
        query_lens = torch.tensor([s.query_len for s in slices], device=positions.device)
        rope_lengths = torch.maximum(positions + 1, torch.repeat_interleave(prompt_lens, query_lens))
        return ForwardContext(positions, rope_lengths, slices, self.kv_cache)

    def _sample(
        self, hidden: Tensor, sequences: Sequence[ScheduledSequence], slices: Sequence[SequenceSlice]
    ) -> list[list[Sample]]:
        """Logits are computed only where a token is due."""
        samples: list[list[Sample]] = [[] for _ in sequences]
        due = [(i, row) for i, seq in enumerate(sequences) for row in seq.samples]
        if not due:
            return samples
        last_rows = torch.tensor([slices[i].query_start + slices[i].query_len - 1 for i, _ in due])
        logits = self.model.compute_logits(hidden[last_rows.to(hidden.device)])
        for (i, _), token in zip(due, sample(logits, [row for _, row in due]), strict=True):
            samples[i].append(Sample(token))
        return samples


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


def _make_room(device: Device, model: Decoder, layout: KVLayout, plan: KVPlan, config: EngineConfig) -> KVRoom:
    spec = model.spec
    geometry = AttentionGeometry(spec.head_dim**-0.5, spec.num_heads, tuple(spec.sliding_windows))
    backend = select_cpu_backend(spec.head_dim)
    logger.info("attention backend: %s", backend.name)
    if not config.enable_cpu_offload:
        return PagedKVCache(device, layout, model.dtype, geometry, backend, plan.num_gpu_blocks)
    engine = OffloadEngine(device, layout, model.dtype, plan.split, plan.num_cpu_blocks)
    arm = _make_arm(engine, model, geometry, backend) if config.cpu_attention and plan.num_cpu_blocks else None
    return OffloadedKVCache(engine, geometry, backend, plan.num_gpu_blocks, arm)


def _make_arm(engine: OffloadEngine, model: Decoder, geometry: AttentionGeometry, backend: AttentionBackend) -> HostArm:
    # An arm beside the device leaves a core to the thread that drives it.
    threads = None if engine.device.shares_host else max(1, torch.get_num_threads() - 1)
    host_backend = select_cpu_backend(model.spec.head_dim, threads)
    rates = measure_rates(engine, geometry, backend, host_backend)
    gb_s = (rate / 1e9 for rate in (rates.link, rates.host, rates.device))
    logger.info("KV bandwidths: link %.1f GB/s, CPU attention %.1f, device attention %.1f", *gb_s)
    return HostArm(engine, geometry, host_backend, BalancedShare(rates, model.layer_weight_bytes))
