"""How one layer goes through the KV blocks of a step: worked out once, used for every layer."""

from __future__ import annotations

from collections.abc import Collection, Sequence
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

    @property
    def held_tokens(self) -> int:
        """Tokens that it holds after they were written."""
        return self.stored_tokens + self.new_tokens


@dataclass(slots=True)
class BlockRun:
    """Visits to blocks of one pool that are attended in one call. `table` addresses that pool."""

    visits: list[BlockVisit] = field(default_factory=list)
    table: SegmentTable = field(default_factory=lambda: SegmentTable(()))


class ResidentRun(BlockRun):
    """On the device."""


class RingRun(BlockRun):
    """On the host, streamed through as many ring slots. `table` addresses the run's slots, the first being 0."""


class ArmRun(BlockRun):
    """On the host, for the CPU arm."""

    @property
    def stored_tokens(self) -> int:
        return sum(visit.stored_tokens for visit in self.visits)

    @property
    def read_tokens(self) -> int:
        """Like `stored_tokens`, but a block counts for each of its readers."""
        return sum(visit.stored_tokens * len(visit.readers) for visit in self.visits)


@dataclass(slots=True)
class LayerPlan:
    """What one layer does: `items` in this order on the compute stream, `beside` on a stream of the arm's own."""

    items: list[BlockRun] = field(default_factory=list)
    beside: list[ArmRun] = field(default_factory=list)
    beside_rows: int = 0  # the rows [0, beside_rows) of the batch are the queries of `beside`

    @property
    def ring(self) -> list[RingRun]:
        return [item for item in self.items if isinstance(item, RingRun)]

    @property
    def arm_runs(self) -> list[ArmRun]:
        return [item for item in self.items if isinstance(item, ArmRun)] + self.beside


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


def leading_short(sequences: Sequence[SequenceSlice], most_tokens: int, most_rows: int) -> int:
    """How many sequences at the start of the batch have at most `most_tokens` new tokens, and `most_rows` together.

    Decodes stand at the start of a batch, and the rows of these sequences are its first ones.
    """
    for index, seq in enumerate(sequences):
        if seq.query_len > most_tokens or seq.query_start + seq.query_len > most_rows:
            return index
    return len(sequences)


def arm_candidates(visits: Sequence[BlockVisit], resident_blocks: int, num_short: int) -> list[int]:
    """Indices of the visits that the CPU arm may take, in the order in which it takes them.

    They are whole blocks on the host that only the first `num_short` sequences attend to: a block that gets new tokens
    passes through the ring, which writes and stores them. A block with many readers crosses the link once and is read
    by the arm once for each, so those with few come first, and of these the last of the sequences.
    """
    found = [
        index
        for index, visit in enumerate(visits)
        if visit.place >= resident_blocks and not visit.new_tokens and visit.readers[-1] < num_short
    ]
    return sorted(found, key=lambda index: (len(visits[index].readers), -index))


def group_visits(
    visits: Sequence[BlockVisit],
    sequences: Sequence[SequenceSlice],
    block_size: int,
    resident_blocks: int,
    group_slots: int,
    arm: Collection[int] = (),
    arm_beside: bool = False,
) -> LayerPlan:
    """The visits with their attention tables. `arm`: indices of the CPU arm's, in order with the others or beside them.

    Every sequence meets its blocks in the order of the visits, in as few calls as that and runs of `group_slots`
    ring slots allow.
    """
    in_order, beside = _Grouping(block_size), _Grouping(block_size)
    for index, visit in enumerate(visits):
        if index in arm:
            (beside if arm_beside else in_order).join(ArmRun, visit)
        elif visit.place < resident_blocks:
            in_order.join(ResidentRun, visit)
        else:
            in_order.join(RingRun, visit, most=group_slots)
    for item in [*in_order.items, *beside.items]:
        item.table = _run_table(item, sequences, block_size, resident_blocks)
    runs = [run for run in beside.items if isinstance(run, ArmRun)]
    readers = {reader for run in runs for visit in run.visits for reader in visit.readers}
    rows = max((sequences[reader].query_start + sequences[reader].query_len for reader in readers), default=0)
    return LayerPlan(in_order.items, runs, rows)


class _Grouping:
    """Puts visits into runs. A visit joins the last run of its kind, if none of its readers was met elsewhere since and
    none would have a gap in it."""

    def __init__(self, block_size: int) -> None:
        self.items: list[BlockRun] = []
        self._block_size = block_size
        self._last: dict[type[BlockRun], int] = {}  # the last run of each kind, as an index
        self._met: dict[int, tuple[int, int]] = {}  # of each reader: its last item's index, and the position after it

    def join(self, kind: type[BlockRun], visit: BlockVisit, most: int | None = None) -> None:
        """`most`: visits of a run."""
        at = self._last.get(kind, -1)
        if at < 0 or len(self.items[at].visits) == most or not self._fits(visit, at):
            at = self._last[kind] = len(self.items)
            self.items.append(kind())
        self.items[at].visits.append(visit)
        self._met.update(dict.fromkeys(visit.readers, (at, visit.first_position + self._block_size)))

    def _fits(self, visit: BlockVisit, at: int) -> bool:
        met = [self._met[reader] for reader in visit.readers if reader in self._met]
        return all(item < at or (item == at and end == visit.first_position) for item, end in met)


def _run_table(
    run: BlockRun, sequences: Sequence[SequenceSlice], block_size: int, resident_blocks: int
) -> SegmentTable:
    """One segment for each sequence: its blocks within a run follow each other without a gap."""
    first_place = resident_blocks if isinstance(run, ArmRun) else 0
    by_reader: dict[int, list[tuple[BlockVisit, int]]] = {}
    for slot, visit in enumerate(run.visits):
        index = slot if isinstance(run, RingRun) else visit.place - first_place
        for reader in visit.readers:
            by_reader.setdefault(reader, []).append((visit, index))
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
