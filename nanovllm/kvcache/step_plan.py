"""How one layer goes through the KV blocks of a step: worked out once, used for every layer."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from nanovllm.forward_context import SequenceMetadata
from nanovllm.kvcache.base import first_visible_block
from nanovllm.ops.attention import AttentionMetadata, KVMetadata


@dataclass(slots=True)
class BlockRead:
    """One block that a step's sequences attend to, and the new tokens that are written to it, if any."""

    physical_id: int
    first_position: int
    readers: list[int]  # indices of the sequences
    stored_tokens: int  # tokens that it holds before the step
    new_tokens: int  # tokens written in the step, by its only reader

    @property
    def held_tokens(self) -> int:
        """Tokens that it holds after they were written."""
        return self.stored_tokens + self.new_tokens


@dataclass(slots=True)
class BlockGroup:
    """Visits to blocks of one pool that are attended in one call. `table` addresses that pool."""

    reads: list[BlockRead] = field(default_factory=list)
    table: AttentionMetadata = field(default_factory=lambda: AttentionMetadata(()))


class ResidentGroup(BlockGroup):
    """On the device."""


class RingGroup(BlockGroup):
    """On the host, streamed through as many ring slots. `table` addresses the run's slots, the first being 0."""


class CpuAttentionGroup(BlockGroup):
    """On the host, for the CPU arm."""

    @property
    def stored_tokens(self) -> int:
        return sum(read.stored_tokens for read in self.reads)

    @property
    def read_tokens(self) -> int:
        """Like `stored_tokens`, but a block counts for each of its readers."""
        return sum(read.stored_tokens * len(read.readers) for read in self.reads)


@dataclass(slots=True)
class LayerPlan:
    """What one layer does: `items` in this order on the compute stream, `beside` on a stream of the arm's own."""

    items: list[BlockGroup] = field(default_factory=list)
    concurrent: list[CpuAttentionGroup] = field(default_factory=list)
    concurrent_rows: int = 0  # the rows [0, concurrent_rows) of the batch are the queries of `beside`

    @property
    def ring(self) -> list[RingGroup]:
        return [item for item in self.items if isinstance(item, RingGroup)]

    @property
    def cpu_attention_groups(self) -> list[CpuAttentionGroup]:
        return [item for item in self.items if isinstance(item, CpuAttentionGroup)] + self.concurrent


def plan_block_reads(sequences: Sequence[SequenceMetadata], block_size: int, window: int | None) -> list[BlockRead]:
    """The order in which one layer goes through the blocks of all sequences: by index, a shared block once.

    Every sequence meets its blocks in order, whatever the other sequences are and wherever the blocks live, so its
    result does not depend on either. Sequences that share a block share it at the same index and have it full.
    """
    reads: list[BlockRead] = []
    for index in range(max((len(s.block_table) for s in sequences), default=0)):
        at_id: dict[int, BlockRead] = {}
        first = index * block_size
        for reader, seq in enumerate(sequences):
            if index >= len(seq.block_table) or index < first_visible_block(seq.context_len, window, block_size):
                continue
            physical_id = seq.block_table[index]
            if physical_id in at_id:
                at_id[physical_id].readers.append(reader)
                continue
            stored = max(0, min(seq.context_len - first, block_size))
            held = min(seq.total_len - first, block_size)
            at_id[physical_id] = BlockRead(physical_id, first, [reader], stored, held - stored)
        reads.extend(at_id.values())
    return reads


def leading_short(sequences: Sequence[SequenceMetadata], most_tokens: int, most_rows: int) -> int:
    """How many sequences at the start of the batch have at most `most_tokens` new tokens, and `most_rows` together.

    Decodes stand at the start of a batch, and the rows of these sequences are its first ones.
    """
    for index, seq in enumerate(sequences):
        if seq.query_len > most_tokens or seq.query_start + seq.query_len > most_rows:
            return index
    return len(sequences)


def cpu_attention_candidates(reads: Sequence[BlockRead], resident_blocks: int, num_short: int) -> list[int]:
    """Indices of the visits that the CPU arm may take, in the order in which it takes them.

    They are whole blocks on the host that only the first `num_short` sequences attend to: a block that gets new tokens
    passes through the ring, which writes and stores them. A block with many readers crosses the link once and is read
    by the arm once for each, so those with few come first, and of these the last of the sequences.
    """
    found = [
        index
        for index, read in enumerate(reads)
        if read.physical_id >= resident_blocks and not read.new_tokens and read.readers[-1] < num_short
    ]
    return sorted(found, key=lambda index: (len(reads[index].readers), -index))


def group_block_reads(
    reads: Sequence[BlockRead],
    sequences: Sequence[SequenceMetadata],
    block_size: int,
    resident_blocks: int,
    group_slots: int,
    cpu_attention: Collection[int] = (),
    concurrent: bool = False,
) -> LayerPlan:
    """The visits with their attention tables. `arm`: indices of the CPU arm's, in order with the others or beside them.

    Every sequence meets its blocks in the order of the visits, in as few calls as that and runs of `group_slots`
    ring slots allow.
    """
    in_order, beside = _Grouping(block_size), _Grouping(block_size)
    for index, read in enumerate(reads):
        if index in cpu_attention:
            (beside if concurrent else in_order).join(CpuAttentionGroup, read)
        elif read.physical_id < resident_blocks:
            in_order.join(ResidentGroup, read)
        else:
            in_order.join(RingGroup, read, most=group_slots)
    for item in [*in_order.items, *beside.items]:
        item.table = _run_table(item, sequences, block_size, resident_blocks)
    groups = [group for group in beside.items if isinstance(group, CpuAttentionGroup)]
    readers = {reader for group in groups for read in group.reads for reader in read.readers}
    rows = max((sequences[reader].query_start + sequences[reader].query_len for reader in readers), default=0)
    return LayerPlan(in_order.items, groups, rows)


class _Grouping:
    """Puts visits into runs. A visit joins the last run of its kind, if none of its readers was met elsewhere since and
    none would have a gap in it."""

    def __init__(self, block_size: int) -> None:
        self.items: list[BlockGroup] = []
        self._block_size = block_size
        self._last: dict[type[BlockGroup], int] = {}  # the last run of each kind, as an index
        self._met: dict[int, tuple[int, int]] = {}  # of each reader: its last item's index, and the position after it

    def join(self, kind: type[BlockGroup], read: BlockRead, most: int | None = None) -> None:
        """`most`: visits of a run."""
        at = self._last.get(kind, -1)
        if at < 0 or len(self.items[at].reads) == most or not self._fits(read, at):
            at = self._last[kind] = len(self.items)
            self.items.append(kind())
        self.items[at].reads.append(read)
        self._met.update(dict.fromkeys(read.readers, (at, read.first_position + self._block_size)))

    def _fits(self, read: BlockRead, at: int) -> bool:
        met = [self._met[reader] for reader in read.readers if reader in self._met]
        return all(item < at or (item == at and end == read.first_position) for item, end in met)


def _run_table(
    group: BlockGroup, sequences: Sequence[SequenceMetadata], block_size: int, resident_blocks: int
) -> AttentionMetadata:
    """One segment for each sequence: its blocks within a run follow each other without a gap."""
    first_host_id = resident_blocks if isinstance(group, CpuAttentionGroup) else 0
    by_reader: dict[int, list[tuple[BlockRead, int]]] = {}
    for slot, read in enumerate(group.reads):
        index = slot if isinstance(group, RingGroup) else read.physical_id - first_host_id
        for reader in read.readers:
            by_reader.setdefault(reader, []).append((read, index))
    return AttentionMetadata([_segment(sequences[reader], blocks, block_size) for reader, blocks in by_reader.items()])


def _segment(seq: SequenceMetadata, blocks: Sequence[tuple[BlockRead, int]], block_size: int) -> KVMetadata:
    """(visit, index in the pool) pairs as `seq` sees them; rows before a block are left to the causal mask."""
    first = blocks[0][0].first_position
    return KVMetadata(
        query_start=seq.query_start,
        query_len=seq.query_len,
        query_position=seq.context_len,
        first_position=first,
        kv_end=min(seq.total_len, first + len(blocks) * block_size),
        blocks=[index for _, index in blocks],
    )
