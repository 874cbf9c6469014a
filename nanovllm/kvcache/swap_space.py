"""How many blocks the swap space holds: host memory for the KV of preempted requests."""

from __future__ import annotations

from nanovllm.config import EngineConfig
from nanovllm.kvcache.layout import KVLayout
from nanovllm.kvcache.sizing import KVPlan, MemoryFacts
from nanovllm.memory_checks import check_fits

DEFAULT_SWAP_BYTES = 4 * 2**30  # vLLM's


def asked_swap_bytes(config: EngineConfig) -> int:
    """Host memory that the user set aside for swapping."""
    return int((config.swap_space or 0) * 2**30)


def plan_swap_space(config: EngineConfig, layout: KVLayout, memory: MemoryFacts, plan: KVPlan) -> int:
    """Blocks of the swap tier, beside the tiers of `plan`. Raises ConfigError for a swap_space that does not fit.

    More blocks than the cache has could never be swapped out at once; without room a request is recomputed.
    """
    taken = plan.num_cpu_blocks
    if memory.tiers_share_memory:
        taken += plan.num_gpu_blocks
    working_bytes = plan.working_bytes if memory.tiers_share_memory else 0
    left = max(0, memory.host_free - taken * layout.block_bytes - working_bytes)
    if config.swap_space is None:
        return min(min(DEFAULT_SWAP_BYTES, left // 2) // layout.block_bytes, plan.num_sequence_blocks)
    asked = asked_swap_bytes(config)
    remedy = "lower swap_space, num_cpu_blocks or num_gpu_blocks"
    if not memory.host_may_grow:
        check_fits(f"swap_space={config.swap_space}: that is", asked, left, "beside the KV cache the host has", remedy)
    return min(asked // layout.block_bytes, plan.num_sequence_blocks)
