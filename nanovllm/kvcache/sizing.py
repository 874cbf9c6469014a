"""How many KV blocks each tier gets, and the longest sequence that they hold."""

from __future__ import annotations

from dataclasses import dataclass

from nanovllm.config import MIN_GPU_BLOCKS, EngineConfig
from nanovllm.errors import ConfigError
from nanovllm.kvcache.budget import DeviceSplit, split_device
from nanovllm.kvcache.layout import KVLayout


@dataclass(frozen=True, slots=True)
class MemoryFacts:
    """Bytes, as they stand with the weights loaded and before any KV memory is allocated."""

    device_total: int
    device_free: int
    host_free: int
    tiers_share_memory: bool  # on the CPU, "device" and host are the same memory
    activation_peak: int  # of the largest batch; 0 when nothing had to be sized from memory


@dataclass(frozen=True, slots=True)
class KVPlan:
    """What is allocated. Without offload every device block is resident and there is no ring."""

    num_gpu_blocks: int
    num_cpu_blocks: int
    split: DeviceSplit
    max_model_len: int

    @property
    def num_sequence_blocks(self) -> int:
        """Blocks that sequences can hold, on both tiers."""
        return self.split.resident_blocks + self.num_cpu_blocks


class CacheTooSmallError(ConfigError):
    """The blocks of `plan` hold no sequence of the length that was asked for."""

    def __init__(self, message: str, plan: KVPlan) -> None:
        super().__init__(message)
        self.plan = plan


def plan_kv_cache(
    config: EngineConfig, layout: KVLayout, model_max_len: int, memory: MemoryFacts, watermark: float
) -> KVPlan:
    """Size both tiers. Raises ConfigError, with numbers, when that cannot be done; see `fitting` for the way out."""
    wanted_len = config.max_model_len or model_max_len
    if wanted_len > model_max_len:
        raise ConfigError(
            f"max_model_len={wanted_len}: the model's positions end at {model_max_len}; lower max_model_len to that, "
            "or give the model a RoPE scaling that reaches further"
        )
    # More blocks than max_num_seqs sequences of full length can use would only take memory from others.
    useful = int(config.max_num_seqs * -(-wanted_len // layout.block_size) * (1 + 2 * watermark)) + 1
    num_gpu_blocks = _device_blocks(config, layout, memory, useful)
    if config.enable_cpu_offload:
        split = split_device(num_gpu_blocks, layout.num_layers)
        num_cpu_blocks = _host_blocks(config, layout, memory, num_gpu_blocks, max(useful - split.resident_blocks, 0))
    else:
        split, num_cpu_blocks = DeviceSplit(ring_slots=0, resident_blocks=num_gpu_blocks), 0
    capacity = longest_sequence(split.resident_blocks + num_cpu_blocks, layout.block_size, watermark)
    plan = KVPlan(num_gpu_blocks, num_cpu_blocks, split, min(wanted_len, capacity))
    _check_capacity(config, layout, plan)
    return plan


def longest_sequence(num_blocks: int, block_size: int, watermark: float) -> int:
    """Tokens of the longest sequence that so many blocks admit, of which the share `watermark` stays free."""
    return (num_blocks - int(watermark * num_blocks)) * block_size


def _device_blocks(config: EngineConfig, layout: KVLayout, memory: MemoryFacts, useful: int) -> int:
    """blocks = (total * gpu_memory_utilization - peak) // bytes per block; peak: what is held, plus activations."""
    if config.num_gpu_blocks != -1:
        _check_fits("num_gpu_blocks", config.num_gpu_blocks, layout, memory.device_free, "the device has")
        return config.num_gpu_blocks
    held = memory.device_total - memory.device_free
    budget = int(memory.device_total * config.gpu_memory_utilization) - held - memory.activation_peak
    if memory.tiers_share_memory and config.enable_cpu_offload:
        budget //= 2
    blocks = min(budget // layout.block_bytes, useful + MIN_GPU_BLOCKS)
    if blocks < MIN_GPU_BLOCKS:
        raise ConfigError(
            f"no memory for the KV cache: of {gib(memory.device_total)} at gpu_memory_utilization="
            f"{config.gpu_memory_utilization}, {gib(held)} are taken and a step needs {gib(memory.activation_peak)}, "
            f"which leaves {gib(max(budget, 0))} for blocks of {gib(layout.block_bytes)}; raise "
            "gpu_memory_utilization, or lower max_num_batched_tokens or kvcache_block_size"
        )
    return blocks


def _host_blocks(config: EngineConfig, layout: KVLayout, memory: MemoryFacts, num_gpu_blocks: int, useful: int) -> int:
    free = memory.host_free
    if memory.tiers_share_memory:
        free -= num_gpu_blocks * layout.block_bytes + memory.activation_peak
    if config.num_cpu_blocks != -1:
        _check_fits("num_cpu_blocks", config.num_cpu_blocks, layout, free, "the host has")
        return config.num_cpu_blocks
    return max(0, min(int(free * config.gpu_memory_utilization) // layout.block_bytes, useful))


def _check_fits(name: str, blocks: int, layout: KVLayout, free: int, where: str) -> None:
    if blocks * layout.block_bytes > free:
        raise ConfigError(
            f"{name}={blocks}: that is {gib(blocks * layout.block_bytes)} of KV cache and {where} {gib(free)} free; "
            f"at most {max(free, 0) // layout.block_bytes} blocks of {layout.block_size} tokens fit"
        )


def _check_capacity(config: EngineConfig, layout: KVLayout, plan: KVPlan) -> None:
    if plan.max_model_len < 1:
        raise CacheTooSmallError(
            f"num_gpu_blocks={config.num_gpu_blocks}, num_cpu_blocks={config.num_cpu_blocks}: the ring takes all KV "
            "blocks and leaves none for a sequence",
            plan,
        )
    if config.max_model_len is not None and plan.max_model_len < config.max_model_len:
        raise CacheTooSmallError(
            f"max_model_len={config.max_model_len}: the KV cache holds {plan.num_sequence_blocks} blocks of "
            f"{layout.block_size} tokens, which is {plan.max_model_len} tokens for the longest sequence",
            plan,
        )


def gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
