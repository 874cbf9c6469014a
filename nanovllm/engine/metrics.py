"""What the engine has done since it was made, and how far the running requests are."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from nanovllm.engine.request import Request, Sequence
from nanovllm.engine.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class Progress:
    """Of running requests, in tokens. `prompt_tokens` and how many are done are of prompts not yet computed whole."""

    num_requests: int = 0
    prompt_tokens: int = 0
    prompt_tokens_done: int = 0  # in the KV cache, computed or found there; of a span, by the layers that it is through
    computed_tokens: int = 0  # prompt tokens computed
    output_tokens: int = 0

    @classmethod
    def of(cls, running: Iterable[Request], num_layers: int) -> Progress:
        requests = list(running)
        live = [seq for request in requests for seq in request.live]
        computing = [seq for request in requests for seq in request.computing]  # a prompt of several sequences once
        prefills = [seq for seq in computing if seq.num_computed < seq.prompt_len]
        return cls(
            num_requests=len(requests),
            prompt_tokens=sum(seq.prompt_len for seq in prefills),
            prompt_tokens_done=sum(seq.num_computed + _through_layers(seq, num_layers) for seq in prefills),
            computed_tokens=sum(request.metrics.prefill_tokens for request in requests),
            output_tokens=sum(seq.num_output_tokens for seq in live),
        )


def _through_layers(seq: Sequence, num_layers: int) -> int:
    """What has been done of a sequence's span, in tokens through all layers."""
    if seq.layerwise is None:
        return 0
    return (seq.layerwise.end - seq.layerwise.begin) * seq.layerwise_done // (seq.layerwise.num_chunks * num_layers)


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
