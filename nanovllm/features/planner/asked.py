"""From what is asked to a plan: network, arguments, and the memory of this machine or of one that is described."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.config import EngineConfig, engine_config
from nanovllm.engine.block_manager import WATERMARK
from nanovllm.errors import ConfigError
from nanovllm.features.planner.plan import Plan
from nanovllm.features.planner.predict import Rates
from nanovllm.features.planner.units import show_bytes
from nanovllm.formats.hub import find_directory, is_gguf
from nanovllm.memory.adapters import without_adapters
from nanovllm.memory.fitting import KVSizing
from nanovllm.memory.layerwise import layerwise_token_bytes
from nanovllm.memory.layout import layout_of
from nanovllm.memory.shares import with_device_bytes
from nanovllm.memory.sizing import MemoryFacts, NoMemoryError, check_step_fits, needs_activation_peak, smallest
from nanovllm.memory.states import without_states
from nanovllm.rules import share_of

if TYPE_CHECKING:  # imports torch
    from nanovllm.layers.causal_lm import CausalLM

HOST_SIZES = ("num_cpu_blocks", "kv_offloading_size")  # engine arguments that only offload has


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What is to be planned."""

    model: str  # a config, a model directory, a GGUF file or a hub name
    engine_arguments: Mapping[str, Any] = field(default_factory=dict)
    prompt_len: int | None = None  # tokens; None: the longest that fits
    output_len: int = 128  # tokens
    enable_cpu_offload: bool | None = None  # None: if the prompt needs it
    device_memory: int | None = None  # bytes; None: the plan is for this machine
    host_memory: int | None = None  # bytes
    rates: Rates = field(default_factory=Rates)


def plan_of(asked: PlanRequest) -> Plan:
    """The plan that is asked for. Raises NoMemoryError if the device is too small, other ConfigErrors, ModelError."""
    if asked.device_memory is None and asked.host_memory is not None:
        raise ConfigError("--host-mem needs --gpu-mem: without it, the plan is for this machine's memory")
    if not Path(asked.model).is_file():
        asked = replace(asked, model=str(find_directory("model", asked.model, content="config")))
    offload = asked.enable_cpu_offload
    if offload is None and any(name in asked.engine_arguments for name in HOST_SIZES):
        offload = True
    plan = _plan(asked, bool(offload))
    if offload is not None or (asked.device_memory is not None and asked.host_memory is None):
        return plan
    wanted = asked.prompt_len + asked.output_len if asked.prompt_len else plan.sizing.model_max_len
    if plan.kv.max_model_len >= min(wanted, plan.sizing.model_max_len):
        return plan
    offloaded = _plan(asked, True)
    return offloaded if offloaded.kv.max_model_len >= plan.kv.max_model_len else plan


def _plan(asked: PlanRequest, offload: bool) -> Plan:
    config = _config(asked, offload)
    model = _largest_part(config, asked.model)
    network = model.network
    config = with_device_bytes(config, network)
    memory = _memory_here(model, config) if asked.device_memory is None else _memory_given(asked, model, config)
    memory = without_adapters(smallest([memory], network.num_ranks), config, network)
    memory = without_states(memory, config, network)
    layout = layout_of(config, network)
    sizing = KVSizing(config, layout, network.max_model_len, memory, WATERMARK, network.yarn_positions)
    return Plan(network, sizing, asked.rates, sizing.plan())


def _largest_part(config: EngineConfig, path: str) -> CausalLM:
    """The model without memory; of several ranks the part with the most weights."""
    from nanovllm.models.hf_config import read_network_config  # imports torch

    described = read_network_config(path, config.hf_overrides)
    dtype = None if config.dtype == "auto" else config.dtype
    ranks = config.tensor_parallel_size
    parts = [described.on_meta(dtype, rank, ranks) for rank in range(ranks)]
    return max(parts, key=lambda part: part.network.num_weights)


def _config(asked: PlanRequest, offload: bool) -> EngineConfig:
    arguments = dict(asked.engine_arguments)
    if not offload and asked.enable_cpu_offload is None:
        arguments.pop("cpu_attention", None)  # only applies to offload
    if asked.prompt_len and (given := arguments.get("kv_cache_memory_bytes")) is not None:
        arguments["kv_cache_memory_bytes"] = share_of(given, asked.prompt_len + asked.output_len)
    path = Path(asked.model)
    is_config = path.is_file() and not is_gguf(path)
    return engine_config(path.parent if is_config else path, arguments | {"enable_cpu_offload": offload})


def _memory_given(asked: PlanRequest, model: CausalLM, config: EngineConfig) -> MemoryFacts:
    """The memory of the machine that is described, once its device holds the weights."""
    if asked.host_memory is None and (config.enable_cpu_offload or config.enable_lora):
        needed = "offloaded KV blocks need it" if config.enable_cpu_offload else "adapters are in host memory too"
        raise ConfigError(f"--host-mem is not given, and {needed}: name it, such as --host-mem 256GB")
    return _facts(model, config, asked.device_memory or 0, asked.device_memory or 0, asked.host_memory or 0)


def _memory_here(model: CausalLM, config: EngineConfig) -> MemoryFacts:
    """The memory of the device that an engine on this machine would choose, once it holds the weights."""
    from nanovllm.device import create_device
    from nanovllm.ops import is_chunk_invariant, select_backend
    from nanovllm.ops.kv_quantization import stored_dtype

    stored = stored_dtype(config.kv_cache_dtype, model.dtype)
    with closing(create_device(None)) as device:
        backend = select_backend(device.torch_device, model.network.hardest_head_dim, stored)
        total = device.total_memory()
        free = device.free_memory()
        facts = _facts(model, config, total, free, device.free_host_memory(), device.shares_host)
    return facts if is_chunk_invariant(backend) else replace(facts, layerwise_token_bytes=0)


def _facts(
    model: CausalLM, config: EngineConfig, total: int, free: int, host_free: int, shared: bool = False
) -> MemoryFacts:
    """total, free: bytes of the device; host_free: of the host; shared: whether they are the same memory."""
    network = model.network
    weights = network.weight_bytes * (network.num_ranks if shared else 1)
    if weights >= free:
        raise NoMemoryError(
            f"the weights take {show_bytes(weights)}, and the device has {show_bytes(free)}: a checkpoint with "
            "quantized weights, a larger card or a larger tensor_parallel_size takes less of it"
        )
    try:
        check_step_fits(network, config, free - weights)
    except ConfigError as error:
        raise NoMemoryError(str(error)) from None
    return MemoryFacts(
        device_total=total,
        device_free=free - weights,
        host_free=host_free - weights if shared else host_free,
        tiers_share_memory=shared,
        activation_peak=_step_bytes(model, config, shared) if needs_activation_peak(config) else 0,
        layerwise_token_bytes=layerwise_token_bytes(network, config),
    )


def _step_bytes(model: CausalLM, config: EngineConfig, on_cpu: bool) -> int:
    """Bytes of the largest step: what the network's operators allocate, and on a GPU the scratch of a product with
    quantized weights."""
    from nanovllm.layers.row_limits import CPU_CHUNK_ROWS
    from nanovllm.memory.profiling import activation_peak
    from nanovllm.ops.dequantized_product import SCRATCH_BYTES

    if on_cpu:
        model.chunk_rows = CPU_CHUNK_ROWS
        return activation_peak(model, config)
    scratch = 0 if model.network.quantization is None else SCRATCH_BYTES
    return activation_peak(model, config) + scratch
