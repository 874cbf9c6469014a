"""The plan of `nanovllm plan`, for this machine or for the one that the flags describe. Torch only for this one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.config import DTYPE_ALIASES, EngineConfig, engine_config
from nanovllm.engine.block_manager import WATERMARK
from nanovllm.errors import ConfigError
from nanovllm.features.planner.activations import activation_peak
from nanovllm.features.planner.machine import Rates
from nanovllm.features.planner.network import Network
from nanovllm.features.planner.plan import Plan, make_plan
from nanovllm.formats.hub import find_directory, is_gguf
from nanovllm.memory.adapters import without_adapters
from nanovllm.memory.fitting import KVSizing
from nanovllm.memory.layerwise import layerwise_sizing
from nanovllm.memory.layout import layout_of
from nanovllm.memory.sizing import MemoryFacts, smallest
from nanovllm.memory.step_memory import check_step_fits, needs_activation_peak
from nanovllm.models.hf_config import read_decoder_spec

if TYPE_CHECKING:
    from nanovllm.features.planner.local_machine import LocalMachine

HOST_SIZES = ("num_cpu_blocks", "kv_offloading_size")  # engine arguments that only offload has


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What is to be planned.

    model: a config, a model directory, a GGUF file or a hub name. prompt_len: None for the longest that fits.
    enable_cpu_offload: None if the prompt needs it. device_memory, host_memory: bytes; without device_memory the plan
    is for this machine. rates: `Rates` that are given; the others are measured if `measure` is set and the plan is for
    this machine.
    """

    model: str
    engine_arguments: Mapping[str, Any] = field(default_factory=dict)
    prompt_len: int | None = None
    output_len: int = 128
    enable_cpu_offload: bool | None = None
    device_memory: int | None = None
    host_memory: int | None = None
    rates: Mapping[str, Any] = field(default_factory=dict)
    measure: bool = True


def plan_of(asked: PlanRequest) -> Plan:
    """The plan that is asked for. Raises ConfigError and ModelError."""
    if not Path(asked.model).is_file():  # a config or a GGUF file
        asked = replace(asked, model=str(find_directory("model", asked.model, content="config")))
    given = asked.engine_arguments
    dtype = given.get("dtype", "auto")
    spec = read_decoder_spec(asked.model, given.get("hf_overrides", {}))
    num_ranks = given.get("tensor_parallel_size", 1)
    if num_ranks > 1:
        spec = max(spec.of_ranks(num_ranks), key=lambda part: part.num_weights)
    network = Network.of(spec, DTYPE_ALIASES.get(dtype, dtype), given.get("kv_cache_dtype", "auto"))
    if asked.device_memory is not None:
        return _plan(asked, network, None)
    if asked.host_memory is not None:
        raise ConfigError("--host-mem needs --gpu-mem: without it, the plan is for this machine's memory")
    from nanovllm.features.planner.local_machine import local_machine

    with local_machine(network) as machine:
        return _plan(asked, network, machine)


def _plan(asked: PlanRequest, network: Network, machine: LocalMachine | None) -> Plan:
    """The plan for `machine`, or if it is None, for the one that is described."""
    sizing = _choose(asked, network, machine)
    rates = machine.rates(sizing) if machine is not None and asked.measure else Rates()
    return make_plan(network, sizing, replace(rates, **asked.rates))


# ---- memory


def _choose(asked: PlanRequest, network: Network, machine: LocalMachine | None) -> KVSizing:
    """With or without offload: as requested, else with it if the prompt does not fit the device."""
    if asked.enable_cpu_offload is not None:
        return _sizing(asked, network, machine, asked.enable_cpu_offload)
    if any(name in asked.engine_arguments for name in HOST_SIZES):
        return _sizing(asked, network, machine, offload=True)
    wanted = asked.prompt_len + asked.output_len if asked.prompt_len else network.spec.max_model_len
    resident = _sizing(asked, network, machine, offload=False)
    held = _longest(resident)
    if held >= min(wanted, network.spec.max_model_len) or (machine is None and asked.host_memory is None):
        return resident
    offloaded = _sizing(asked, network, machine, offload=True)
    return resident if held and held > _longest(offloaded) else offloaded


def _longest(sizing: KVSizing) -> int:
    """Tokens of the longest sequence; 0 if the engine would refuse the configuration."""
    try:
        return sizing.plan().max_model_len
    except ConfigError:
        return 0


def _sizing(asked: PlanRequest, network: Network, machine: LocalMachine | None, offload: bool) -> KVSizing:
    arguments = dict(asked.engine_arguments)
    if not offload and asked.enable_cpu_offload is None:
        arguments.pop("cpu_attention", None)  # only applies to offload
    path = Path(asked.model)
    is_config = path.is_file() and not is_gguf(path)
    config = engine_config(path.parent if is_config else path, arguments | {"enable_cpu_offload": offload})
    if offload and machine is None and asked.host_memory is None:
        raise ConfigError("--host-mem is not given, and offloaded KV blocks need it: name it, such as --host-mem 256GB")
    if config.enable_lora and machine is None and asked.host_memory is None:
        raise ConfigError(
            "--host-mem is not given, and adapters are in host memory too: name it, such as --host-mem 256GB"
        )

    def memory_of(config: EngineConfig) -> MemoryFacts:
        if machine is None:
            memory = _given_memory(network, config, asked.device_memory or 0, asked.host_memory or 0)
        else:
            memory = machine.memory(config)
        return without_adapters(smallest([memory], network.num_ranks), config, network.spec, network.itemsize)

    memory = memory_of(config)
    spec = network.spec
    layout = layout_of(config, spec, network.itemsize)
    return KVSizing(
        config, layout, spec.max_model_len, memory, WATERMARK, spec.yarn_positions, None if machine else memory_of
    )


def _given_memory(network: Network, config: EngineConfig, gpu_mem: int, host_mem: int) -> MemoryFacts:
    weights = network.weight_bytes
    if weights >= gpu_mem:
        raise ConfigError(f"--gpu-mem is {gpu_mem / 1e9:.1f} GB: the weights alone take {weights / 1e9:.1f} GB")
    spec, itemsize = network.spec, network.itemsize
    check_step_fits(spec, itemsize, config, gpu_mem - weights)
    return MemoryFacts(
        device_total=gpu_mem,
        device_free=gpu_mem - weights,
        host_free=host_mem,
        tiers_share_memory=False,
        activation_peak=_activation_peak(network, config) if needs_activation_peak(config) else 0,
        layerwise=layerwise_sizing(spec, itemsize, config),
    )


def _activation_peak(network: Network, config: EngineConfig) -> int:
    if network.spec.quantization is not None:  # the module of its format has imported torch already
        from nanovllm.features.planner.local_machine import counted_peak

        return counted_peak(network, config)
    sizes = config.max_num_batched_tokens, config.max_num_seqs, config.max_logprobs
    return activation_peak(network.spec, network.itemsize, *sizes)
