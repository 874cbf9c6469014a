"""From what is asked to a plan: network, arguments, and the memory of this machine or of one that is described."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

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
from nanovllm.memory.shares import kv_wish, with_device_bytes
from nanovllm.memory.sizing import MemoryFacts, NoMemoryError, check_step_fits, needs_activation_peak, smallest
from nanovllm.memory.states import without_states
from nanovllm.memory.weights import WeightPlan, weight_plan
from nanovllm.rules import share_of

if TYPE_CHECKING:  # imports torch
    from nanovllm.layers.causal_lm import CausalLM

OF_STREAMED_WEIGHTS = ("host_weights_bytes", "weights_dir")  # engine arguments that need weights to stream
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
    """The plan that is asked for. Raises NoMemoryError if the memory is too small, other ConfigErrors, ModelError."""
    if asked.device_memory is None and asked.host_memory is not None:
        raise ConfigError("--host-mem needs --gpu-mem: without it, the plan is for this machine's memory")
    if not Path(asked.model).is_file():
        asked = replace(asked, model=str(find_directory("model", asked.model, content="config")))
    offload = asked.enable_cpu_offload
    if offload is None and any(name in asked.engine_arguments for name in HOST_SIZES):
        offload = True
    may_offload = offload is None and (asked.device_memory is None or asked.host_memory is not None)
    part = _LargestPart(_config(asked, bool(offload)), asked.model)
    try:
        plan = _plan(asked, bool(offload), part)
    except NoMemoryError:
        if not may_offload:
            raise
        return _plan(asked, True, part)
    if not may_offload:
        return plan
    wanted = asked.prompt_len + asked.output_len if asked.prompt_len else plan.sizing.model_max_len
    if plan.kv.max_model_len >= min(wanted, plan.sizing.model_max_len):
        return plan
    offloaded = _plan(asked, True, part)
    return offloaded if offloaded.kv.max_model_len >= plan.kv.max_model_len else plan


def _plan(asked: PlanRequest, offload: bool, part: _LargestPart) -> Plan:
    config = _config(asked, offload)
    network = part.model.network
    machine = _this_machine(part.model, config) if asked.device_memory is None else _given_machine(asked, config)
    weights = _where_weights_lie(part, config, machine)
    config = with_device_bytes(config, network)
    memory = _facts(part, config, machine, weights)
    memory = without_adapters(smallest([memory], network.num_ranks), config, network)
    memory = without_states(memory, config, network)
    layout = layout_of(config, network)
    sizing = KVSizing(config, layout, network.max_model_len, memory, WATERMARK, network.yarn_positions, weights)
    return Plan(network, sizing, asked.rates, sizing.plan())


class _LargestPart:
    """The model without memory; of several ranks the part with the most weights. The same with and without offload."""

    def __init__(self, config: EngineConfig, path: str) -> None:
        from nanovllm.models.hf_config import read_network_config  # imports torch

        self._config = config
        described = read_network_config(path, config.hf_overrides)
        dtype = None if config.dtype == "auto" else config.dtype
        ranks = config.tensor_parallel_size
        parts = [described.on_meta(dtype, rank, ranks) for rank in range(ranks)]
        self.model: CausalLM = max(parts, key=lambda part: part.network.num_weights)

    @cached_property
    def step_bytes(self) -> int:
        """What the network's operators allocate in the largest step, on a GPU."""
        from nanovllm.memory.profiling import activation_peak

        return activation_peak(self.model, self._config)


def _config(asked: PlanRequest, offload: bool) -> EngineConfig:
    arguments = dict(asked.engine_arguments)
    if not offload and asked.enable_cpu_offload is None:
        arguments.pop("cpu_attention", None)  # only applies to offload
        if arguments.get("weights_memory_bytes") is None:  # nothing streams
            arguments = {name: value for name, value in arguments.items() if name not in OF_STREAMED_WEIGHTS}
    if asked.prompt_len and (given := arguments.get("kv_cache_memory_bytes")) is not None:
        arguments["kv_cache_memory_bytes"] = share_of(given, asked.prompt_len + asked.output_len)
    path = Path(asked.model)
    is_config = path.is_file() and not is_gguf(path)
    return engine_config(path.parent if is_config else path, arguments | {"enable_cpu_offload": offload})


class Machine(NamedTuple):
    """The memory of a machine before the weights are loaded, in bytes."""

    device_total: int
    device_free: int
    host_free: int
    is_shared: bool = False  # device and host are the same memory
    is_chunk_invariant: bool = True  # whether the bits of its attention do not depend on the chunks


def _given_machine(asked: PlanRequest, config: EngineConfig) -> Machine:
    """The machine that is described."""
    if asked.host_memory is None and (config.enable_cpu_offload or config.enable_lora):
        needed = "offloaded KV blocks need it" if config.enable_cpu_offload else "adapters are in host memory too"
        raise _no_host_memory(needed)
    return Machine(asked.device_memory or 0, asked.device_memory or 0, asked.host_memory or 0)


def _no_host_memory(needed: str) -> ConfigError:
    return ConfigError(f"--host-mem is not given, and {needed}: name it, such as --host-mem 256GB")


def _this_machine(model: CausalLM, config: EngineConfig) -> Machine:
    """This machine, with the device that an engine would choose."""
    from nanovllm.device import create_device
    from nanovllm.ops import is_chunk_invariant, select_backend
    from nanovllm.ops.kv_quantization import stored_dtype

    stored = stored_dtype(config.kv_cache_dtype, model.dtype)
    with closing(create_device(None)) as device:
        backend = select_backend(device.torch_device, model.network.hardest_head_dim, stored)
        return Machine(
            device.total_memory(),
            device.free_memory(),
            device.free_host_memory(),
            device.shares_host,
            is_chunk_invariant(backend),
        )


def _where_weights_lie(part: _LargestPart, config: EngineConfig, machine: Machine) -> WeightPlan:
    """As an engine decides it. Raises NoMemoryError if they do not fit."""
    sizes = part.model.network.weights
    ranks = part.model.network.num_ranks
    free = machine.device_free // (ranks if machine.is_shared else 1)
    host_free = machine.host_free // ranks
    shared = machine.is_shared
    wish = kv_wish(config, part.model.network)
    other_form = not shared and part.model.build.method is not None
    step = lambda: part.step_bytes  # noqa: E731 # counted if it is asked for
    plan = weight_plan(config, sizes, machine.device_total, free, host_free, shared, step, wish, other_form)
    if plan.streamed and not machine.host_free:
        raise _no_host_memory("weights that stream need it")
    if plan.device_bytes >= free:
        what = f"what stays of {show_bytes(sizes.num_bytes)} of weights takes" if plan.streamed else "the weights take"
        streams = machine.is_shared or plan.streamed
        raise NoMemoryError(
            f"{what} {show_bytes(plan.device_bytes)}, and the device has {show_bytes(free)}: a checkpoint with "
            "quantized weights, a larger card or a larger tensor_parallel_size takes less of it"
            + ("" if streams else ", and with --host-mem and --enable-cpu-offload layers stream from host memory")
        )
    if plan.host_bytes > host_free:
        raise NoMemoryError(
            f"{show_bytes(plan.host_bytes)} of the weights' {show_bytes(sizes.num_bytes)} have to be in host memory, "
            f"of which {show_bytes(host_free)} are free: take a larger host or card, a checkpoint with quantized "
            "weights or a larger tensor_parallel_size"
            + ("" if plan.on_disk else ", or let the rest be on a local disk with --weights-dir")
        )
    return plan


def _facts(part: _LargestPart, config: EngineConfig, machine: Machine, weights: WeightPlan) -> MemoryFacts:
    """The memory of the machine once the weights are where they lie."""
    network = part.model.network
    ranks = network.num_ranks
    on_host = weights.host_bytes * ranks
    on_device = weights.device_bytes
    if machine.is_shared:
        on_host = on_device = on_host + on_device * ranks
    free = machine.device_free - on_device
    try:
        check_step_fits(network, config, free)
    except ConfigError as error:
        raise NoMemoryError(str(error)) from None
    return MemoryFacts(
        device_total=machine.device_total,
        device_free=free,
        host_free=machine.host_free - on_host,
        tiers_share_memory=machine.is_shared,
        activation_peak=_step_bytes(part, config, machine.is_shared) if needs_activation_peak(config) else 0,
        layerwise_token_bytes=layerwise_token_bytes(network, config) if machine.is_chunk_invariant else 0,
        streamed_bytes=weights.streamed_bytes,
    )


def _step_bytes(part: _LargestPart, config: EngineConfig, on_cpu: bool) -> int:
    """Bytes of the largest step: what the network's operators allocate, and on a GPU the scratch of a product with
    quantized weights."""
    from nanovllm.layers.row_limits import CPU_CHUNK_ROWS
    from nanovllm.memory.profiling import activation_peak
    from nanovllm.ops.dequantized_product import SCRATCH_BYTES

    if on_cpu:
        part.model.chunk_rows = CPU_CHUNK_ROWS
        return activation_peak(part.model, config)
    return part.step_bytes + (0 if part.model.network.quantization is None else SCRATCH_BYTES)
