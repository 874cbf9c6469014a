"""The order in which a layer attends to the KV blocks of a step. Computed once a step, used for every layer."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from nanovllm.data.kv_groups import first_visible_block
from nanovllm.kvcache.offload_engine import BlockTokens
from nanovllm.ops.attention import AttentionMetadata, SequenceMetadata


@dataclass(slots=True)
class BlockRead(BlockTokens):
    """A block that sequences of the step attend to, on either tier. A block with new tokens has one reader."""

    first_position: int
    readers: list[int]  # indices of the sequences

    @property
    def held_tokens(self) -> int:
        """Tokens in the block once the new ones are written."""
        return self.stored_tokens + self.new_tokens


@dataclass(slots=True)
class BlockGroup:
    """Block reads of one pool that are attended in one call. `indices` and the ids in `table` index that pool."""

    reads: list[BlockRead] = field(default_factory=list)
    indices: Sequence[int] = ()  # of the blocks of `reads`
    written: list[tuple[int, BlockRead]] = field(default_factory=list)  # index and read of blocks that get new tokens
    table: AttentionMetadata = field(default_factory=lambda: AttentionMetadata(()))


class ResidentGroup(BlockGroup):
    """Blocks on the device."""


class RingGroup(BlockGroup):
    """Host blocks that are loaded into as many ring slots. `indices` count the slots of the group from 0."""


class CpuAttentionGroup(BlockGroup):
    """Host blocks that the CPU attends to."""

    @property
    def stored_tokens(self) -> int:
        return sum(read.stored_tokens for read in self.reads)

    @property
    def read_tokens(self) -> int:
        """Like `stored_tokens`, but a shared block counts once for each reader."""
        return sum(read.stored_tokens * len(read.readers) for read in self.reads)


@dataclass(slots=True)
class LayerPlan:
    """The attention of one layer: `items` in order on the compute stream, `concurrent` on the CPU's own stream."""

    items: list[BlockGroup] = field(default_factory=list)
    concurrent: list[CpuAttentionGroup] = field(default_factory=list)
    concurrent_rows: int = 0  # rows [0, concurrent_rows) of the batch are the queries of `concurrent`

    @property
    def ring(self) -> list[RingGroup]:
        return [item for item in self.items if isinstance(item, RingGroup)]

    @property
    def cpu_attention_groups(self) -> list[CpuAttentionGroup]:
        return [item for item in self.items if isinstance(item, CpuAttentionGroup)] + self.concurrent


def plan_block_reads(sequences: Sequence[SequenceMetadata], block_size: int, window: int | None) -> list[BlockRead]:
    """All block reads of one layer, ordered by the block's index in its sequence. A shared block is read once.

    sequences: with the full block tables of the layer's KV group.

    Every sequence reads its blocks in order, whatever the other sequences are and on whichever tier the blocks are, so
    its result depends on neither. Sequences share a block at the same index only, and only a full one.
    """
    reads: list[BlockRead] = []
    visible = [first_visible_block(seq.context_len, window, block_size) for seq in sequences]
    for index in range(max((len(s.block_table) for s in sequences), default=0)):
        at_id: dict[int, BlockRead] = {}
        first = index * block_size
        for reader, seq in enumerate(sequences):
            if not visible[reader] <= index < len(seq.block_table):
                continue
            physical_id = seq.block_table[index]
            if physical_id in at_id:
                at_id[physical_id].readers.append(reader)
                continue
            stored = max(0, min(seq.context_len - first, block_size))
            held = min(seq.total_len - first, block_size)
            at_id[physical_id] = BlockRead(physical_id, stored, held - stored, first, [reader])
        reads.extend(at_id.values())
    return reads


def group_block_reads(
    reads: Sequence[BlockRead],
    sequences: Sequence[SequenceMetadata],
    block_size: int,
    resident_blocks: int,
    group_slots: int,
    cpu_attention: Collection[int] = (),
    concurrent: bool = False,
) -> LayerPlan:
    """Group the block reads into as few attention calls as possible, each sequence reading its blocks in order.

    cpu_attention: indices of the reads that the CPU attends to: concurrently with the device, or else in order with the
    other groups. A ring group has at most `group_slots` blocks.
    """
    in_order = _Grouping(block_size)
    aside = _Grouping(block_size)
    for index, read in enumerate(reads):
        if index in cpu_attention:
            (aside if concurrent else in_order).append(CpuAttentionGroup, read)
        elif read.physical_id < resident_blocks:
            in_order.append(ResidentGroup, read)
        else:
            in_order.append(RingGroup, read, group_slots)
    for item in [*in_order.items, *aside.items]:
        _locate(item, sequences, block_size, resident_blocks)
    groups = [group for group in aside.items if isinstance(group, CpuAttentionGroup)]
    readers = {reader for group in groups for read in group.reads for reader in read.readers}
    rows = max((sequences[reader].query_start + sequences[reader].query_len for reader in readers), default=0)
    return LayerPlan(in_order.items, groups, rows)


@dataclass(slots=True)
class _Grouping:
    """Collects block reads into groups."""

    block_size: int
    items: list[BlockGroup] = field(default_factory=list)
    last: dict[type[BlockGroup], int] = field(default_factory=dict)  # index of the last group of each kind
    progress: dict[int, tuple[int, int]] = field(default_factory=dict)  # of each reader: last group, next position

    def append(self, kind: type[BlockGroup], read: BlockRead, max_reads: int | None = None) -> None:
        """Add the block to the last group of its kind, or to a new one if that is full or breaks a reader's order."""
        at = self.last.get(kind, -1)
        if at < 0 or len(self.items[at].reads) == max_reads or not self._may_join(at, read):
            at = self.last[kind] = len(self.items)
            self.items.append(kind())
        self.items[at].reads.append(read)
        self.progress.update(dict.fromkeys(read.readers, (at, read.first_position + self.block_size)))

    def _may_join(self, at: int, read: BlockRead) -> bool:
        """Whether no reader is in a later group already, and the readers that are in this group read on in it."""
        for reader in read.readers:
            last, next_position = self.progress.get(reader, (-1, 0))
            if last > at or (last == at and next_position != read.first_position):
                return False
        return True


def _locate(group: BlockGroup, sequences: Sequence[SequenceMetadata], block_size: int, resident_blocks: int) -> None:
    """Set where the blocks of the group are in its pool, and what each sequence attends to there."""
    if isinstance(group, RingGroup):
        group.indices = range(len(group.reads))
    else:
        first_id = resident_blocks if isinstance(group, CpuAttentionGroup) else 0  # of the pool
        group.indices = [read.physical_id - first_id for read in group.reads]
    blocks = list(zip(group.indices, group.reads, strict=True))
    group.written = [(index, read) for index, read in blocks if read.new_tokens]
    of_readers: dict[int, list[tuple[int, BlockRead]]] = {}
    for index, read in blocks:
        for reader in read.readers:
            of_readers.setdefault(reader, []).append((index, read))
    group.table = AttentionMetadata([_part(sequences[reader], of, block_size) for reader, of in of_readers.items()])


def _part(seq: SequenceMetadata, blocks: Sequence[tuple[int, BlockRead]], block_size: int) -> SequenceMetadata:
    """The sequence's attention over neighbouring blocks, given with their indices in the pool.

    It has all query rows of the sequence: the causal mask excludes rows before the blocks.
    """
    first = blocks[0][1].first_position
    kv_end = min(seq.total_len, first + len(blocks) * block_size)
    indices = [index for index, _ in blocks]
    return SequenceMetadata(seq.query_start, seq.query_len, seq.context_len, first, kv_end, indices)
