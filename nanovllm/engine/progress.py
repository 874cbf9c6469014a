"""What the requests of a scheduler do, and how far they are."""

from __future__ import annotations

from dataclasses import replace

from nanovllm.data.progress import Progress
from nanovllm.engine.metrics import BlockCounts, DraftStats, EngineMetrics, RequestCounts
from nanovllm.engine.request import Sequence
from nanovllm.engine.scheduler import Scheduler


def engine_metrics(scheduler: Scheduler) -> EngineMetrics:
    """The metrics between two steps."""
    manager = scheduler.block_manager
    metrics = EngineMetrics(
        RequestCounts(len(scheduler.waiting), len(scheduler.loading), len(scheduler.swapped), len(scheduler.running)),
        BlockCounts(
            manager.num_used, manager.num_cached, manager.num_free, manager.num_swapped, manager.num_copied_blocks
        ),
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
    layerwise = sum(_layerwise_tokens(seq, num_layers) for seq in prefills)
    unfilled = sum(seq.prompt_len for seq in prefills)
    return Progress(
        num_requests=len(scheduler.running),
        prompt_tokens=unfilled,
        prompt_tokens_done=sum(seq.num_computed for seq in prefills) + layerwise,
        prefilled_tokens=max(0, sum(request.prompt_len for request in admitted) - unfilled),
        waiting_tokens=sum(request.prompt_len for request in [*scheduler.waiting, *scheduler.loading]),
        computed_tokens=sum(request.metrics.prefill_tokens for request in admitted) + layerwise,
        output_tokens=sum(seq.num_output_tokens for seq in live),
        drafted_tokens=sum(request.metrics.drafted_tokens for request in admitted),
        accepted_tokens=sum(request.metrics.accepted_tokens for request in admitted),
    )


def _layerwise_tokens(seq: Sequence, num_layers: int) -> float:
    """How much of a layer-by-layer prefill is done, as the equivalent number of tokens through all layers."""
    if seq.layerwise is None:
        return 0
    return (seq.layerwise.end - seq.layerwise.begin) * seq.layerwise_done / (seq.layerwise.num_chunks * num_layers)
