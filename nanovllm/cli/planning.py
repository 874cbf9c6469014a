"""The plan of `nanovllm plan`, for this machine or for the one that the flags describe. Needs torch."""

from __future__ import annotations

import argparse
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from nanovllm.cli.arguments import engine_arguments
from nanovllm.config import DTYPE_ALIASES, EngineConfig, engine_config
from nanovllm.device import Device, create_device
from nanovllm.engine.block_manager import WATERMARK
from nanovllm.engine.profiling import (
    check_step_fits,
    layerwise_sizing,
    measure_memory,
    reserve_for_adapters,
    step_bytes,
)
from nanovllm.errors import ConfigError
from nanovllm.kvcache.fitting import KVSizing
from nanovllm.kvcache.sizing import MemoryFacts, smallest
from nanovllm.layers.parallel import MetaRanks
from nanovllm.memory_checks import check_fits
from nanovllm.model_files.gguf_side import is_gguf
from nanovllm.model_files.hub import find_directory
from nanovllm.models.decoder import CPU_CHUNK_ROWS, Decoder
from nanovllm.models.hf_config import read_decoder_spec
from nanovllm.models.loader import fill_with_random_weights
from nanovllm.ops import select_backend, select_cpu_backend
from nanovllm.ops.attention import AttentionBackend
from nanovllm.ops.cpu_kernels import cpu_kernel_choice
from nanovllm.ops.kv_quantization import stored_dtype
from nanovllm.planner.machine import Link, Rates
from nanovllm.planner.measure import Probe, ProbeSizes, measure_rates, random_model
from nanovllm.planner.network import Network
from nanovllm.planner.plan import Plan, make_plan

META = torch.device("meta")


def plan_of(args: argparse.Namespace) -> Plan:
    """The plan that the arguments ask for. Raises ConfigError and ModelError."""
    if not Path(args.model).is_file():  # a config or a GGUF file
        args.model = str(find_directory("model", args.model, content="config"))
    given = engine_arguments(args)
    dtype = given.get("dtype", "auto")
    spec = read_decoder_spec(args.model, given.get("hf_overrides", {}))
    num_ranks = given.get("tensor_parallel_size", 1)
    if num_ranks > 1:
        spec = max(spec.of_ranks(num_ranks), key=lambda part: part.num_weights)
    network = Network.of(spec, DTYPE_ALIASES.get(dtype, dtype), given.get("kv_cache_dtype", "auto"))
    if args.gpu_mem is not None:
        return _plan(args, network, None)
    if args.host_mem is not None:
        raise ConfigError("--host-mem needs --gpu-mem: without it, the plan is for this machine's memory")
    with closing(create_device(None)) as device:
        return _plan(args, network, device)


def cpu_kernels_line(args: argparse.Namespace) -> str:
    """The kernels that an engine on this machine's CPU uses; nothing if the plan is for another device."""
    on_cpu = args.gpu_mem is None and not torch.cuda.is_available()
    return f"  CPU kernels: {cpu_kernel_choice()}\n" if on_cpu else ""


def _plan(args: argparse.Namespace, network: Network, device: Device | None) -> Plan:
    """The plan for `device`, or if it is None, for the machine that the arguments describe."""
    sizing = _choose(args, network, device)
    return make_plan(network, sizing, _rates(args, network, sizing, device))


# ---- memory


def _choose(args: argparse.Namespace, network: Network, device: Device | None) -> KVSizing:
    """With or without offload: as requested, else with it if the prompt does not fit the device."""
    if args.enable_cpu_offload is not None:
        return _sizing(args, network, device, args.enable_cpu_offload)
    if "num_cpu_blocks" in engine_arguments(args):
        return _sizing(args, network, device, offload=True)
    wanted = args.prompt_len + args.output_len if args.prompt_len else network.spec.max_model_len
    resident = _sizing(args, network, device, offload=False)
    held = _longest(resident)
    if held >= min(wanted, network.spec.max_model_len) or (device is None and args.host_mem is None):
        return resident
    offloaded = _sizing(args, network, device, offload=True)
    return resident if held and held > _longest(offloaded) else offloaded


def _longest(sizing: KVSizing) -> int:
    """Tokens of the longest sequence; 0 if the engine would refuse the configuration."""
    try:
        return sizing.plan().max_model_len
    except ConfigError:
        return 0


def _sizing(args: argparse.Namespace, network: Network, device: Device | None, offload: bool) -> KVSizing:
    arguments = engine_arguments(args)
    if not offload and args.enable_cpu_offload is None:
        arguments.pop("cpu_attention", None)  # only applies to offload
    path = Path(args.model)
    is_config = path.is_file() and not is_gguf(path)
    config = engine_config(path.parent if is_config else path, arguments | {"enable_cpu_offload": offload})
    if offload and device is None and args.host_mem is None:
        raise ConfigError("--host-mem is not given, and offloaded KV blocks need it: name it, such as --host-mem 256GB")
    if config.enable_lora and device is None and args.host_mem is None:
        raise ConfigError(
            "--host-mem is not given, and adapters are in host memory too: name it, such as --host-mem 256GB"
        )

    def memory_of(tokens: int) -> MemoryFacts:
        stepped = replace(config, max_num_batched_tokens=tokens)
        if device is None:
            memory = _given_memory(network, stepped, args.gpu_mem, args.host_mem or 0)
        else:
            memory = _this_memory(network, stepped, device)
        return reserve_for_adapters(smallest([memory], network.num_ranks), stepped, network.spec, network.itemsize)

    memory = memory_of(config.max_num_batched_tokens)
    layout = network.layout(network.block_size(config))
    spec = network.spec
    return KVSizing(
        config, layout, spec.max_model_len, memory, WATERMARK, spec.yarn_positions, None if device else memory_of
    )


def _given_memory(network: Network, config: EngineConfig, gpu_mem: int, host_mem: int) -> MemoryFacts:
    weights = network.weight_bytes
    if weights >= gpu_mem:
        raise ConfigError(f"--gpu-mem is {gpu_mem / 1e9:.1f} GB: the weights alone take {weights / 1e9:.1f} GB")
    model = _meta_decoder(network)
    check_step_fits(model, config, gpu_mem - weights)
    return MemoryFacts(
        device_total=gpu_mem,
        device_free=gpu_mem - weights,
        host_free=host_mem,
        tiers_share_memory=False,
        activation_peak=step_bytes(model, config),
        layerwise=layerwise_sizing(model, select_cpu_backend(network.spec.head_dim), config),
    )


def _meta_decoder(network: Network) -> Decoder:
    group = MetaRanks(0, network.num_ranks) if network.num_ranks > 1 else None
    return Decoder(network.spec, getattr(torch, network.dtype), META, group)


def _this_memory(network: Network, config: EngineConfig, device: Device) -> MemoryFacts:
    """Memory as it will be after loading the weights. A GPU runs a layer of each kind, the CPU none."""
    dtype: torch.dtype = getattr(torch, network.dtype)
    remedy = "take a smaller model or dtype, or plan for another machine with --gpu-mem"
    weights = network.weight_bytes * (network.num_ranks if device.shares_host else 1)
    check_fits("the weights take", weights, device.free_memory(), "the device has", remedy)
    backend = _backend(network, device)
    if device.torch_device.type == "cpu":
        model = _meta_decoder(network)
        model.chunk_rows = CPU_CHUNK_ROWS
        return measure_memory(device, model, backend, config, to_load=weights)
    spec = network.spec.one_of_each_kind()
    with device.compute():
        model = Decoder(spec, dtype, device.torch_device)
        fill_with_random_weights(model, seed=0)
    return measure_memory(
        device, model, backend, config, to_load=network.weight_bytes - Network(spec, network.dtype).weight_bytes
    )


# ---- rates


def _rates(args: argparse.Namespace, network: Network, sizing: KVSizing, device: Device | None) -> Rates:
    rates = Rates()
    if device is not None and args.measure:
        rates = _of_a_rank(_measured(network, sizing, device), network.num_ranks, device.shares_host)
    given: dict[str, Any] = {}
    if args.compute is not None:
        given |= {"compute": args.compute, "attention": args.compute}
    if args.device_bandwidth is not None:
        names = ("weight_bandwidth", "head_bandwidth", "device_bandwidth")
        given |= dict.fromkeys(names, args.device_bandwidth)
    if args.host_bandwidth is not None:
        given["host_bandwidth"] = args.host_bandwidth
    if args.link is not None:
        given["link"] = Link(args.link, args.link)
    if args.interconnect is not None:
        given["interconnect"] = args.interconnect
    if args.all_reduce is not None:
        given["all_reduce_seconds"] = args.all_reduce
    if args.layer_overhead is not None:
        given["layer_seconds"] = args.layer_overhead
    return replace(rates, **given)


def _of_a_rank(rates: Rates, num_ranks: int, shares_host: bool) -> Rates:
    """The rates of one rank of this machine, of whose cores and host memory each has its share; a GPU is its own."""
    names = ["host_bandwidth"]
    if shares_host:
        names += ["compute", "attention", "weight_bandwidth", "head_bandwidth", "device_bandwidth"]
    found = {name: getattr(rates, name) for name in names}
    shared = {name: rate / num_ranks for name, rate in found.items() if rate is not None}
    link = rates.link
    if shares_host and link is not None:
        link = replace(link, h2d=link.h2d / num_ranks, d2h=link.d2h / num_ranks)
    return replace(rates, **shared, link=link)


def _measured(network: Network, sizing: KVSizing, device: Device) -> Rates:
    sizes, config = ProbeSizes(), sizing.config
    dtype: torch.dtype = getattr(torch, network.dtype)
    model = random_model(network.spec, dtype, device, sizes)
    backend = _backend(network, device)
    ring_slots, block_size = sizing.plan().split.ring_slots, sizing.layout.block_size
    chunk = config.max_num_batched_tokens
    return measure_rates(Probe(device, model, backend, block_size, ring_slots, chunk, sizes, network.kv_cache_dtype))


def _backend(network: Network, device: Device) -> AttentionBackend:
    stored = stored_dtype(network.kv_cache_dtype, getattr(torch, network.dtype))
    return select_backend(device.torch_device, network.spec.head_dim, stored)
