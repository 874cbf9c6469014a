"""Prompts that take more than a step: which go layer by layer, and how they share steps with everybody else.

One long prefill is under way at a time. Other prompts that need more than a step wait until it has ended, and may find
its blocks in the prefix cache then; shorter ones pass them by. A step is as long as max_num_batched_tokens tokens take
through all layers: decodes come first, then other prefills, which may take half of what decodes leave, and the long one
has the rest. If it goes layer by layer, that is counted in tokens times layers, to the nearest unit and at least one.
So neither a decode nor a short prompt waits for a long one to end, and the long one comes forward in every step.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.request import Sequence
from nanovllm.kvcache.hybrid_manager import Tier
from nanovllm.kvcache.prefill_plan import SpanMemory, SpanSlice, plan_prefill


def plan_span(seq: Sequence, manager: BlockManager, chunk: int, memory: SpanMemory) -> None:
    """Decide how the prefill of a sequence goes on: with a `span`, or with None a chunk through all layers."""
    tiers = manager.tiers
    on_host = [index for index, block in enumerate(seq.block_table) if tiers.tier_of(block) is Tier.HOST]
    seq.span = plan_prefill(on_host, manager.block_size, seq.num_computed, len(seq), chunk, memory)


def long_prefill(running: Seq[Sequence], tokens: int) -> Sequence | None:
    """The long prefill under way: the sequence with a span, else the first that `tokens` do not complete."""
    with_span = (seq for seq in running if seq.span is not None)
    return next(with_span, next((seq for seq in running if seq.num_remaining > max(tokens, 1)), None))


def passes(seq: Sequence, manager: BlockManager, chunk: int) -> bool:
    """Whether a waiting sequence is admitted beside a long one: one step can compute what is not cached of it."""
    return len(seq) <= chunk or len(seq) - len(manager.find_prefix(seq)) * manager.block_size <= chunk


def take_slice(seq: Sequence, done: SpanSlice, num_layers: int) -> int:
    """The slice was run. Returns how many tokens are computed now, in all layers: none before the last unit."""
    if done.end_unit < num_layers * done.span.num_chunks:
        seq.span_units = done.end_unit
        return 0
    seq.span, seq.span_units = None, 0
    return done.span.end - done.span.begin
