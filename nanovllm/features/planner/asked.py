"""From what is asked to a plan: network, arguments, and the memory of this machine or of one that is described."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.config import EngineConfig, engine_config
from nanovllm.engine.block_manager import WATERMARK
from nanovllm.errors import ConfigError
from nanovllm.features.planner.drafts import ACCEPTANCE, draft_network
from nanovllm.features.planner.network import Network
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
from nanovllm.models.hf_config import read_decoder_spec
from nanovllm.models.spec import DecoderSpec
from nanovllm.rules import share_of

if TYPE_CHECKING:
    from nanovllm.features.planner.measure import LocalMachine

HOST_SIZES = ("num_cpu_blocks", "kv_offloading_size")  # engine arguments that only offload has


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What is to be planned.

    model: a config, a model directory, a GGUF file or a hub name. prompt_len: None for the longest that fits.
    enable_cpu_offload: None if the prompt needs it. device_memory, host_memory: bytes; without device_memory the plan
    is for this machine. rates: `Rates` that are given; the others are measured if `measure` is set and the plan is for
    this machine. acceptance: the share of right drafts that speculative decoding is planned with. positions: as if the
    model's positions reached so far. four_bits: as if the checkpoint's matrices were stored in 4 bits.
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
    acceptance: float = ACCEPTANCE
    positions: int | None = None
    four_bits: bool = False


def plan_of(asked: PlanRequest) -> Plan:
    """The plan that is asked for. Raises NoMemoryError if the device is too small, other ConfigErrors, ModelError."""
    asked = with_directory(asked)
    offload = asked.enable_cpu_offload
    if offload is None and any(name in asked.engine_arguments for name in HOST_SIZES):
        offload = True
    config = _config(asked, bool(offload))
    spec = spec_of(asked, config.hf_overrides)
    if config.tensor_parallel_size > 1:
        spec = max(spec.of_ranks(config.tensor_parallel_size), key=lambda part: part.num_weights)
    network = Network(spec, spec.dtype if config.dtype == "auto" else config.dtype, config.kv_cache_dtype)
    if asked.device_memory is not None:
        return _plan(asked, network, config, None)
    if asked.host_memory is not None:
        raise ConfigError("--host-mem needs --gpu-mem: without it, the plan is for this machine's memory")
    from nanovllm.features.planner.measure import local_machine

    with local_machine(network) as machine:
        return _plan(asked, network, config, machine)


def with_directory(asked: PlanRequest) -> PlanRequest:
    """The request with a file or a directory as its model, and no hub name. Raises ModelError if there is none."""
    if Path(asked.model).is_file():  # a config or a GGUF file
        return asked
    return replace(asked, model=str(find_directory("model", asked.model, content="config")))


def spec_of(asked: PlanRequest, overrides: Mapping[str, Any]) -> DecoderSpec:
    """The network that is planned. overrides: `hf_overrides` of the engine."""
    spec = read_decoder_spec(asked.model, overrides)
    if asked.positions is not None:
        spec = replace(spec, max_position_embeddings=asked.positions)
    return in_four_bits(spec) if asked.four_bits else spec


def in_four_bits(spec: DecoderSpec) -> DecoderSpec:
    """The network as AWQ stores it: the layers' matrices in 4 bits, in groups of 128; not embedding and output."""
    if spec.quantization is not None:
        return spec
    from nanovllm.formats.quantization import read_quantization  # imports torch

    form = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
    return replace(spec, quantization=read_quantization(form, spec.dtype))


def _config(asked: PlanRequest, offload: bool) -> EngineConfig:
    arguments = dict(asked.engine_arguments)
    if not offload and asked.enable_cpu_offload is None:
        arguments.pop("cpu_attention", None)  # only applies to offload
    if asked.prompt_len and (given := arguments.get("kv_cache_memory_bytes")) is not None:
        arguments["kv_cache_memory_bytes"] = share_of(given, asked.prompt_len + asked.output_len)
    path = Path(asked.model)
    is_config = path.is_file() and not is_gguf(path)
    return engine_config(path.parent if is_config else path, arguments | {"enable_cpu_offload": offload})


def _plan(asked: PlanRequest, network: Network, config: EngineConfig, machine: LocalMachine | None) -> Plan:
    """The plan for `machine`, or if it is None, for the one that is described.

    Where nothing says whether to offload, it is planned if the prompt does not fit the device.
    """
    sizing = _sizing(asked, network, config, machine)
    known = asked.enable_cpu_offload is not None or config.enable_cpu_offload
    if not known and (machine is not None or asked.host_memory is not None):
        wanted = asked.prompt_len + asked.output_len if asked.prompt_len else network.spec.max_model_len
        held = _longest(sizing)
        if held < min(wanted, network.spec.max_model_len):
            offloaded = _sizing(asked, network, _config(asked, offload=True), machine)
            sizing = sizing if held and held > _longest(offloaded) else offloaded
    rates = machine.rates(sizing) if machine is not None and asked.measure else Rates()
    draft = draft_network(config, network.spec)
    return Plan(network, sizing, replace(rates, **asked.rates), sizing.plan(), draft, asked.acceptance)


def _longest(sizing: KVSizing) -> int:
    """Tokens of the longest sequence; 0 if the engine would refuse the configuration."""
    try:
        return sizing.plan().max_model_len
    except ConfigError:
        return 0


def _sizing(asked: PlanRequest, network: Network, config: EngineConfig, machine: LocalMachine | None) -> KVSizing:
    if machine is None and asked.host_memory is None:
        needed = "offloaded KV blocks need it" if config.enable_cpu_offload else "adapters are in host memory too"
        if config.enable_cpu_offload or config.enable_lora:
            raise ConfigError(f"--host-mem is not given, and {needed}: name it, such as --host-mem 256GB")
    spec = network.spec
    itemsize = network.itemsize
    config = with_device_bytes(config, spec, itemsize)

    def left(facts: MemoryFacts, config: EngineConfig) -> MemoryFacts:
        """What is left besides all that is allocated before KV blocks are."""
        if (draft := draft_network(config, spec)) is not None:
            facts = draft.memory.without(facts)
        facts = without_adapters(smallest([facts], network.num_ranks), config, spec, itemsize)
        return without_states(facts, config, spec, itemsize)

    facts = _given_memory(asked, network, config) if machine is None else machine.memory(config)
    sizing = KVSizing(
        config,
        layout_of(config, spec, itemsize),
        spec.max_model_len,
        left(facts, config),
        WATERMARK,
        spec.yarn_positions,
    )
    if machine is not None:
        return sizing

    def host_left(host_memory: int) -> int:
        try:
            return left(replace(facts, host_free=host_memory), config).host_free
        except ConfigError:  # it does not hold the adapters
            return 0

    def memory_of(config: EngineConfig) -> MemoryFacts:
        return left(_given_memory(asked, network, config), config)

    return replace(sizing, memory_of=memory_of, host_left=host_left)


def _given_memory(asked: PlanRequest, network: Network, config: EngineConfig) -> MemoryFacts:
    from nanovllm.features.planner.measure import activation_peak_on_gpu

    weights = network.weight_bytes
    gpu_mem = asked.device_memory or 0
    if weights >= gpu_mem:
        raise NoMemoryError(f"the weights take {show_bytes(weights)}, and the device has {show_bytes(gpu_mem)}")
    try:
        check_step_fits(network.spec, network.itemsize, config, gpu_mem - weights)
    except ConfigError as error:
        raise NoMemoryError(str(error)) from None
    return MemoryFacts(
        device_total=gpu_mem,
        device_free=gpu_mem - weights,
        host_free=asked.host_memory or 0,
        tiers_share_memory=False,
        activation_peak=activation_peak_on_gpu(network, config) if needs_activation_peak(config) else 0,
        layerwise_token_bytes=layerwise_token_bytes(network.spec, network.itemsize, config),
    )
