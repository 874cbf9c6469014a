"""Metrics of the engine, and the progress of its running requests."""

from __future__ import annotations

from dataclasses import dataclass

from nanovllm.data.progress import Progress
from nanovllm.engine.request import Sequence
from nanovllm.engine.scheduler import Scheduler


def progress_of(scheduler: Scheduler, num_layers: int) -> Progress:
    """The progress between two steps."""
    admitted = [*scheduler.running, *scheduler.swapped]
    live = [seq for request in admitted for seq in request.live]
    computing = [seq for request in scheduler.running for seq in request.computing]  # counts a shared prompt once
    prefills = [seq for seq in computing if seq.num_computed < seq.prompt_len]
    layerwise = sum(_layerwise_tokens(seq, num_layers) for seq in prefills)
    unfilled = sum(seq.prompt_len for seq in prefills)
    return Progress(
        num_requests=len(scheduler.running),
        prompt_tokens=unfilled,
        prompt_tokens_done=sum(seq.num_computed for seq in prefills) + layerwise,
        prefilled_tokens=max(0, sum(request.prompt_len for request in admitted) - unfilled),
        waiting_tokens=sum(request.prompt_len for request in scheduler.waiting),
        computed_tokens=sum(request.metrics.prefill_tokens for request in admitted) + layerwise,
        output_tokens=sum(seq.num_output_tokens for seq in live),
    )


def _layerwise_tokens(seq: Sequence, num_layers: int) -> float:
    """How much of a layer-by-layer prefill is done, as the equivalent number of tokens through all layers."""
    if seq.layerwise is None:
        return 0
    return (seq.layerwise.end - seq.layerwise.begin) * seq.layerwise_done / (seq.layerwise.num_chunks * num_layers)


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """Current numbers of requests and blocks; all other numbers are totals since the engine was created.

    A block is used while a running request references it, cached while only the prefix cache knows it, otherwise free.
    tokens_lost: computed tokens whose blocks preemptions freed; the prefix cache may still hold some of them.
    prefix_cache_copied_blocks, prefix_cache_copied_tokens: hits that end within a block, whose tokens are copied.
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
    prompt_tokens_computed: int
    tokens_generated: int
    prefix_cache_queried_tokens: int
    prefix_cache_hit_tokens: int
    prefix_cache_hit_rate: float
    prefix_cache_copied_blocks: int
    prefix_cache_copied_tokens: int


def engine_metrics(scheduler: Scheduler) -> EngineMetrics:
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
        prompt_tokens_computed=scheduler.prompt_tokens_computed,
        tokens_generated=scheduler.tokens_generated,
        prefix_cache_queried_tokens=manager.stats.queried_tokens,
        prefix_cache_hit_tokens=manager.stats.hit_tokens,
        prefix_cache_hit_rate=manager.stats.hit_rate,
        prefix_cache_copied_blocks=manager.stats.copied_blocks,
        prefix_cache_copied_tokens=manager.stats.copied_tokens,
    )
