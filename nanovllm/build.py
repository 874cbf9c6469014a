"""The composition root: from engine arguments to an engine.

The one file that knows which features exist. It makes device, model, sizes, KV cache and features, and passes
them down as objects. A tensor-parallel rank makes its runner here too.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from nanovllm.config import EngineConfig
from nanovllm.data.memory_checks import check_fits, gib
from nanovllm.data.network import Network
from nanovllm.device import Device, create_device
from nanovllm.engine.block_manager import WATERMARK, BlockManager
from nanovllm.engine.input_processor import InputProcessor
from nanovllm.engine.layerwise_scheduler import LayerwiseScheduler
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.model_runner import ChunkedPass, ModelRunner
from nanovllm.engine.resolved_sampling import SamplingFacts
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.scheduling_budget import SchedulerLimits
from nanovllm.engine.step_hook import StepHook
from nanovllm.errors import ConfigError, quoted
from nanovllm.features.kv_disk.stored_blocks import StoredBlocks
from nanovllm.features.lora.slots import AdapterSlots
from nanovllm.features.recomputed_tokens import RecomputedTokens
from nanovllm.features.recurrent.snapshots import recurrent_edge
from nanovllm.features.recurrent.states import RecurrentStates
from nanovllm.features.speculation.hook import Drafter, Speculation
from nanovllm.features.structured_outputs import LLGuidanceCompiler
from nanovllm.features.structured_outputs.step_masks import StepMasks
from nanovllm.features.vllm_api.metrics_reader import MetricsReader
from nanovllm.kvcache.base import AttentionGeometry, KVCacheBase
from nanovllm.kvcache.chunked_attention import OffloadedKVCache
from nanovllm.kvcache.forward_pass import ForwardPass, PassHook
from nanovllm.kvcache.layerwise_pass import LayerwisePass
from nanovllm.kvcache.offload_engine import OffloadEngine
from nanovllm.kvcache.paged_cache import PagedKVCache
from nanovllm.kvcache.states import StatePool
from nanovllm.layers.causal_lm import CausalLM
from nanovllm.layers.parallel import RankGroup
from nanovllm.memory.adapters import without_adapters
from nanovllm.memory.draft_model import asked_mtp, draft_engine, mtp_engine, mtp_memory, sized_draft_engine
from nanovllm.memory.fitting import KVSizing
from nanovllm.memory.layerwise import NO_LAYERWISE
from nanovllm.memory.layout import layout_of, of_rank
from nanovllm.memory.profiling import activation_peak, measure_memory
from nanovllm.memory.shares import kv_wish, with_device_bytes
from nanovllm.memory.sizing import KVPlan, smallest
from nanovllm.memory.states import without_states
from nanovllm.memory.swap import asked_swap_bytes, plan_swap_space
from nanovllm.memory.weights import weight_plan
from nanovllm.models.hf_config import ModelConfig
from nanovllm.models.loader import load_model, load_mtp_head
from nanovllm.models.mtp import MTPHead
from nanovllm.models.network_config import NetworkConfig
from nanovllm.ops import select_backend
from nanovllm.ops.attention import AttentionBackend
from nanovllm.ops.backends import is_chunk_invariant
from nanovllm.ops.cpu_kernels import cpu_kernel_choice, dtype_name
from nanovllm.ops.kv_quantization import stored_dtype
from nanovllm.ops.prefill_libraries import faster_prefill
from nanovllm.sampling_params import SamplingParams
from nanovllm.speculative_config import SpeculativeConfig, speculative_config
from nanovllm.text.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from nanovllm.features.distributed.executor import TensorParallelExecutor
    from nanovllm.features.kv_disk.store import DiskStore
    from nanovllm.features.lora.rows import AdapterRows
    from nanovllm.features.speculation.hidden_states import HiddenStates
    from nanovllm.features.streamed_weights.host_layers import HostLayers

logger = logging.getLogger(__name__)


class BuiltEngine(NamedTuple):
    """An engine and its executor, which applications ask for sizes and statistics: of several ranks, those of one."""

    engine: LLMEngine
    runner: ModelRunner | TensorParallelExecutor


def build_engine(config: EngineConfig) -> BuiltEngine:
    """Raises ConfigError for arguments that cannot be honoured, ModelError for damaged or unsupported checkpoints."""
    # The smallest files first: no other is opened if one of them cannot be used.
    model = ModelConfig(config.model, config.hf_overrides, config.generation_config)
    eos_token_ids = frozenset(model.eos_token_ids())
    sampling_defaults = model.sampling_defaults(config.override_generation_config)
    SamplingParams(**sampling_defaults)  # refuses those that cannot be used
    if config.trust_remote_code:
        logger.warning("trust_remote_code=True changes nothing: code that a model directory holds is never run")
    tokenizer = _load_tokenizer(config, model.model_type)
    drafter = _drafter(config, model.network_config, tokenizer)
    hidden = _hidden_states(config)
    runner = _start_runner(config, model.network_config, hidden)
    if hidden is not None and isinstance(runner, ModelRunner):
        drafter = _mtp_drafter(runner.sizing.config, runner, hidden)
    plan = runner.plan
    network = runner.network
    limits = _limits(config, runner, eos_token_ids)
    manager = BlockManager(
        plan.split.resident_blocks,
        plan.num_cpu_blocks,
        runner.sizing.layout.groups,
        config.enable_prefix_caching,
        runner.num_swap_blocks,
        chunk=limits.chunk,
    )
    adapters = _adapters(config, network, limits)
    grammars = LLGuidanceCompiler(tokenizer, network.vocab_size, eos_token_ids)
    manager.hooks += _hooks(config, runner, limits, manager, drafter, adapters, grammars)
    sampling = SamplingFacts(network.vocab_size, eos_token_ids, tokenizer, config.max_logprobs, grammars)
    engine = LLMEngine(
        Scheduler(limits, manager),
        InputProcessor(limits, network.vocab_size, sampling, config.seed, runner.advise, adapters),
        runner,
        model=str(config.model),
        sampling_defaults=sampling_defaults,
        metrics=MetricsReader(plan.max_model_len, config.model_name),
    )
    return BuiltEngine(engine, runner)


def build_runner(
    config: EngineConfig, network: NetworkConfig, group: RankGroup | None = None, pass_hooks: Sequence[PassHook] = ()
) -> ModelRunner:
    """The runner of one process.

    network: of the whole model; group: the tensor-parallel ranks, of which this is one, None for the whole. pass_hooks:
    of the caller, beside those that the arguments ask for.
    """
    _check_quantization(config.quantization, network.network.quantization)
    network = network.for_length(config.max_model_len or network.network.max_model_len)
    dtype = _resolve_dtype(config.dtype, network.dtype)
    device = create_device(config.device)
    kv_dtype = stored_dtype(config.kv_cache_dtype, dtype)
    backend = select_backend(device.torch_device, network.network.hardest_head_dim, kv_dtype)
    logger.info("attention backend: %s", backend.name)
    if device.torch_device.type == "cpu":
        logger.info("CPU kernels: %s", cpu_kernel_choice())
    model, host_layers = _load_model(config, network, dtype, device, group)
    _stream_weights(device, model, host_layers)
    own = model.network  # of this rank
    config = with_device_bytes(config, own)
    backend = _faster_prefill(config, model, device, backend)
    _keep_batch_invariance(config, model, backend)
    sizing, plan, num_swap_blocks = _plan_memory(config, model, device, backend, group, host_layers)
    _log_sizes(sizing, plan, model, device, kv_dtype)
    adapters = _adapter_rows(config, model, device)  # before the trace, for which all computation is of steps
    pass_hooks = [*pass_hooks, *([] if adapters is None else [adapters])]
    trace = None
    if config.trace is not None:
        from nanovllm.device.trace import TracedDevice

        device = trace = TracedDevice(device, config.trace)
        _stream_weights(device, model, host_layers)
    layout = of_rank(sizing.layout, own)
    geometry = AttentionGeometry(own.attention_scale, own.num_heads, dtype, model.sinks)
    kv_cache: KVCacheBase
    layerwise: list[ForwardPass] = []
    if config.enable_cpu_offload:
        engine = OffloadEngine(
            device, layout, kv_dtype, plan.split, plan.num_cpu_blocks, num_swap_blocks, plan.layerwise_memory
        )
        kv_cache = _offloaded(config, plan, engine, geometry, backend, model)
        layerwise.append(LayerwisePass(model, engine, geometry, backend, pass_hooks))
    else:
        kv_cache = PagedKVCache(device, layout, kv_dtype, geometry, backend, plan.num_gpu_blocks, num_swap_blocks)
    if sizing.memory.states is not None:
        kv_cache.pools.states = StatePool(device, own, dtype, sizing.memory.states, model.recurrences)
    decode_graphs = None
    if _records_graphs(config, model, device):
        from nanovllm.features.cuda_graphs import record_decode_graphs

        of_rows = None if adapters is None else adapters.manager.recorded
        decode_graphs = record_decode_graphs(device, model, kv_cache, plan.max_model_len, config, of_rows)
    if trace is not None:
        trace.start()
    passes = [ChunkedPass(model, kv_cache, pass_hooks, decode_graphs), *layerwise]
    return ModelRunner(device, model, kv_cache, passes, sizing, plan, num_swap_blocks, pass_hooks)


# ---- what build_engine assembles. What needs torch or a library is imported where the arguments ask for it.


def _hooks(
    config: EngineConfig,
    runner: ModelRunner | TensorParallelExecutor,
    limits: SchedulerLimits,
    manager: BlockManager,
    drafter: Drafter | None,
    adapters: AdapterSlots | None,
    grammars: LLGuidanceCompiler,
) -> list[StepHook]:
    """What sees the steps of the engine, in the order in which it is called.

    Drafts are in a batch before their masks are made. Of a layer-by-layer prefill there is no more than the step's part
    before its tokens get masks and states. A sequence has its state before the store reads or keeps it.
    """
    store = _open_store(config, runner, adapters)
    slots = runner.sizing.memory.states
    states = stored = layerwise = speculation = None
    if slots is not None:
        states = RecurrentStates(manager, slots.device, slots.host, sys.maxsize if store is None else store.unit)
    if store is not None:
        stored = StoredBlocks(manager, store, states)
    if limits.layerwise_memory != NO_LAYERWISE:
        layerwise = LayerwiseScheduler(manager, limits, states, stored)
    if drafter is not None:
        speculation = Speculation(drafter, manager, limits, config.num_speculative_tokens, states)
    recomputed = RecomputedTokens(manager) if manager.prefix_cache.enabled else None
    hooks = [speculation, layerwise, StepMasks(grammars), states, stored, adapters, recomputed]
    return [hook for hook in hooks if hook is not None]


def _limits(
    config: EngineConfig, runner: ModelRunner | TensorParallelExecutor, eos_token_ids: frozenset[int]
) -> SchedulerLimits:
    states = runner.sizing.memory.states
    return SchedulerLimits(
        config.max_num_seqs if states is None else states.running,
        config.max_num_batched_tokens,
        runner.plan.max_model_len,
        eos_token_ids,
        config.long_prefill_token_threshold,
        config.preemption_mode,
        num_layers=runner.network.num_kv_layers,
        layerwise_memory=runner.plan.layerwise_memory,
        edge=1 if states is None else recurrent_edge(config, states.running),
    )


def _start_runner(
    config: EngineConfig, network: NetworkConfig, hidden: HiddenStates | None
) -> ModelRunner | TensorParallelExecutor:
    """hidden: what a head of the model reads, if it drafts."""
    if config.tensor_parallel_size == 1:
        return build_runner(config, network, pass_hooks=[] if hidden is None else [hidden.of_model()])
    from nanovllm.features.distributed.executor import TensorParallelExecutor  # torch.distributed

    if config.kv_cache_dir is None:
        return TensorParallelExecutor(config, network, build_runner)
    from nanovllm.features.kv_disk.part import StorePart

    return TensorParallelExecutor(config, network, build_runner, StorePart)


def _load_tokenizer(config: EngineConfig, model_type: str) -> Tokenizer | None:
    """The tokenizer that the arguments name; None if the model has none, or if it is not wanted."""
    if config.skip_tokenizer_init:
        return None
    directory = config.tokenizer if config.tokenizer is not None else config.model
    tokenizer = load_tokenizer(directory, model_type)
    if tokenizer is None and config.tokenizer is not None:
        raise ConfigError(f"tokenizer={quoted(config.tokenizer)}: the directory holds no tokenizer files")
    return tokenizer


def _adapters(config: EngineConfig, network: Network, limits: SchedulerLimits) -> AdapterSlots | None:
    if not config.enable_lora:
        return None
    from nanovllm.features.lora.adapter_files import AdapterRegistry

    return AdapterSlots(AdapterRegistry(network, config.max_lora_rank), config.max_loras, limits.max_num_seqs)


def _open_store(
    config: EngineConfig, runner: ModelRunner | TensorParallelExecutor, adapters: AdapterSlots | None
) -> DiskStore | None:
    """The KV blocks on disk that the arguments ask for."""
    if config.kv_cache_dir is None:
        return None
    from nanovllm.features.kv_disk.part import OwnPart
    from nanovllm.features.kv_disk.store import open_store

    parts = OwnPart(config, runner) if isinstance(runner, ModelRunner) else runner
    has_states = runner.sizing.memory.states is not None
    adapter_of = None if adapters is None else adapters.adapter_of
    return open_store(config, parts, runner.sizing.layout.groups, has_states, adapter_of)


def _drafter(config: EngineConfig, network: NetworkConfig, tokenizer: Tokenizer | None) -> Drafter | None:
    """The drafter that the arguments ask for, but for the model's own head, which is only checked.

    A draft model takes its memory before the KV cache is sized.
    """
    if config.speculative_config is None:
        return None
    asked = speculative_config(config.speculative_config)
    if asked.method == "ngram":
        from nanovllm.features.speculation.drafter import NgramDrafter

        return NgramDrafter(asked.prompt_lookup_min, asked.prompt_lookup_max)
    if asked.method == "mtp":
        from nanovllm.features.speculation.checks import check_mtp_head, check_mtp_weights

        check_mtp_head(config, network.architecture)
        check_mtp_weights(config)
        return None
    return _draft_model(config, asked, network.network, tokenizer)


def _hidden_states(config: EngineConfig) -> HiddenStates | None:
    """What the model's own head reads of the model's steps, if the head drafts."""
    if asked_mtp(config) is None:
        return None
    from nanovllm.features.speculation.hidden_states import HiddenStates

    return HiddenStates()


def _mtp_drafter(config: EngineConfig, runner: ModelRunner, hidden: HiddenStates) -> Drafter:
    """The model's own head with a resident KV cache, for which `_plan_memory` has left room."""
    from nanovllm.features.speculation.mtp import MTPDrafter

    assert config.speculative_config is not None
    model = runner.model
    device = runner.device
    asked = speculative_config(config.speculative_config)
    engine, longest = mtp_engine(config, asked, _mtp_network(model), runner.plan.max_model_len)
    with device.compute():
        head = load_mtp_head(config.model, model, config.load_format, config.seed)
    dtype = stored_dtype(engine.kv_cache_dtype, head.dtype)
    backend = select_backend(device.torch_device, head.network.hardest_head_dim, dtype)
    logger.info("the head for multi-token prediction:")
    sizing, plan, _ = _plan_memory(engine, head, device, backend, None)
    _log_sizes(sizing, plan, head, device, dtype)
    geometry = AttentionGeometry(head.network.attention_scale, head.network.num_heads, head.dtype, head.sinks)
    kv_cache = PagedKVCache(device, sizing.layout, dtype, geometry, backend, plan.num_gpu_blocks)
    hooks = [hidden.of_head()]
    own = ModelRunner(device, head, kv_cache, [ChunkedPass(head, kv_cache, hooks)], sizing, plan, 0, hooks)
    return MTPDrafter(own, longest, hidden)


def _mtp_network(model: CausalLM) -> Network:
    """What the head of a model keeps and weighs."""
    return MTPHead(model.on_meta()).network


def _draft_model(
    config: EngineConfig, asked: SpeculativeConfig, network: Network, tokenizer: Tokenizer | None
) -> Drafter:
    """A second network with a resident KV cache of one sequence of the greatest length, or of several shorter ones."""
    from nanovllm.features.speculation.checks import check_vocabulary
    from nanovllm.features.speculation.draft_model import DraftModel

    engine = draft_engine(config, asked)
    model = ModelConfig(engine.model)
    draft = model.network_config.network
    if draft.recurrent is not None:
        raise ConfigError(
            f"speculative_config: model={quoted(asked.model)} is a {draft.architecture} with recurrent layers, "
            "whose states cannot go back to a token: take a draft model without them"
        )
    own = None if config.skip_tokenizer_init else load_tokenizer(engine.model, model.model_type)
    check_vocabulary(asked.model, (tokenizer, network.vocab_size), (own, draft.vocab_size))
    engine, longest = sized_draft_engine(engine, draft, asked, config.max_model_len or network.max_model_len)
    logger.info("the draft model of speculative_config, %s:", asked.model)
    runner = build_runner(engine, model.network_config)
    return DraftModel(runner, longest, network.vocab_size)


# ---- what build_runner assembles


def _check_quantization(asked: str | None, stored: str | None) -> None:
    """Raise ConfigError unless the checkpoint has the asked method, also by vLLM's name of its kernels for it."""
    if asked is not None and asked.removesuffix("_marlin") != stored:
        stored_as = "the checkpoint is not quantized" if stored is None else f"the checkpoint is stored as {stored}"
        raise ConfigError(
            f"quantization={quoted(asked)}: {stored_as}, and weights are not quantized at load; leave the argument out"
        )


def _resolve_dtype(name: str, of_checkpoint: str) -> torch.dtype:
    resolved = of_checkpoint if name == "auto" else name
    dtype = getattr(torch, resolved, None)
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ConfigError(f"dtype={resolved!r}: must be one of bfloat16, float16, float32")
    assert isinstance(dtype, torch.dtype)
    return dtype


def _load_model(
    config: EngineConfig, network: NetworkConfig, dtype: torch.dtype, device: Device, group: RankGroup | None
) -> tuple[CausalLM, HostLayers | None]:
    """The model on the device, written by the stream that reads it, and its layers in host memory, if it has any."""
    local_size = group.local_size if group is not None else 1
    free = device.free_memory() // (local_size if device.shares_host else 1)
    in_turn: HostLayers | None = None

    def choose(declared: CausalLM) -> HostLayers | None:
        nonlocal in_turn
        in_turn = _host_layers(config, declared, device, free, device.free_host_memory() // local_size)
        return in_turn

    try:
        with device.compute():
            load_format = config.load_format
            seed = config.seed
            where = device.torch_device
            model = load_model(config.model, network, dtype, where, load_format, seed, free, group, choose)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"model={config.model!r}: its weights do not fit into the {gib(device.total_memory())} of the device; "
            "free device memory, lower weights_memory_bytes, or use device='cpu'"
        ) from error
    return model, in_turn


def _host_layers(config: EngineConfig, model: CausalLM, device: Device, free: int, host_free: int) -> HostLayers | None:
    """The layers whose weights stream, if there are any. model: without memory. free, host_free: bytes."""
    sizes = model.network.weights
    total = device.total_memory()
    shared = device.shares_host
    wish = kv_wish(config, model.network)
    other_form = device.torch_device.type != "cpu" and model.build.method is not None
    step = partial(activation_peak, model, config)
    plan = weight_plan(config, sizes, total, free, host_free, shared, step, wish, other_form)
    if not plan.streamed:
        return None
    remedy = "raise weights_memory_bytes, or name a directory on a local disk with weights_dir"
    check_fits("model: the weights that stream take", plan.host_bytes, host_free, "the host has", remedy)
    logger.info(
        "weights: %s on the device, with %d slots of %s for the %d layers that stream; %s in host memory; %s on disk",
        gib(plan.device_bytes),
        plan.num_slots,
        gib(plan.slot_bytes),
        len(plan.streamed),
        gib(plan.host_bytes),
        gib(plan.disk_bytes),
    )
    from nanovllm.features.streamed_weights.host_layers import HostLayers
    from nanovllm.features.streamed_weights.weight_file import WeightFile

    file = None
    if plan.on_disk:
        assert config.weights_dir is not None
        file = WeightFile(config.weights_dir, plan.file_bytes)
    return HostLayers(device, plan, file)


def _stream_weights(device: Device, model: CausalLM, layers: HostLayers | None) -> None:
    if layers is not None:
        from nanovllm.features.streamed_weights.stream import WeightStream

        model.layer_weights = WeightStream(device, layers)


def _faster_prefill(
    config: EngineConfig, model: CausalLM, device: Device, backend: AttentionBackend
) -> AttentionBackend:
    """The backend with a library for whole segments, if one is right for this rank's heads and a step takes a segment.

    On the compute stream, and on the thread of the steps.
    """
    rows = min(config.max_num_batched_tokens, config.max_model_len or model.max_model_len)
    with device.compute():
        faster = faster_prefill(backend, device.torch_device, model.network.unwindowed_heads, model.dtype, rows)
    if faster is not backend:
        logger.info("prefill attention: %s", faster.name)
    return faster


def _keep_batch_invariance(config: EngineConfig, model: CausalLM, backend: AttentionBackend) -> None:
    """Choose the model's matrix products as `batch_invariant` asks, and log whether logits are batch-invariant.

    None and True choose kernels that compute each row independently, where there are any; True raises ConfigError where
    there are none. False chooses torch's products where torch multiplies with AMX, in bf16, which csrc/cpu_linear does
    not use.
    """
    misfit = None
    is_cpu = model.device.type == "cpu"
    if not is_cpu:
        misfit = f"on {model.device.type} the order of a sum depends on the number of rows in a step"
    elif not is_chunk_invariant(backend):
        misfit = (
            f"heads of {model.network.hardest_head_dim} are attended by torch's operator, which sums by the shape of a "
            "chunk, since the engine's kernel takes multiples of 16"
        )
    if config.batch_invariant and misfit is not None:
        raise ConfigError(f"batch_invariant=True: {misfit}; leave it out")
    has_amx = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    in_place = model.layer_weights is None
    if config.batch_invariant is False and in_place and is_cpu and model.dtype == torch.bfloat16 and has_amx():
        model.use_torch_products()
        logger.info("batch_invariant=False: products of many rows are torch's, whose last bits depend on the batch")
    elif misfit is not None:
        logger.info("logits may differ in their last bits between batches: %s", misfit)
    else:
        logger.info("a request's logits do not depend on its batch, to the bit")


def _plan_memory(
    config: EngineConfig,
    model: CausalLM,
    device: Device,
    backend: AttentionBackend,
    group: RankGroup | None,
    host_layers: HostLayers | None = None,
) -> tuple[KVSizing, KVPlan, int]:
    """The sizes that all ranks can allocate: of both tiers, and the blocks of the swap space."""
    network = model.network
    layout = layout_of(config, network)

    def of_graphs() -> int:
        if not _records_graphs(config, model, device):
            return 0
        from nanovllm.features.cuda_graphs import graph_bytes

        return graph_bytes(device, model, backend, config)

    if group is not None:
        group.exchange(None)  # memory is measured when all ranks have loaded their weights
    memory = measure_memory(device, model, backend, config, graph_bytes=of_graphs)
    if group is not None:
        memory = smallest(group.exchange(memory), group.local_size)
    if (asked := asked_mtp(config)) is not None:
        memory = mtp_memory(config, asked, _mtp_network(model)).without(memory)
    memory = without_states(without_adapters(memory, config, network), config, network)
    if group is not None:  # adapters take more on the rank that has most of the model
        memory = smallest(group.exchange(memory), local_size=1)
    without_swap = replace(memory, host_free=memory.host_free - asked_swap_bytes(config))
    weights = None if host_layers is None else host_layers.plan
    sizing = KVSizing(config, layout, network.max_model_len, without_swap, WATERMARK, network.yarn_positions, weights)
    plan = sizing.plan()
    return sizing, plan, plan_swap_space(config, layout, memory, plan)


def _records_graphs(config: EngineConfig, model: CausalLM, device: Device) -> bool:
    """Whether decode steps are recorded."""
    return device.captures and not config.enforce_eager and model.is_recordable


def _adapter_rows(config: EngineConfig, model: CausalLM, device: Device) -> AdapterRows | None:
    if not config.enable_lora:
        return None
    from nanovllm.features.lora.manager import LoRAManager
    from nanovllm.features.lora.rows import AdapterRows

    with device.compute():  # the stream that reads what the manager writes
        return AdapterRows(LoRAManager(model, config))


def _offloaded(
    config: EngineConfig,
    plan: KVPlan,
    engine: OffloadEngine,
    geometry: AttentionGeometry,
    backend: AttentionBackend,
    model: CausalLM,
) -> OffloadedKVCache:
    """The KV cache with two tiers."""
    cpu_attention = None
    if config.cpu_attention and plan.num_cpu_blocks:
        from nanovllm.features.cpu_attention.host_blocks import make_cpu_attention

        cpu_attention = make_cpu_attention(engine, geometry, backend, model.network.layer_weight_bytes(rows=1))
    return OffloadedKVCache(engine, geometry, backend, plan.num_gpu_blocks, cpu_attention)


def _log_sizes(sizing: KVSizing, plan: KVPlan, model: CausalLM, device: Device, kv_dtype: torch.dtype) -> None:
    """Log what the engine holds. All of it is known without running anything."""
    config = sizing.config
    layout = sizing.layout
    mib = 2**20
    device_name, host_name = ("GPU", "CPU") if device.torch_device.type == "cuda" else ("device", "host")
    host_bytes = plan.num_cpu_blocks * layout.block_bytes
    buffer = plan.layerwise_memory.buffer_bytes(layout)
    device_bytes = plan.num_gpu_blocks * layout.block_bytes + buffer
    stored = f" in {dtype_name(kv_dtype)} with scales" if layout.scale_bytes else ""
    windows = f" ({layout.groups})" if any(group.window is not None for group in layout.groups) else ""
    ring = ""
    if plan.split.ring_slots:
        ring_blocks = plan.num_gpu_blocks - plan.split.resident_blocks
        ring = f", {ring_blocks} more as a ring of {plan.split.ring_slots} slots of one layer each, and a layer buffer "
        ring += f"of {buffer / mib:,.1f} MiB"
    for line in (
        f"# {device_name} blocks: {plan.num_gpu_blocks}, # {host_name} blocks: {plan.num_cpu_blocks}; longest prompt: "
        f"{plan.max_model_len} tokens (limit: {sizing.longest_limit(plan)})",
        f"weights {model.network.weight_bytes / mib:,.1f} MiB, "
        f"KV cache {layout.token_bytes} bytes a token{stored}{windows}; "
        f"on the device {plan.split.resident_blocks} resident blocks of {layout.block_size} tokens{ring}, in all "
        f"{device_bytes / mib:,.1f} MiB; on the host {host_bytes / mib:,.1f} MiB",
    ):
        logger.info("%s", line)
    if (states := sizing.memory.states) is not None:
        one = model.network.state_bytes
        row = model.network.draft_row_bytes
        drafts = f"; {states.draft_rows * row / mib:,.1f} MiB for {states.draft_rows} rows with drafts"
        logger.info(
            "%s",
            f"recurrent states of {one / mib:,.2f} MiB: {states.device} slots on the device, {states.host} on the host"
            f"; {states.running} sequences may run at once, the other slots hold snapshots for prefix hits, or states "
            f"from before a step with drafts"
            f"{drafts if states.draft_rows else ''}",
        )
    if config.enable_cpu_offload and plan.num_cpu_blocks == 0 and config.num_cpu_blocks == -1:
        logger.warning(
            "enable_cpu_offload=True moves nothing to the host: the device's %s KV blocks (%s) hold all that "
            'requests can use; to offload, give the device less, such as kv_cache_memory_bytes="10%%"',
            f"{plan.num_gpu_blocks:,}",
            gib(plan.num_gpu_blocks * layout.block_bytes),
        )
