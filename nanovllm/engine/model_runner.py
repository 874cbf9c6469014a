"""The executor of one process: makes device, model and KV cache, runs batches, samples. Tensors begin here."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property

import torch

from nanovllm.config import EngineConfig
from nanovllm.data.batch import Batch, StepResult
from nanovllm.data.memory_checks import gib
from nanovllm.device import Busy, Device, create_device
from nanovllm.engine import sides
from nanovllm.engine.block_manager import WATERMARK
from nanovllm.engine.execution_order import AdapterManager, ChunkOrder, DecodeRunner, ExecutionOrder, StepWatch
from nanovllm.engine.scoring import explain_non_finite_logits, score
from nanovllm.errors import Advice, ConfigError, EngineError, quoted
from nanovllm.kvcache.base import AttentionGeometry, KVCacheBase, KVStats
from nanovllm.kvcache.chunked_attention import OffloadedKVCache
from nanovllm.kvcache.offload_engine import OffloadEngine
from nanovllm.kvcache.paged_cache import PagedKVCache
from nanovllm.layers.parallel import RankGroup
from nanovllm.memory.block_size import layout_of
from nanovllm.memory.fitting import KVSizing
from nanovllm.memory.profiling import measure_memory
from nanovllm.memory.sizing import smallest
from nanovllm.memory.step_memory import reserve_for_adapters
from nanovllm.models.batch_invariance import keep_batch_invariance
from nanovllm.models.decoder import Decoder
from nanovllm.models.loader import load_model
from nanovllm.models.spec import DecoderSpec
from nanovllm.ops import select_backend
from nanovllm.ops.cpu_kernels import cpu_kernel_choice, dtype_name
from nanovllm.ops.kv_quantization import stored_dtype

logger = logging.getLogger(__name__)


class ModelRunner:
    """Owns the device, the model and the KV cache, and runs one batch at a time."""

    def __init__(self, config: EngineConfig, spec: DecoderSpec, group: RankGroup | None = None) -> None:
        """spec: of the whole model; group: the tensor-parallel ranks, of which this is one, None for the whole."""
        sides.check_arguments(config)
        _check_quantization(config.quantization, spec)
        self.dtype = _resolve_dtype(config.dtype, spec)
        self.device = create_device(config.device)
        self._closed = False
        self._kv_dtype = stored_dtype(config.kv_cache_dtype, self.dtype)
        self._backend = select_backend(self.device.torch_device, spec.head_dim, self._kv_dtype)
        logger.info("attention backend: %s", self._backend.name)
        if self.device.torch_device.type == "cpu":
            logger.info("CPU kernels: %s", cpu_kernel_choice())
        self.model = _load(config, spec, self.dtype, self.device, group)
        self.spec = self.model.spec  # of this rank
        keep_batch_invariance(config, self.model, self._backend)
        layout = layout_of(config, self.spec, self.dtype.itemsize)
        if group is not None:
            group.exchange(None)  # memory is measured when all ranks have loaded their weights
        memory = measure_memory(self.device, self.model, self._backend, config)
        if group is not None:
            memory = smallest(group.exchange(memory), group.local_size)
        memory = reserve_for_adapters(memory, config, self.spec, self.dtype.itemsize)
        if group is not None:  # adapters take more on the rank that has most of the model
            memory = smallest(group.exchange(memory), local_size=1)
        groups = sides.sequence_groups()
        asked_swap_bytes = groups.asked_swap_bytes(config) if groups is not None else 0
        without_swap = replace(memory, host_free=memory.host_free - asked_swap_bytes)
        self.sizing = KVSizing(
            config, layout, self.spec.max_model_len, without_swap, WATERMARK, self.spec.yarn_positions
        )
        self.plan = self.sizing.plan()
        self.num_swap_blocks = groups.plan_swap_space(config, layout, memory, self.plan) if groups is not None else 0
        self._log_sizes()
        self._adapters = self._make_adapter_manager()  # before the trace, for which all computation is of steps
        self._trace = sides.trace() if config.trace is not None else None
        if self._trace is not None and config.trace is not None:
            self.device = self._trace.TracedDevice(self.device, config.trace)
        self.kv_cache, layerwise = self._make_kv_cache()
        self._graphs = self._record_graphs(config)
        if self._trace is not None:  # after the graphs, which record no marks
            self._trace.trace_model(self.device, self.model)
        chunks = ChunkOrder(self.model, self.kv_cache, self._graphs, self._adapters)
        self._orders: list[ExecutionOrder] = [chunks, *layerwise]
        self._was_layerwise = False  # whether the last step had a part of a layer-by-layer prefill
        self._watch = StepWatch(self.spec.num_layers)

    @torch.inference_mode()
    def execute(self, batch: Batch) -> StepResult:
        """Run one step. After a failure the runner can be used again; the KV that the step was writing is undefined."""
        self.check_health()
        # Layer-by-layer prefill also takes part in the step after its last, to drop what it kept between two steps.
        orders = self._orders if batch.layerwise is not None or self._was_layerwise else self._orders[:1]
        self._was_layerwise = batch.layerwise is not None
        result = StepResult()
        on_attend = self._watch.begin_step(batch) if self._watch.on_layer is not None else None
        if self._trace is not None:
            self._trace.begin_step(self.device, batch.sequences)
        try:
            with self.device.compute():
                unloaded = self._adapters.begin_step(batch.adapters) if self._adapters is not None else {}
                begun = [(order, moved) for order in orders if (moved := order.begin_step(batch)) is not None]
                for order, moved in begun:
                    score(self.model, order.run(on_attend), result, lambda: self._why_not_finite)
                    result.h2d_bytes.extend(moved.h2d_bytes)
                    result.d2h_bytes.extend(moved.d2h_bytes)
                self.kv_cache.end_step()
        except BaseException:
            for order in self._orders:
                order.abandon_step()
            raise
        for index, seq in enumerate(batch.sequences):
            if seq.adapter is not None and seq.adapter in unloaded:
                result.errors[index] = unloaded[seq.adapter]
        return result

    def check_health(self) -> None:
        """Raise EngineError if no step can run any more."""
        if self._closed:
            raise EngineError("the engine is closed: make a new LLM")

    def advise(self, num_tokens: int) -> Advice:
        """What to do about a prompt of `num_tokens` tokens, which is too long for the KV cache."""
        return self.sizing.advice(num_tokens)

    def watch_steps(self, on_layer: Callable[[float], None] | None) -> Callable[[float], None] | None:
        """See `LLM.watch_steps`."""
        before, self._watch.on_layer = self._watch.on_layer, on_layer
        return before

    def kv_stats(self) -> KVStats:
        return self._last_stats if self._closed else self.kv_cache.stats()

    def link_busy(self) -> Busy:
        """Bytes copied to the device so far, or in a sample of the copies, and the seconds during which they ran."""
        return self.device.link_busy()

    def close(self) -> None:
        """End the device's streams, release weights and KV cache. Safe to call twice."""
        if not self._closed:
            self._closed = True
            self._last_stats = self.kv_cache.stats()
            try:
                self.device.close()
            finally:
                del self.model, self.kv_cache, self._orders, self._graphs, self._adapters

    @cached_property
    def _why_not_finite(self) -> str:
        return explain_non_finite_logits(self.model)

    def _make_kv_cache(self) -> tuple[KVCacheBase, list[ExecutionOrder]]:
        """The KV cache of the plan's sizes, and the execution orders other than `ChunkOrder` that it allows."""
        spec, plan, config = self.spec, self.plan, self.sizing.config
        layout = replace(self.sizing.layout, num_kv_heads=spec.num_kv_heads)
        geometry = AttentionGeometry(spec.attention_scale, spec.num_heads, tuple(spec.sliding_windows), self.dtype)
        device, dtype, backend, num_swap = self.device, self._kv_dtype, self._backend, self.num_swap_blocks
        if not config.enable_cpu_offload:
            return PagedKVCache(device, layout, dtype, geometry, backend, plan.num_gpu_blocks, num_swap), []
        engine = OffloadEngine(device, layout, dtype, plan.split, plan.num_cpu_blocks, num_swap, plan.layerwise_memory)
        side = sides.cpu_attention() if config.cpu_attention and plan.num_cpu_blocks else None
        cpu_attention = None
        if side is not None:
            cpu_attention = side.make_cpu_attention(engine, geometry, backend, self.model.layer_weight_bytes)
        layerwise = sides.layerwise_runner()
        orders = []
        if layerwise is not None:
            orders.append(layerwise.LayerwiseOrder(self.model, engine, geometry, backend, self._adapters))
        return OffloadedKVCache(engine, geometry, backend, plan.num_gpu_blocks, cpu_attention), orders

    def _make_adapter_manager(self) -> AdapterManager | None:
        lora = sides.lora_runner() if self.sizing.config.enable_lora else None
        with self.device.compute():  # the stream that reads what the manager writes
            return lora.LoRAManager(self.model, self.sizing.config) if lora is not None else None

    def _record_graphs(self, config: EngineConfig) -> DecodeRunner | None:
        graphs, longest = sides.cuda_graphs(), self.plan.max_model_len
        if graphs is None:
            return None
        return graphs.record_decode_graphs(self.device, self.model, self.kv_cache, longest, config)

    def _log_sizes(self) -> None:
        """Log what the engine holds. All of it is known without running anything."""
        plan, layout, mib = self.plan, self.sizing.layout, 2**20
        device, host = ("GPU", "CPU") if self.device.torch_device.type == "cuda" else ("device", "host")
        host_bytes = plan.num_cpu_blocks * layout.block_bytes
        resident = min(plan.max_model_len, plan.split.resident_blocks * layout.block_size) * layout.token_bytes
        streamed = plan.max_model_len * layout.token_bytes - resident
        buffer = plan.layerwise_memory.buffer_bytes(layout)
        device_bytes = plan.num_gpu_blocks * layout.block_bytes + buffer
        stored = f" in {dtype_name(self._kv_dtype)} with scales" if layout.scale_bytes else ""
        for line in (
            f"# {device} blocks: {plan.num_gpu_blocks}, # {host} blocks: {plan.num_cpu_blocks}; longest prompt: "
            f"{plan.max_model_len} tokens (limit: {self.sizing.longest_limit(plan)})",
            f"weights {self.model.weight_bytes / mib:,.1f} MiB, KV cache {layout.token_bytes} bytes a token{stored}; "
            f"on the device {plan.split.resident_blocks} resident blocks of {layout.block_size} tokens, "
            f"{plan.split.ring_slots} ring slots and a layer buffer of {buffer / mib:,.1f} MiB, in all "
            f"{device_bytes / mib:,.1f} MiB; on the host {host_bytes / mib:,.1f} MiB",
            f"of the longest prompt's KV cache {resident / mib:,.1f} MiB stay on the device and {streamed / mib:,.1f} "
            "MiB are on the host",
        ):
            logger.info("%s", line)
        config = self.sizing.config
        if config.enable_cpu_offload and plan.num_cpu_blocks == 0 and config.num_cpu_blocks == -1:
            logger.warning(
                "enable_cpu_offload=True moves nothing to the host: the device's %s KV blocks (%s) hold all that "
                "requests can use; to offload, give the device less, with num_gpu_blocks or kv_cache_memory_bytes",
                f"{plan.num_gpu_blocks:,}",
                gib(plan.num_gpu_blocks * layout.block_bytes),
            )


def _check_quantization(asked: str | None, spec: DecoderSpec) -> None:
    """Raise ConfigError unless the checkpoint has the asked method, also by vLLM's name of its kernels for it."""
    stored = None if spec.quantization is None else spec.quantization.name
    if asked is not None and asked.removesuffix("_marlin") != stored:
        found = "the checkpoint is not quantized" if stored is None else f"the checkpoint is stored as {stored}"
        raise ConfigError(
            f"quantization={quoted(asked)}: {found}, and weights are not quantized at load; leave the argument out"
        )


def _resolve_dtype(name: str, spec: DecoderSpec) -> torch.dtype:
    resolved = spec.dtype if name == "auto" else name
    dtype = getattr(torch, resolved, None)
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ConfigError(f"dtype={resolved!r}: must be one of bfloat16, float16, float32")
    assert isinstance(dtype, torch.dtype)
    return dtype


def _load(
    config: EngineConfig, spec: DecoderSpec, dtype: torch.dtype, device: Device, group: RankGroup | None
) -> Decoder:
    """The model on the device, written by the stream that reads it."""
    try:
        with device.compute():
            free = device.free_memory() // (group.local_size if group is not None and device.shares_host else 1)
            load_format, seed = config.load_format, config.seed
            return load_model(config.model, spec, dtype, device.torch_device, load_format, seed, free, group)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"model={config.model!r}: its weights do not fit into the {gib(device.total_memory())} of the device; "
            "free device memory or use device='cpu'"
        ) from error
