"""Layer-by-layer prefill on the engine's side: which tokens go that way, and how much of it each step runs.

A step's budget is max_num_batched_tokens tokens through all layers. What other sequences leave of it is counted in
tokens times layers, and rounded to layer chunks, at least one: the prefill advances in every step.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from nanovllm.data.batch import Batch, LayerwisePrefill, LayerwiseStep, Sample, ScheduledSequence, Tier
from nanovllm.data.kv_groups import HOLE, KVGroup
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.request import Sequence
from nanovllm.engine.scheduling_budget import SchedulerLimits, SchedulingBudget
from nanovllm.engine.step_hook import StepHook
from nanovllm.memory.layerwise import longest_prefill, plan_prefill, step_end


class PartStates(Protocol):
    """Recurrent states on the way of a layer-by-layer prefill."""

    def part_end(self, seq: Sequence, begin: int) -> int:
        """Where a layer-by-layer prefill from `begin` on ends at the latest: the state there is the sequence's own."""
        ...

    def begin_part(self, seq: Sequence, prefill: LayerwisePrefill) -> LayerwisePrefill:
        """The layer-by-layer prefill that a sequence begins, with the states that it keeps on its way."""
        ...


class PartStore(Protocol):
    """What else keeps blocks of a layer-by-layer prefill."""

    def first_kept(self, group: KVGroup, end: int) -> int:
        """Index of the first block that it keeps of a prefill of `end` tokens."""
        ...


@dataclass(slots=True)
class Part:
    """A layer-by-layer prefill in progress, which `LayerwiseScheduler` keeps of a sequence."""

    prefill: LayerwisePrefill
    done: int = 0  # layer chunks that are computed; num_computed changes after the last one
    next_done: int = 0  # after the step that is under way

    def tokens_done(self, num_layers: int) -> float:
        """How much of it is done, as the equivalent number of tokens through all layers."""
        prefill = self.prefill
        return (prefill.end - prefill.begin) * self.done / (prefill.num_chunks * num_layers)


class LayerwiseScheduler(StepHook):
    """Prefills long prompts layer by layer where that moves less KV."""

    def __init__(
        self,
        manager: BlockManager,
        limits: SchedulerLimits,
        states: PartStates | None = None,
        store: PartStore | None = None,
    ) -> None:
        self._manager = manager
        self._limits = limits
        self._states = states
        self._store = store
        self._tokens = 0  # of the step, that its part may take

    def part(self, seq: Sequence) -> Part | None:
        """The layer-by-layer prefill of a sequence; None if none is in progress."""
        return seq.ext[self] if seq.part_end else None

    def plan_part(self, seq: Sequence) -> None:
        manager = self._manager
        chunk = self._limits.chunk
        memory = self._limits.layerwise_memory
        begin = seq.num_computed
        end = seq.end if self._states is None else self._states.part_end(seq, begin)
        reach = longest_prefill(manager.groups.block_size, begin, end, chunk, memory)
        if reach - begin <= chunk:  # it goes chunk by chunk anyway
            return
        on_host, block_size = self._on_host(seq, reach)
        planned = plan_prefill(on_host, block_size, begin, reach, chunk, memory)
        if planned is None or not manager.hold_part(seq, planned.end, self._first_kept(planned.end)):
            return
        if self._states is not None:
            planned = self._states.begin_part(seq, planned)
        seq.ext[self] = Part(planned)

    def _first_kept(self, end: int) -> list[int]:
        """Of each KV group the first block that a prefill up to `end` must keep, as others read it later."""
        cache = self._manager.prefix_cache
        seen_from = (end - 1) // cache.hash_block_size * cache.hash_block_size if cache.enabled else end
        groups = self._manager.groups
        firsts = [min(group.first_visible(seen_from), group.num_blocks(end)) for group in groups]
        if self._store is None:
            return firsts
        return [min(first, self._store.first_kept(group, end)) for group, first in zip(groups, firsts, strict=True)]

    def _on_host(self, seq: Sequence, tokens: int) -> tuple[list[int], int]:
        """The indices of the blocks of its first tokens that are on the host, and the size of these blocks.

        They are those of the KV group with the most such tokens. Groups with a window load little, and count only if
        there are no others.
        """
        groups = self._manager.groups
        tier_of = self._manager.pool.tiers.tier_of
        tables = zip(seq.block_tables, groups, strict=True)
        of_groups = [(table[: group.num_blocks(tokens)], group) for table, group in tables]
        on_host = (
            ([index for index, block in enumerate(table) if block != HOLE and tier_of(block) is Tier.HOST], group)
            for table, group in of_groups
            if group.window == groups[0].window
        )
        indices, group = max(on_host, key=lambda of_group: len(of_group[0]) * of_group[1].block_size)
        return indices, group.block_size

    def planned(self, budget: SchedulingBudget) -> None:
        self._tokens = min(budget.left, self._limits.chunk)

    def built(self, batch: Batch, sequences: list[Sequence]) -> None:
        if sequences[-1].part_end:
            self._cut(batch.sequences[-1], sequences[-1])

    def _cut(self, scheduled: ScheduledSequence, seq: Sequence) -> None:
        """Leave a step's share of a part: the layer chunks that cost as much as its tokens through all layers.

        scheduled: the part as one chunk. Its tokens are sampled and scored once they have passed all layers.
        """
        part: Part = seq.ext[self]
        num_layers = self._limits.num_layers
        end = step_end(part.prefill, part.done, self._tokens * num_layers, num_layers)
        scheduled.layerwise = LayerwiseStep(part.prefill, part.done, end)
        scheduled.is_complete = end == num_layers * part.prefill.num_chunks
        if not scheduled.is_complete:
            scheduled.samples = ()
            scheduled.prompt_targets = None
        part.next_done = end

    def computed(self, seq: Sequence, begin: int, samples: Seq[Sample]) -> None:
        if (part := self.part(seq)) is not None:
            part.done = part.next_done
            if seq.num_computed > begin:
                seq.part_end = 0


def part_of(hooks: Iterable[StepHook], seq: Sequence) -> Part | None:
    """The layer-by-layer prefill of a sequence; None if none is in progress."""
    parts = (hook.part(seq) for hook in hooks if isinstance(hook, LayerwiseScheduler))
    return next((part for part in parts if part is not None), None)
