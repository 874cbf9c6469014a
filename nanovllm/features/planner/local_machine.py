"""What `nanovllm plan` learns of this machine, and of steps with packed weights. Needs torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial

import torch

from nanovllm.config import EngineConfig
from nanovllm.data.memory_checks import check_fits
from nanovllm.device import Device, create_device
from nanovllm.features.cuda_graphs import graph_bytes
from nanovllm.features.planner.machine import Rates
from nanovllm.features.planner.measure import Probe, ProbeSizes, measure_rates, random_model
from nanovllm.features.planner.network import Network
from nanovllm.layers.parallel import MetaRanks
from nanovllm.layers.row_limits import CPU_CHUNK_ROWS
from nanovllm.memory.fitting import KVSizing
from nanovllm.memory.profiling import activation_peak, measure_memory
from nanovllm.memory.sizing import MemoryFacts
from nanovllm.models.decoder import Decoder
from nanovllm.models.loader import fill_with_random_weights
from nanovllm.ops import select_backend
from nanovllm.ops.attention import AttentionBackend
from nanovllm.ops.cpu_kernels import cpu_kernel_choice
from nanovllm.ops.kv_quantization import stored_dtype


def counted_peak(network: Network, config: EngineConfig) -> int:
    """The activation peak on a GPU, counted on meta tensors."""
    return activation_peak(_meta_decoder(network), config)


def cpu_kernels_line() -> str:
    """The kernels that an engine on this machine's CPU uses; nothing if the machine has a GPU."""
    return "" if torch.cuda.is_available() else f"  CPU kernels: {cpu_kernel_choice()}\n"


@contextmanager
def local_machine(network: Network) -> Iterator[LocalMachine]:
    with closing(create_device(None)) as device:
        yield LocalMachine(network, device)


class LocalMachine:
    """The memory and the rates of the device that an engine on this machine would choose."""

    def __init__(self, network: Network, device: Device) -> None:
        self._network = network
        self._device = device
        dtype: torch.dtype = getattr(torch, network.dtype)
        stored = stored_dtype(network.kv_cache_dtype, dtype)
        self._dtype = dtype
        self._backend: AttentionBackend = select_backend(device.torch_device, network.spec.head_dim, stored)

    def memory(self, config: EngineConfig) -> MemoryFacts:
        """Memory as it will be after loading the weights. A GPU runs a layer of each kind, the CPU none."""
        network, device = self._network, self._device
        remedy = "take a smaller model or dtype, or plan for another machine with --gpu-mem"
        weights = network.weight_bytes * (network.num_ranks if device.shares_host else 1)
        check_fits("the weights take", weights, device.free_memory(), "the device has", remedy)
        if device.torch_device.type == "cpu":
            model = _meta_decoder(network)
            model.chunk_rows = CPU_CHUNK_ROWS
            return self._measure(model, config, weights)
        spec = network.spec.one_of_each_kind()
        with device.compute():
            model = Decoder(spec, self._dtype, device.torch_device)
            fill_with_random_weights(model, seed=0)
        to_load = network.weight_bytes - Network(spec, network.dtype).weight_bytes
        return self._measure(model, config, to_load)

    def _measure(self, model: Decoder, config: EngineConfig, to_load: int) -> MemoryFacts:
        graphs = partial(graph_bytes, self._device, model, self._backend, config)
        return measure_memory(self._device, model, self._backend, config, to_load, graphs)

    def rates(self, sizing: KVSizing) -> Rates:
        """Those of one rank, measured in a few seconds."""
        network, device, sizes = self._network, self._device, ProbeSizes()
        model = random_model(network.spec, self._dtype, device, sizes)
        ring_slots, block_size = sizing.plan().split.ring_slots, sizing.layout.block_size
        chunk, stored = sizing.config.max_num_batched_tokens, network.kv_cache_dtype
        probe = Probe(device, model, self._backend, block_size, ring_slots, chunk, sizes, stored)
        return _of_a_rank(measure_rates(probe), network.num_ranks, device.shares_host)


def _meta_decoder(network: Network) -> Decoder:
    group = MetaRanks(0, network.num_ranks) if network.num_ranks > 1 else None
    return Decoder(network.spec, getattr(torch, network.dtype), torch.device("meta"), group)


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
