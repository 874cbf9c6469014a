"""Prompts that take more than a step: which go layer by layer, and how they share steps with everybody else.

One long prefill is under way at a time. Other prompts that need more than a step wait until it has ended, and may find
its blocks in the prefix cache then; shorter ones pass them by. A step is as long as max_num_batched_tokens tokens take
through all layers: decodes come first, then other prefills, which may take half of what decodes leave, and the long one
has the rest. If it goes layer by layer, that is counted in tokens times layers, to the nearest unit and at least one.
So neither a decode nor a short prompt waits for a long one to end, and the long one comes forward in every step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from nanovllm.engine.batch import ScheduledSequence
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.limits import SchedulerLimits
from nanovllm.engine.request import Request, Sequence
from nanovllm.kvcache.hybrid_manager import Tier
from nanovllm.kvcache.prefill_plan import LayerwisePrefill, LayerwiseStep, plan_prefill


def plan_layerwise(seq: Sequence, manager: BlockManager, limits: SchedulerLimits) -> None:
    """Decide how the prefill of a sequence goes on: with a `span`, or with None a chunk through all layers."""
    tiers = manager.tiers
    on_host = [index for index, block in enumerate(seq.block_table) if tiers.tier_of(block) is Tier.HOST]
    seq.layerwise = plan_prefill(
        on_host, manager.block_size, seq.num_computed, seq.end, limits.chunk, limits.layerwise_memory
    )


def long_prefill(running: Iterable[Request], tokens: int) -> Request | None:
    """The long prefill under way: who has a span, else the first that `tokens` in this step do not complete.

    Several sequences that are recomputed beside each other are not one prompt, and never count as long.
    """
    alone = [request for request in running if len(request.computing) == 1]
    layerwise = (request for request in alone if request.computing[0].layerwise is not None)
    long = (request for request in alone if request.computing[0].num_remaining > max(tokens, 1))
    return next(layerwise, next(long, None))


def passes(request: Request, manager: BlockManager, chunk: int) -> bool:
    """Whether a waiting request is admitted beside a long one: one step can compute what is not cached of it."""
    seq = request.computing[0]
    return seq.end <= chunk or seq.end - len(manager.find_prefix(seq)) * manager.block_size <= chunk


def scheduled_part(
    whole: ScheduledSequence, seq: Sequence, layerwise: LayerwisePrefill, tokens: int, num_layers: int
) -> ScheduledSequence:
    """A step's share of the sequence's span, as many units as `tokens` are worth through all layers.

    whole: the span as one chunk. Tokens are drawn, and scored, when they have come through all layers.
    """
    end_layer_chunk = layerwise.step_end(seq.layerwise_done, tokens * num_layers, num_layers)
    part = replace(whole, layerwise=LayerwiseStep(layerwise, seq.layerwise_done, end_layer_chunk))
    return (
        part if end_layer_chunk == num_layers * layerwise.num_chunks else replace(part, samples=(), prompt_targets=None)
    )


def take_part(seq: Sequence, done: LayerwiseStep, num_layers: int) -> int:
    """The slice was run. Returns how many tokens are computed now, in all layers: none before the last unit."""
    if done.end_layer_chunk < num_layers * done.layerwise.num_chunks:
        seq.layerwise_done = done.end_layer_chunk
        return 0
    seq.layerwise, seq.layerwise_done = None, 0
    return done.layerwise.end - done.layerwise.begin
