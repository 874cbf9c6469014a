"""The memory that adapters take, known before anything is allocated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from nanovllm.config import EngineConfig
from nanovllm.data.memory_checks import check_fits
from nanovllm.memory.sizing import MemoryFacts
from nanovllm.models.spec import DecoderSpec

ALIGNMENT = 64  # elements: each matrix of an adapter begins at a multiple of it
LOW_RANK_BYTES = 3 * 4 * 4  # of a row, for each rank: the parts of a layer in the splits of `ops.triton_lora`, in fp32
MOST_PART_ROWS = 8192  # of the parts in which a batch goes through a layer


def modules_of(spec: DecoderSpec) -> Mapping[str, tuple[int, int]]:
    """The modules that an adapter may change: the name and (out, in) of every linear layer, without experts."""
    return {module: (out_size, in_size) for module, out_size, in_size in spec.projections()}


def aligned(elements: int) -> int:
    return -(-elements // ALIGNMENT) * ALIGNMENT


def most_elements(spec: DecoderSpec, rank: int) -> int:
    """Elements of an adapter that changes every linear layer with this rank: A [rank, in] and B [out, rank] of each."""
    return sum(aligned(rank * out_size) + aligned(rank * in_size) for out_size, in_size in modules_of(spec).values())


def without_adapters(memory: MemoryFacts, config: EngineConfig, spec: DecoderSpec, itemsize: int) -> MemoryFacts:
    """What is left of the memory besides adapters of the largest size, which are allocated after the KV cache is sized.

    All of it without LoRA. itemsize: bytes of an element. Raises ConfigError if the adapters do not fit.
    """
    if not config.enable_lora:
        return memory
    one = most_elements(spec, config.max_lora_rank) * itemsize
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
        activation_peak=memory.activation_peak and memory.activation_peak + _working_bytes(config, spec, itemsize),
        adapter_bytes=on_device,
    )


def _working_bytes(config: EngineConfig, spec: DecoderSpec, itemsize: int) -> int:
    """Bytes beside those of a step without adapters: of one layer's rows their copy, the products with A and B."""
    rows = min(config.max_num_batched_tokens, MOST_PART_ROWS)
    widest = max(out_size + in_size for out_size, in_size in modules_of(spec).values())
    return rows * (widest * itemsize + LOW_RANK_BYTES * config.max_lora_rank)
