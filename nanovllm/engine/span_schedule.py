"""Which prompts are prefilled layer by layer, whose turn it is, and how much of a step it takes.

One span is under way at a time, since its hidden states stay on the device. Other prompts that need more than a step
wait until it has ended, and may find its blocks in the prefix cache then; shorter ones pass them by. A step is as long
as max_num_batched_tokens tokens through all layers take: decodes come first, then other prefills, which may take half
of what decodes leave, and the span's units fill the rest, at least one in a step and to the nearest unit. So neither a
decode nor a short prompt waits for a long one to end, and the long one comes forward in every step.
"""

from __future__ import annotations

from collections.abc import Iterable

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.sequence import Sequence
from nanovllm.kvcache.hybrid_manager import Tier
from nanovllm.kvcache.prefill_plan import SpanSlice, plan_prefill


def plan_span(seq: Sequence, manager: BlockManager, chunk: int, span_tokens: int) -> None:
    """Decide how a sequence that was just admitted is prefilled: its `span`, or None for chunk by chunk."""
    tiers = manager.tiers
    on_host = [index for index, block in enumerate(seq.block_table) if tiers.tier_of(block) is Tier.HOST]
    seq.span = plan_prefill(on_host, manager.block_size, seq.num_computed, len(seq), chunk, span_tokens)


def span_owner(running: Iterable[Sequence]) -> Sequence | None:
    """The sequence whose span is under way."""
    return next((seq for seq in running if seq.span is not None), None)


def passes_span(seq: Sequence, manager: BlockManager, chunk: int) -> bool:
    """Whether a waiting sequence is admitted beside a span: one step can compute what is not cached of it."""
    return len(seq) <= chunk or len(seq) - len(manager.find_prefix(seq)) * manager.block_size <= chunk


def share_of_others(running: Iterable[Sequence], tokens: int) -> int:
    """Of the `tokens` that decodes leave of a step, those that prefills outside the span may take."""
    return tokens if span_owner(running) is None else -(-tokens // 2)


def next_slice(seq: Sequence, token_layers: int, num_layers: int) -> SpanSlice:
    """The units that the span's owner runs in this step."""
    assert seq.span is not None
    return SpanSlice(seq.span, seq.span_units, seq.span.slice_end(seq.span_units, token_layers, num_layers))


def take_slice(seq: Sequence, done: SpanSlice, num_layers: int) -> int:
    """The slice was run. Returns how many tokens are computed now, in all layers: none before the last unit."""
    if done.end_unit < num_layers * done.span.num_chunks:
        seq.span_units = done.end_unit
        return 0
    seq.span, seq.span_units = None, 0
    return done.span.end - done.span.begin
