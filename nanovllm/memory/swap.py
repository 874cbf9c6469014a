"""How many blocks the swap space gets: host memory for the KV blocks of requests that are preempted by swap."""

from __future__ import annotations

from nanovllm.config import EngineConfig
from nanovllm.data.memory_checks import check_fits
from nanovllm.memory.layout import KVLayout
from nanovllm.memory.sizing import KVPlan, MemoryFacts

DEFAULT_SWAP_BYTES = 4 * 2**30  # vLLM's
SWAPPED_SEQUENCES = 2  # of full length for which there are blocks where only rare requests are swapped


def asked_swap_bytes(config: EngineConfig) -> int:
    """Host memory that the user reserved for swapping."""
    return config.num_bytes("swap_space") or 0


def plan_swap_space(config: EngineConfig, layout: KVLayout, memory: MemoryFacts, plan: KVPlan) -> int:
    """Blocks of the swap tier, next to the tiers of `plan`. Raises ConfigError if `swap_space` does not fit.

    At most as many as the cache has blocks: more are never swapped out at once. Where the arguments do not say, room
    for SWAPPED_SEQUENCES, unless preemption swaps all requests. A request that does not fit the swap tier is
    recomputed.
    """
    taken = plan.num_cpu_blocks
    if memory.tiers_share_memory:
        taken += plan.num_gpu_blocks
    working_bytes = plan.working_bytes if memory.tiers_share_memory else 0
    left = max(0, memory.host_free - taken * layout.block_bytes - working_bytes)
    if config.swap_space is None:
        most = min(min(DEFAULT_SWAP_BYTES, left // 2) // layout.block_bytes, plan.num_sequence_blocks)
        if config.preemption_mode == "swap":
            return most
        return min(most, SWAPPED_SEQUENCES * layout.groups.most_blocks(plan.max_model_len, config.chunk))
    asked = asked_swap_bytes(config)
    remedy = "lower swap_space, num_cpu_blocks or num_gpu_blocks"
    if not memory.host_may_grow:
        check_fits(f"swap_space={config.swap_space}: that is", asked, left, "after the KV cache the host has", remedy)
    return min(asked // layout.block_bytes, plan.num_sequence_blocks)
