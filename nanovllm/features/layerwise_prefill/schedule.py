"""Layer-by-layer prefill on the engine's side: which tokens go that way, and how much of it each step runs. No torch.

A step's budget is max_num_batched_tokens tokens through all layers. What other sequences leave of it is counted in
tokens times layers, and rounded to layer chunks, at least one: the prefill advances in every step.
"""

from __future__ import annotations

from dataclasses import replace

from nanovllm.data.batch import ScheduledSequence
from nanovllm.data.layerwise import LayerwiseStep
from nanovllm.data.tiers import Tier
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.request import Sequence
from nanovllm.engine.scheduling_budget import SchedulerLimits
from nanovllm.features.layerwise_prefill.plan import Sizing, longest_prefill, plan_prefill, step_end

__all__ = ["Sizing", "advance", "plan", "scheduled_part"]


def plan(seq: Sequence, manager: BlockManager, limits: SchedulerLimits) -> None:
    """Set `seq.layerwise`: what is prefilled layer by layer next, or None if the next chunk goes through all layers."""
    begin, end, block_size, chunk = seq.num_computed, seq.end, manager.block_size, limits.chunk
    reach = longest_prefill(block_size, begin, end, chunk, limits.layerwise_memory)
    if reach - begin <= chunk:  # in every step of a prompt that goes chunk by chunk
        seq.layerwise = None
        return
    tier_of, blocks = manager.tiers.tier_of, seq.block_table[: -(-reach // block_size)]
    on_host = [index for index, block in enumerate(blocks) if tier_of(block) is Tier.HOST]
    seq.layerwise = plan_prefill(on_host, block_size, begin, end, chunk, limits.layerwise_memory)


def scheduled_part(scheduled: ScheduledSequence, seq: Sequence, tokens: int, num_layers: int) -> ScheduledSequence:
    """A step's share of `seq.layerwise`: the layer chunks that cost as much as `tokens` through all layers.

    scheduled: the prefill as one chunk. Its tokens are sampled and scored once they have passed all layers.
    """
    layerwise = seq.layerwise
    assert layerwise is not None
    end = step_end(layerwise, seq.layerwise_done, tokens * num_layers, num_layers)
    part = replace(scheduled, layerwise=LayerwiseStep(layerwise, seq.layerwise_done, end))
    return part if end == num_layers * layerwise.num_chunks else replace(part, samples=(), prompt_targets=None)


def advance(seq: Sequence, done: LayerwiseStep, num_layers: int) -> int:
    """Record that layer chunks were run. Returns the tokens computed in all layers: 0 before the last layer chunk."""
    if done.end_layer_chunk < num_layers * done.layerwise.num_chunks:
        seq.layerwise_done = done.end_layer_chunk
        return 0
    seq.layerwise, seq.layerwise_done = None, 0
    return done.layerwise.end - done.layerwise.begin
