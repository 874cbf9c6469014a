"""Layer-by-layer prefill on the engine's side: which tokens go that way, and how much of it each step runs.

`features/layerwise_prefill` computes it.

A step's budget is max_num_batched_tokens tokens through all layers. What other sequences leave of it is counted in
tokens times layers, and rounded to layer chunks, at least one: the prefill advances in every step.
"""

from __future__ import annotations

from dataclasses import replace

from nanovllm.data.batch import LayerwiseStep, ScheduledSequence, Tier
from nanovllm.data.kv_groups import HOLE
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.request import Sequence
from nanovllm.engine.scheduling_budget import SchedulerLimits
from nanovllm.memory.layerwise import longest_prefill, plan_prefill, step_end


class LayerwiseScheduler:
    """Prefills long prompts layer by layer where that moves less KV."""

    def __init__(self, manager: BlockManager, limits: SchedulerLimits) -> None:
        self._manager = manager
        self._limits = limits

    def plan(self, seq: Sequence) -> None:
        """Set `seq.layerwise`: what is prefilled layer by layer next, or None for a chunk through all layers."""
        manager = self._manager
        chunk = self._limits.chunk
        memory = self._limits.layerwise_memory
        groups = manager.groups
        begin = seq.num_computed
        seq.layerwise = None
        end = seq.end
        if manager.states is not None:  # the last snapshot, and that of the block store, are the sequence's own state
            last = (*seq.snapshots.fixed[-1:], manager.stored.last_snapshot(seq))
            end = min((position for position in last if position > begin), default=end)
        reach = longest_prefill(groups.block_size, begin, end, chunk, memory)
        if reach - begin <= chunk:  # it goes chunk by chunk anyway
            return
        on_host, block_size = self._on_host(seq, reach)
        planned = plan_prefill(on_host, block_size, begin, reach, chunk, memory)
        if planned is not None and manager.hold_part(seq, planned.end):
            seq.layerwise = manager.begin_snapshots(seq, planned)

    def _on_host(self, seq: Sequence, tokens: int) -> tuple[list[int], int]:
        """The indices of the blocks of its first tokens that are on the host, and the size of these blocks.

        They are those of the KV group with the most such tokens. Groups with a window load little, and count only if
        there are no others.
        """
        groups = self._manager.groups
        tier_of = self._manager.tiers.tier_of
        tables = zip(seq.block_tables, groups, strict=True)
        of_groups = [(table[: group.num_blocks(tokens)], group) for table, group in tables]
        on_host = (
            ([index for index, block in enumerate(table) if block != HOLE and tier_of(block) is Tier.HOST], group)
            for table, group in of_groups
            if group.window == groups[0].window
        )
        indices, group = max(on_host, key=lambda of_group: len(of_group[0]) * of_group[1].block_size)
        return indices, group.block_size

    def part(self, scheduled: ScheduledSequence, seq: Sequence, tokens: int) -> ScheduledSequence:
        """A step's share of `seq.layerwise`: the layer chunks that cost as much as `tokens` through all layers.

        scheduled: the prefill as one chunk. Its tokens are sampled and scored once they have passed all layers.
        """
        layerwise = seq.layerwise
        num_layers = self._limits.num_layers
        assert layerwise is not None
        end = step_end(layerwise, seq.layerwise_done, tokens * num_layers, num_layers)
        part = replace(scheduled, layerwise=LayerwiseStep(layerwise, seq.layerwise_done, end))
        return part if end == num_layers * layerwise.num_chunks else replace(part, samples=(), prompt_targets=None)

    def advance(self, seq: Sequence, done: LayerwiseStep) -> int:
        """Record that layer chunks were run. Returns the tokens computed in all layers: 0 before the last of them."""
        if done.end_layer_chunk < self._limits.num_layers * done.layerwise.num_chunks:
            seq.layerwise_done = done.end_layer_chunk
            return 0
        seq.layerwise = None
        seq.layerwise_done = 0
        return done.layerwise.end - done.layerwise.begin
