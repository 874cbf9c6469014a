"""What the requests of a scheduler do, and how far they are."""

from __future__ import annotations

from dataclasses import replace

from nanovllm.data.progress import Progress
from nanovllm.engine.layerwise_scheduler import part_of
from nanovllm.engine.metrics import BlockCounts, DraftStats, EngineMetrics, RequestCounts
from nanovllm.engine.scheduler import Scheduler


def engine_metrics(scheduler: Scheduler) -> EngineMetrics:
    """The metrics between two steps."""
    manager = scheduler.block_manager
    pool = manager.pool
    metrics = EngineMetrics(
        RequestCounts(len(scheduler.waiting), len(scheduler.pending), len(scheduler.swapped), len(scheduler.running)),
        BlockCounts(pool.num_used, pool.num_cached, pool.num_free, pool.num_swapped, manager.num_copied_blocks),
        replace(scheduler.preemption.stats),
        replace(manager.stats),
        DraftStats(),
        scheduler.prompt_tokens_computed,
        scheduler.tokens_generated,
    )
    for hook in scheduler.hooks:
        hook.count(metrics)
    return metrics


def progress_of(scheduler: Scheduler, num_layers: int) -> Progress:
    """The progress between two steps."""
    admitted = [*scheduler.running, *scheduler.swapped]
    live = [seq for request in admitted for seq in request.live]
    computing = [seq for request in scheduler.running for seq in request.computing]  # counts a shared prompt once
    prefills = [seq for seq in computing if seq.num_computed < seq.prompt_len]
    parts = [part for seq in prefills if (part := part_of(scheduler.hooks, seq)) is not None]
    layerwise = sum(part.tokens_done(num_layers) for part in parts)
    unfilled = sum(seq.prompt_len for seq in prefills)
    return Progress(
        num_requests=len(scheduler.running),
        prompt_tokens=unfilled,
        prompt_tokens_done=sum(seq.num_computed for seq in prefills) + layerwise,
        prefilled_tokens=max(0, sum(request.prompt_len for request in admitted) - unfilled),
        waiting_tokens=sum(request.prompt_len for request in [*scheduler.waiting, *scheduler.pending]),
        computed_tokens=sum(request.metrics.prefill_tokens for request in admitted) + layerwise,
        output_tokens=sum(seq.num_output_tokens for seq in live),
        drafted_tokens=sum(request.metrics.drafted_tokens for request in admitted),
        accepted_tokens=sum(request.metrics.accepted_tokens for request in admitted),
    )
