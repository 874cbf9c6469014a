"""Metrics of the engine, and the progress of its running requests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from nanovllm.engine.request import Sequence
from nanovllm.engine.scheduler import Scheduler

# As of `LLM.watch_steps`: sets the function that is called before every layer, and returns the one before.
WatchSteps = Callable[[Callable[[float], None] | None], Callable[[float], None] | None]


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of the unfinished requests, in tokens.

    num_requests: of the running ones. prompt_tokens: of running prompts that are not yet computed, and
    prompt_tokens_done: what of these is computed or found in the prefix cache; layer by layer, in proportion.
    prefilled_tokens: of running prompts that are computed; waiting_tokens: of waiting prompts. computed_tokens: prompt
    tokens computed for all running requests, without those found. output_tokens: generated tokens of all of them.
    """

    num_requests: int = 0
    prompt_tokens: int = 0
    prompt_tokens_done: float = 0
    prefilled_tokens: int = 0
    waiting_tokens: int = 0
    computed_tokens: float = 0
    output_tokens: int = 0

    def plus(self, tokens: float) -> Progress:
        """The progress after so many more prompt tokens are computed."""
        done, computed = self.prompt_tokens_done + tokens, self.computed_tokens + tokens
        return replace(self, prompt_tokens_done=done, computed_tokens=computed)

    @classmethod
    def of(cls, scheduler: Scheduler, num_layers: int) -> Progress:
        admitted = [*scheduler.running, *scheduler.swapped]
        live = [seq for request in admitted for seq in request.live]
        computing = [seq for request in scheduler.running for seq in request.computing]  # counts a shared prompt once
        prefills = [seq for seq in computing if seq.num_computed < seq.prompt_len]
        layerwise = sum(_layerwise_tokens(seq, num_layers) for seq in prefills)
        unfilled = sum(seq.prompt_len for seq in prefills)
        return cls(
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
