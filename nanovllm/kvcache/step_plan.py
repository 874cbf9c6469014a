"""How one layer goes through the KV blocks of a step: worked out once, used for every layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from nanovllm.forward_context import SequenceSlice
from nanovllm.kvcache.room import first_visible_block
from nanovllm.ops.attention import KVSegment, SegmentTable


@dataclass(slots=True)
class BlockVisit:
    """One block that a step's sequences attend to, and the new tokens that are written to it, if any."""

    place: int
    first_position: int
    readers: list[int]  # indices of the sequences
    stored_tokens: int  # tokens that it holds before the step
    new_tokens: int  # tokens written in the step, by its only reader


@dataclass(slots=True)
class HostVisit:
    """A block that streams through a ring slot. `table` addresses it as block 0 of that slot."""

    visit: BlockVisit
    table: SegmentTable


@dataclass(slots=True)
class ResidentRun:
    """Visits to resident blocks with no host block between them: attended in one call."""

    visits: list[BlockVisit] = field(default_factory=list)
    table: SegmentTable = field(default_factory=lambda: SegmentTable(()))


def plan_visits(sequences: Sequence[SequenceSlice], block_size: int, window: int | None) -> list[BlockVisit]:
    """The order in which one layer goes through the blocks of all sequences: by index, a shared block once.

    Every sequence meets its blocks in order, whatever the other sequences are and wherever the blocks live, so its
    result does not depend on either. Sequences that share a block share it at the same index and have it full.
    """
    visits: list[BlockVisit] = []
    for index in range(max((len(s.block_table) for s in sequences), default=0)):
        at_place: dict[int, BlockVisit] = {}
        first = index * block_size
        for reader, seq in enumerate(sequences):
            if index >= len(seq.block_table) or index < first_visible_block(seq.context_len, window, block_size):
                continue
            place = seq.block_table[index]
            if place in at_place:
                at_place[place].readers.append(reader)
                continue
            stored = max(0, min(seq.context_len - first, block_size))
            held = min(seq.total_len - first, block_size)
            at_place[place] = BlockVisit(place, first, [reader], stored, held - stored)
        visits.extend(at_place.values())
    return visits


def group_visits(
    visits: Sequence[BlockVisit], sequences: Sequence[SequenceSlice], block_size: int, resident_blocks: int
) -> list[ResidentRun | HostVisit]:
    """The visits with their attention tables; neighbouring resident ones as one run."""
    plan: list[ResidentRun | HostVisit] = []
    for visit in visits:
        if visit.place >= resident_blocks:
            segments = [_segment(sequences[reader], [(visit, 0)], block_size) for reader in visit.readers]
            plan.append(HostVisit(visit, SegmentTable(segments)))
            continue
        if not plan or isinstance(plan[-1], HostVisit):
            plan.append(ResidentRun())
        run = plan[-1]
        assert isinstance(run, ResidentRun)
        run.visits.append(visit)
    for item in plan:
        if isinstance(item, ResidentRun):
            item.table = _run_table(item.visits, sequences, block_size)
    return plan


def _run_table(visits: Sequence[BlockVisit], sequences: Sequence[SequenceSlice], block_size: int) -> SegmentTable:
    """One segment for each sequence: its blocks within a run follow each other without a gap."""
    by_reader: dict[int, list[tuple[BlockVisit, int]]] = {}
    for visit in visits:
        for reader in visit.readers:
            by_reader.setdefault(reader, []).append((visit, visit.place))
    return SegmentTable([_segment(sequences[reader], blocks, block_size) for reader, blocks in by_reader.items()])


def _segment(seq: SequenceSlice, blocks: Sequence[tuple[BlockVisit, int]], block_size: int) -> KVSegment:
    """(visit, index in the pool) pairs as `seq` sees them; rows before a block are left to the causal mask."""
    first = blocks[0][0].first_position
    return KVSegment(
        query_start=seq.query_start,
        query_len=seq.query_len,
        query_position=seq.context_len,
        first_position=first,
        kv_end=min(seq.total_len, first + len(blocks) * block_size),
        blocks=[index for _, index in blocks],
    )
