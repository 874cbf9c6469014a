"""The memory that adapters take, known before anything is allocated."""

from __future__ import annotations

from dataclasses import replace

from nanovllm.config import EngineConfig
from nanovllm.data.memory_checks import check_fits
from nanovllm.data.network import Network
from nanovllm.memory.sizing import MemoryFacts

ALIGNMENT = 64  # elements: each matrix of an adapter begins at a multiple of it
LOW_RANK_BYTES = 3 * 4 * 4  # of a row, for each rank: the parts of a layer in the splits of `ops.triton_lora`, in fp32
MOST_PART_ROWS = 8192  # of the parts in which a batch goes through a layer


def aligned(elements: int) -> int:
    return -(-elements // ALIGNMENT) * ALIGNMENT


def most_elements(network: Network, rank: int) -> int:
    """Elements of an adapter that changes every linear layer with this rank: A [rank, in] and B [out, rank] of each."""
    return sum(aligned(rank * size) for module in network.modules.values() for size in module.held)


def without_adapters(memory: MemoryFacts, config: EngineConfig, network: Network) -> MemoryFacts:
    """What is left of the memory besides adapters of the largest size, which are allocated after the KV cache is sized.

    All of it without LoRA. Raises ConfigError if the adapters do not fit.
    """
    if not config.enable_lora:
        return memory
    one = most_elements(network, config.max_lora_rank) * network.itemsize
    on_device = config.max_loras * one
    on_host = config.num_cpu_loras * one
    arguments = f"max_loras={config.max_loras}, max_lora_rank={config.max_lora_rank}"
    remedy = "lower them, or max_cpu_loras"
    taken = on_device + on_host if memory.tiers_share_memory else on_device
    check_fits(f"{arguments}: adapters take", taken, memory.device_free, "the device has", remedy)
    host = f"{arguments}, max_cpu_loras={config.num_cpu_loras}: adapters take"
    check_fits(host, on_host, memory.host_free, "the host has", remedy)
    return replace(
        memory,
        device_free=memory.device_free - taken,
        host_free=memory.host_free - (taken if memory.tiers_share_memory else on_host),
        activation_peak=memory.activation_peak and memory.activation_peak + _working_bytes(config, network),
        adapter_bytes=on_device,
    )


def _working_bytes(config: EngineConfig, network: Network) -> int:
    """Bytes beside those of a step without adapters: of one layer's rows their copy, the products with A and B."""
    rows = min(config.max_num_batched_tokens, MOST_PART_ROWS)
    widest = max(sum(module.held) for module in network.modules.values())
    return rows * (widest * network.itemsize + LOW_RANK_BYTES * config.max_lora_rank)
