"""Long prompts, whose prefill takes more than one step: which go layer by layer, and how they share steps with others.

One long prefill is in progress at a time. Other long prompts wait until it has ended, and may then find its blocks in
the prefix cache; shorter prompts are admitted ahead of them. A step's budget is max_num_batched_tokens tokens through
all layers. Decodes take theirs first, then other prefills take up to half of what is left, and the long prefill gets
the rest. If it goes layer by layer, the rest is counted in tokens times layers, rounded to layer chunks, at least one.
So no decode and no short prompt waits for a long prefill to end, and the long prefill advances in every step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from nanovllm.engine.batch import ScheduledSequence
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.request import Request, Sequence
from nanovllm.engine.scheduling_budget import SchedulerLimits
from nanovllm.kvcache.hybrid_manager import Tier
from nanovllm.kvcache.prefill_plan import LayerwisePrefill, LayerwiseStep, plan_prefill


def plan_layerwise(seq: Sequence, manager: BlockManager, limits: SchedulerLimits) -> None:
    """Set `seq.layerwise`: what is prefilled layer by layer next, or None if the next chunk goes through all layers."""
    tiers = manager.tiers
    on_host = [index for index, block in enumerate(seq.block_table) if tiers.tier_of(block) is Tier.HOST]
    seq.layerwise = plan_prefill(
        on_host, manager.block_size, seq.num_computed, seq.end, limits.chunk, limits.layerwise_memory
    )


def long_prefill(running: Iterable[Request], tokens: int) -> Request | None:
    """The long prefill in progress: the layer-by-layer one, else the first that `tokens` in this step do not complete.

    A request whose sequences are recomputed side by side has no single prompt, and does not count.
    """
    alone = [request for request in running if len(request.computing) == 1]
    layerwise = (request for request in alone if request.computing[0].layerwise is not None)
    long = (request for request in alone if request.computing[0].num_remaining > max(tokens, 1))
    return next(layerwise, next(long, None))


def passes(request: Request, manager: BlockManager, chunk: int) -> bool:
    """Whether a waiting request is admitted during a long prefill: one step can compute its uncached tokens."""
    seq = request.computing[0]
    return seq.end <= chunk or seq.end - manager.num_cached_tokens(seq) <= chunk


def scheduled_part(
    scheduled: ScheduledSequence, seq: Sequence, layerwise: LayerwisePrefill, tokens: int, num_layers: int
) -> ScheduledSequence:
    """A step's share of a layer-by-layer prefill: the layer chunks that cost as much as `tokens` through all layers.

    scheduled: the prefill as one chunk. Its tokens are sampled and scored once they have passed all layers.
    """
    end_layer_chunk = layerwise.step_end(seq.layerwise_done, tokens * num_layers, num_layers)
    part = replace(scheduled, layerwise=LayerwiseStep(layerwise, seq.layerwise_done, end_layer_chunk))
    return (
        part if end_layer_chunk == num_layers * layerwise.num_chunks else replace(part, samples=(), prompt_targets=None)
    )


def take_part(seq: Sequence, done: LayerwiseStep, num_layers: int) -> int:
    """Record that layer chunks were run. Returns the tokens computed in all layers: 0 before the last layer chunk."""
    if done.end_layer_chunk < num_layers * done.layerwise.num_chunks:
        seq.layerwise_done = done.end_layer_chunk
        return 0
    seq.layerwise, seq.layerwise_done = None, 0
    return done.layerwise.end - done.layerwise.begin
