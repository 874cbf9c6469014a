"""What the engine has done since it was made, and what it is doing."""

from __future__ import annotations

from dataclasses import dataclass

from nanovllm.engine.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """Requests and blocks as they stand; all other counts since the engine was made.

    A block is used while a request that runs holds it, cached while its content can be found again, free otherwise.
    `tokens_lost` were computed and given up by preemptions; some of them are found in the prefix cache again.
    """

    waiting_requests: int
    swapped_requests: int
    running_requests: int
    used_blocks: int
    cached_blocks: int
    free_blocks: int
    swapped_blocks: int
    preemptions_by_recompute: int
    preemptions_by_swap: int
    tokens_lost: int
    blocks_swapped_out: int
    blocks_swapped_in: int
    blocks_copied_on_write: int
    prefix_cache_queried_tokens: int
    prefix_cache_hit_tokens: int
    prefix_cache_hit_rate: float


def engine_metrics(scheduler: Scheduler) -> EngineMetrics:
    """The metrics of one engine now."""
    manager, preemption = scheduler.block_manager, scheduler.preemption.stats
    return EngineMetrics(
        waiting_requests=len(scheduler.waiting),
        swapped_requests=len(scheduler.swapped),
        running_requests=len(scheduler.running),
        used_blocks=manager.num_used,
        cached_blocks=manager.num_cached,
        free_blocks=manager.num_free,
        swapped_blocks=manager.num_swapped,
        preemptions_by_recompute=preemption.recomputed,
        preemptions_by_swap=preemption.swapped,
        tokens_lost=preemption.tokens_lost,
        blocks_swapped_out=preemption.blocks_swapped_out,
        blocks_swapped_in=preemption.blocks_swapped_in,
        blocks_copied_on_write=manager.num_copied_blocks,
        prefix_cache_queried_tokens=manager.stats.queried_tokens,
        prefix_cache_hit_tokens=manager.stats.hit_tokens,
        prefix_cache_hit_rate=manager.stats.hit_rate,
    )
