"""The block manager: which sequences hold which KV blocks, what the blocks contain, and on which tier they are.

Every block on the device or host tier is *used* (referenced by sequences), *cached* (unreferenced, and the prefix cache
can find it) or *free*; the three counts always add up to the total. Blocks on the swap tier are counted separately:
preempted sequences reference them, and they are swapped in before attention reads them.

Sequences share full blocks only. If a cached block begins with a sequence's next tokens and then differs, or is not
full, the sequence gets a copy of that part (`_continue_block`).

A sequence has a block table for each KV group. In groups without a window it holds blocks for all its tokens, from its
admission on. In groups with a window it holds those that the next step sees and writes: `grow` adds blocks for a chunk,
and after the step `release_hidden` lets go of those that lie behind the window.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace
from enum import Enum, IntEnum
from itertools import islice

from nanovllm.data.batch import BlockMove, Tier
from nanovllm.data.kv_groups import HOLE, KVCapacity, KVGroup, KVGroups
from nanovllm.engine.prefix_cache import Block, Evictor, PrefixCache, PrefixCacheStats, PrefixHit
from nanovllm.engine.request import Sequence
from nanovllm.engine.step_hook import StepHook
from nanovllm.kvcache.hybrid_manager import HybridManager, IdPool

WATERMARK = 0.01  # fraction of the blocks that admission leaves free, so that running sequences can grow
MAX_PROMOTIONS_PER_STEP = 4  # a step waits for its moves before it computes


class AllocStatus(Enum):
    OK = "ok"
    LATER = "later"
    NEVER = "never"


class KVBlockState(IntEnum):
    """What a physical block is used for, see above. Fits a byte. `engine.view` tells the last two apart from USED."""

    FREE = 0
    CACHED = 1
    USED = 2
    FILLING = 3  # a running request has it, and some of its tokens are still to be computed
    IN_FLIGHT = 4  # on the host, and a copy to or from a ring slot or the layer buffer is under way


def held_blocks(tables: Iterable[Seq[int]]) -> list[int]:
    """The block ids in block tables, without holes."""
    return [block_id for table in tables for block_id in table if block_id != HOLE]


class BlockManager:
    """Allocates KV blocks to sequences, shares full blocks by content, and prefers the device tier for active blocks.

    Block ids name blocks for as long as they exist; physical block ids say where their content is. Moving a block
    changes its physical id only.
    """

    def __init__(
        self,
        num_device_blocks: int,
        num_host_blocks: int,
        groups: KVGroups,
        enable_prefix_caching: bool = True,
        num_swap_blocks: int = 0,
        hash_block_size: int | None = None,
        chunk: int | None = None,
    ) -> None:
        """hash_block_size: tokens that one hash of the prefix cache covers; None means `hash_block_size_of`.

        chunk: most tokens of a sequence in a step, which bounds the blocks of windows; None: any number.
        """
        self.groups = groups
        self.tiers = HybridManager(num_device_blocks, num_host_blocks, num_swap_blocks)
        self.num_blocks = num_device_blocks + num_host_blocks
        self.watermark = int(WATERMARK * self.num_blocks)
        self.capacity = KVCapacity(groups, chunk, self.num_blocks, self.watermark)
        self.prefix_cache = PrefixCache(groups, enable_prefix_caching, hash_block_size)
        self.num_copied_blocks = 0  # by copy-on-write
        self.most_used = self.most_used_on_device = 0  # blocks, in one step
        self.hooks: list[StepHook] = []  # called in this order; to be filled before the first request
        self.reset()

    def reset(self, sequences: Seq[Sequence] = ()) -> None:
        """Forget all blocks, used and cached. sequences: all that may hold some; afterwards none does."""
        for hook in self.hooks:
            hook.reset(sequences)
        for seq in sequences:
            self._clear(seq)
        tiers = self.tiers
        self.tiers = HybridManager(tiers.num_device_blocks, tiers.num_host_blocks, tiers.num_swap_blocks)
        self._ids = IdPool(0, self.num_blocks + tiers.num_swap_blocks)
        self._blocks: dict[int, Block] = {}  # used, cached and swapped out
        self.prefix_cache.clear()
        self._evictors = {tier: Evictor() for tier in Tier}  # cached blocks
        self._clock = 0  # time of last use: how many blocks had become unreferenced before
        self._moves: list[BlockMove] = []

    def _clear(self, seq: Sequence) -> None:
        """The sequence holds no blocks from now on."""
        seq.block_tables = []
        seq.first_held = []
        seq.num_computed = seq.num_ahead = 0
        seq.part_end = 0
        seq.pending = None

    # ---- counts

    @property
    def stats(self) -> PrefixCacheStats:
        return self.prefix_cache.stats

    @property
    def num_free(self) -> int:
        return self.tiers.pools[Tier.DEVICE].num_free + self.tiers.pools[Tier.HOST].num_free

    @property
    def num_cached(self) -> int:
        return sum(len(evictor) for evictor in self._evictors.values())

    @property
    def num_used(self) -> int:
        return len(self._blocks) - self.num_cached - self.num_swapped

    @property
    def num_used_on_device(self) -> int:
        return self.tiers.num_device_blocks - self.tiers.pools[Tier.DEVICE].num_free - len(self._evictors[Tier.DEVICE])

    def count_used(self) -> None:
        """Note how many blocks the step has that is now scheduled."""
        self.most_used = max(self.most_used, self.num_used)
        self.most_used_on_device = max(self.most_used_on_device, self.num_used_on_device)

    @property
    def num_swapped(self) -> int:
        return self.tiers.num_swap_blocks - self.tiers.pools[Tier.SWAP].num_free

    @property
    def num_allocatable(self) -> int:
        """Blocks that can be allocated now: free blocks, and cached ones after their eviction."""
        return self.num_free + self.num_cached

    # ---- allocation

    def can_allocate(self, seq: Sequence, extra_blocks: int = 0) -> AllocStatus:
        """Whether what a waiting sequence holds at once and `extra_blocks` more fit, with the watermark left free."""
        needed = self.capacity.most_blocks(seq.end) + extra_blocks
        if self.num_blocks - needed < self.watermark:
            return AllocStatus.NEVER
        hits = held_blocks(self._find(seq).tables)
        unused_hits = sum(self._blocks[block_id].ref_count == 0 for block_id in hits)
        left = self.num_allocatable - unused_hits - (needed - len(hits))
        return AllocStatus.OK if left >= self.watermark else AllocStatus.LATER

    def allocate(self, seq: Sequence) -> None:
        """Give a waiting sequence the blocks of its next step; a cached prefix counts as computed.

        What a hook fills beyond that counts as computed too, while it is still being filled. Then `seq.pending` is set,
        and the sequence must not run before `end_pending`.
        """
        hit = self._find(seq)
        on_host = self._num_on_host(hit)
        for block_id in held_blocks(hit.tables):
            self._acquire(block_id)
        seq.block_tables = hit.tables
        seq.num_computed = hit.num_tokens
        seq.first_held = [group.first_visible(hit.num_tokens) for group in self.groups]
        if any(hit.parts):
            self._continue_parts(seq, hit)
        seq.num_cached_on_host = on_host
        if (end := self.reach(seq, hit.num_tokens)) > hit.num_tokens:
            self.hold_beyond(seq, end)
        self._extend(seq)
        for hook in self.hooks:
            hook.admitted(seq, hit)
        if seq.pending is None:
            self.stats.count_hit(seq)

    def reach(self, seq: Sequence, begin: int) -> int:
        """Up to which token hooks can fill the blocks of a waiting sequence that has `begin` tokens."""
        return max((hook.reach(seq, begin) for hook in self.hooks), default=begin)

    def end_pending(self, seq: Sequence) -> bool:
        """What a sequence waited for has ended: its blocks are filled, and it can run.

        False if that failed: then the sequence must be freed.
        """
        pending = seq.pending
        assert pending is not None
        seq.pending = None
        if not pending.succeeds():
            return False
        self.register_computed(seq, seq.num_computed - pending.num_tokens)
        self.stats.count_hit(seq)
        return True

    def _num_on_host(self, hit: PrefixHit) -> int:
        """Tokens of a hit whose blocks are on the host, in the first KV group."""
        size = self.groups[0].block_size
        part = hit.parts[0]
        blocks = [*hit.tables[0], *([] if part is None else [part.block_id])]
        return sum(
            min(size, hit.num_tokens - index * size)
            for index, block_id in enumerate(blocks)
            if block_id != HOLE and self.tiers.tier_of(block_id) is Tier.HOST
        )

    def _continue_parts(self, seq: Sequence, hit: PrefixHit) -> None:
        """Add to each group's table the block that begins with the cached tokens after its full blocks."""
        unreferenced = [part is not None and part.ref_count == 0 for part in hit.parts]
        for part in hit.parts:
            if part is not None:
                self._acquire(part.block_id)  # so that it is not evicted for the copy of another
        for index, (part, group) in enumerate(zip(hit.parts, self.groups, strict=True)):
            if part is not None:
                num_tokens = hit.num_tokens % group.block_size
                needed = self._num_lacking(seq)
                seq.block_tables[index].append(self._continue_block(part, unreferenced[index], num_tokens, needed))
        shared = min(hit.num_tokens // group.block_size * group.block_size for group in self.groups)
        self.register_computed(seq, shared)

    def num_to_grow(self, sequences: Iterable[Sequence]) -> int:
        """Blocks that `grow` allocates: for new tokens, and for copies of shared blocks that are written next."""
        needed = 0
        writers = dict[int, int]()
        for seq in sequences:
            needed += self._num_lacking(seq)
            for _, _, block_id in self._shared_and_written(seq):
                writers[block_id] = writers.get(block_id, 0) + 1
        for block_id, count in writers.items():  # the last sequence to write needs no copy
            needed += min(count, self._blocks[block_id].ref_count - 1)
        return needed

    def grow(self, sequences: Iterable[Sequence]) -> None:
        """Give running sequences the blocks of their next step, and copy shared blocks that they write next.

        The caller has checked that `num_to_grow` blocks can be allocated.
        """
        for seq in sequences:
            for table, index, block_id in self._shared_and_written(seq):
                table[index] = self._copy(block_id)
                self.num_copied_blocks += 1
                block_size = self._group_of(table[index]).block_size
                self.register_computed(seq, index * block_size)
            self._extend(seq)

    def _shared_and_written(self, seq: Sequence) -> list[tuple[list[int], int, int]]:
        """The shared blocks that the sequence writes next: each with its block table and its index there."""
        shared = []
        for table, group in zip(seq.block_tables, self.groups, strict=True):
            index = seq.num_computed // group.block_size
            if index < len(table) and table[index] != HOLE and self._blocks[table[index]].ref_count > 1:
                shared.append((table, index, table[index]))
        return shared

    def _wanted(self, seq: Sequence, group: KVGroup) -> int:
        """Where a sequence's block table of the group must end before the next step."""
        if group.window is None or self.capacity.chunk is None:
            return group.num_blocks(seq.end)
        if seq.part_end:
            return group.num_blocks(seq.part_end)
        return group.num_blocks(min(seq.end, seq.num_computed + self.capacity.chunk))

    def _num_lacking(self, seq: Sequence) -> int:
        """Blocks that `_extend` allocates."""
        tables = zip(seq.block_tables, self.groups, strict=True)
        return sum(max(0, self._wanted(seq, group) - len(table)) for table, group in tables)

    def _extend(self, seq: Sequence) -> None:
        for index, (table, group) in enumerate(zip(seq.block_tables, self.groups, strict=True)):
            while len(table) < self._wanted(seq, group):
                table.append(self._new_block(index))

    # ---- looking ahead

    def num_ahead(self, seq: Sequence, most: int) -> int:
        """For how many tokens beyond its own, up to `most`, there are blocks for a sequence."""
        while most and self._num_needed_ahead(seq, most) > self.num_allocatable:
            most -= 1
        return most

    def look_ahead(self, seq: Sequence, most: int) -> int:
        """Give a sequence the blocks of up to `most` tokens beyond its own. Returns for how many it has them.

        They are for one step, after which `end_look_ahead` takes them back.
        """
        count = self.num_ahead(seq, most)
        for index, (table, group) in enumerate(zip(seq.block_tables, self.groups, strict=True)):
            while count and len(table) < group.num_blocks(seq.end + count):
                table.append(self._new_block(index))
        seq.num_ahead = count
        return count

    def end_look_ahead(self, seq: Sequence) -> None:
        """Free the blocks beyond the sequence's tokens. They hold nothing that is right, and none is cached."""
        seq.num_ahead = 0
        for hook in self.hooks:
            hook.looked_ahead(seq)
        for table, group in zip(seq.block_tables, self.groups, strict=False):
            while len(table) > group.num_blocks(seq.end):
                self._drop_reference(table.pop())

    def _num_needed_ahead(self, seq: Sequence, count: int) -> int:
        tables = zip(seq.block_tables, self.groups, strict=True)
        return sum(max(0, group.num_blocks(seq.end + count) - len(table)) for table, group in tables)

    # ---- windows

    def release_hidden(self, seq: Sequence) -> None:
        """Release the blocks that no token still to be computed sees. Those with hashes stay cached."""
        for index, table in enumerate(seq.block_tables):
            first = self.groups[index].first_visible(seq.num_computed)
            self._punch(table, range(seq.first_held[index], min(first, len(table))))
            seq.first_held[index] = max(first, seq.first_held[index])

    def hold_part(self, seq: Sequence, end: int, firsts: Seq[int]) -> bool:
        """Give a sequence the blocks of the part of its prompt up to `end`, which becomes its `part_end`.

        Returns False, with nothing changed, if there are too few. firsts: of each group the first block to hold beyond
        what is computed, if the group has a window.
        """
        spans = []
        for table, group, first in zip(seq.block_tables, self.groups, firsts, strict=True):
            filled = group.num_blocks(seq.num_computed) if group.window is not None else len(table)
            spans.append((table, filled, max(filled, first)))
        wanted = sum(
            max(0, group.num_blocks(end) - first) for (_, _, first), group in zip(spans, self.groups, strict=True)
        )
        if wanted > self.num_allocatable + sum(len(table) - filled for table, filled, _ in spans):
            return False
        for table, filled, first in spans:
            self._punch(table, range(filled, len(table)))
            table[filled:] = [HOLE] * (first - filled)
        for index, (table, group) in enumerate(zip(seq.block_tables, self.groups, strict=True)):
            table += [self._new_block(index) for _ in range(len(table), group.num_blocks(end))]
        seq.part_end = end
        return True

    def hold_beyond(self, seq: Sequence, end: int) -> bool:
        """Give a sequence the blocks up to its token `end`, whose content comes from elsewhere.

        Returns False, with nothing changed, if there are too few. In groups with a window it lets go of the blocks that
        no token after `end` sees.
        """
        tables = list(zip(seq.block_tables, self.groups, strict=True))
        firsts = [max(len(table), group.first_visible(end)) for table, group in tables]
        begin = seq.num_computed
        seq.num_computed = end
        needed = sum(max(0, self._wanted(seq, group) - first) for (_, group), first in zip(tables, firsts, strict=True))
        if needed > self.num_allocatable:
            seq.num_computed = begin
            return False
        for index, ((table, group), first) in enumerate(zip(tables, firsts, strict=True)):
            table += [HOLE] * (first - len(table))
            table += [self._new_block(index) for _ in range(len(table), group.num_blocks(end))]
        self.release_hidden(seq)
        return True

    def _punch(self, table: list[int], indices: range) -> None:
        """Leave holes at these indices."""
        for index in indices:
            if table[index] != HOLE:
                self._drop_reference(table[index])
                table[index] = HOLE

    def free(self, seq: Sequence) -> None:
        """Release a sequence's blocks. Those that the prefix cache can find stay cached."""
        if seq.pending is not None:
            seq.pending.cancel()
        for hook in self.hooks:
            hook.freed(seq)
        tables = zip(seq.block_tables, self.groups, strict=False)
        blocks = [(at * group.block_size, block) for table, group in tables for at, block in enumerate(table)]
        # From the last token to the first, so that the end of a prefix is evicted before its start.
        for _, block_id in sorted(blocks, key=lambda block: block[0], reverse=True):
            if block_id != HOLE:
                self._drop_reference(block_id)
        self._clear(seq)

    # ---- sequences of one request

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Share all computed blocks of the parent with the child, including a partly filled last block."""
        child.block_tables = list(map(list, parent.block_tables))
        child.first_held = list(parent.first_held)
        child.num_computed = parent.num_computed
        child.block_hashes = parent.block_hashes[: parent.num_computed // self.prefix_cache.hash_block_size]
        for block_id in child.blocks:
            self._blocks[block_id].ref_count += 1
        for hook in self.hooks:
            hook.forked(parent, child)

    def swap_out(self, sequences: Seq[Sequence]) -> dict[int, int] | None:
        """Move the computed blocks of one request to the swap tier, shared blocks once.

        Blocks that other requests reference too are copied instead; blocks without content are freed. Returns
        {source physical id: destination physical id}, or None, with nothing changed, if the swap tier is too full or a
        hook does not agree.
        """
        holders = Counter(block_id for seq in sequences for block_id in held_blocks(self._computed(seq)))
        if len(holders) > self.tiers.pools[Tier.SWAP].num_free:
            return None
        if not all(hook.swap_out(sequences) for hook in self.hooks):
            return None
        moves: list[BlockMove] = []
        swapped = {block_id: self._swap_out(block_id, count, moves) for block_id, count in holders.items()}
        for seq in sequences:
            computed = self._computed(seq)
            for table, kept in zip(seq.block_tables, computed, strict=True):
                self._punch(table, range(len(kept), len(table)))
            seq.block_tables = [[swapped.get(block_id, HOLE) for block_id in table] for table in computed]
            seq.part_end = 0
        self._moves += moves
        return {move.src: move.dst for move in moves}

    def _computed(self, seq: Sequence) -> list[list[int]]:
        """Its block tables without the blocks that have no content; none for a sequence that holds no blocks."""
        tables = zip(seq.block_tables, self.groups, strict=False)
        return [table[: group.num_blocks(seq.num_computed)] for table, group in tables]

    def num_swapped_blocks(self, sequences: Iterable[Sequence]) -> int:
        """Blocks that `swap_in` allocates on the device and host tiers."""
        return len({block_id for seq in sequences for block_id in seq.blocks})

    def swap_in(self, sequences: Seq[Sequence]) -> dict[int, int]:
        """Undo `swap_out`, and return as it does. The caller has checked that enough blocks can be allocated."""
        moved: dict[int, int] = {}
        for block_id in dict.fromkeys(block_id for seq in sequences for block_id in seq.blocks):
            move = self.tiers.move(block_id, self._tier_for_new_block())
            self._moves.append(move)
            moved[move.src] = move.dst
        for seq in sequences:
            self.register_computed(seq, 0)
        return moved

    def _swap_out(self, block_id: int, holders: int, moves: list[BlockMove]) -> int:
        """Move or copy a block with `holders` references to the swap tier; returns its id there."""
        block = self._blocks[block_id]
        if block.ref_count == holders:
            self.prefix_cache.forget(block)  # swapped blocks cannot be attended
            moves.append(self.tiers.move(block_id, Tier.SWAP))
            return block_id
        copy = self._add_block(Tier.SWAP, block.group)
        self._blocks[copy].ref_count = holders
        block.ref_count -= holders
        moves.append(BlockMove(self.tiers.physical_ids[block_id], self.tiers.physical_ids[copy], keeps_source=True))
        return copy

    # ---- prefix cache

    def num_cached_tokens(self, seq: Sequence) -> int:
        """Tokens at the start of a waiting sequence that the prefix cache holds."""
        return self._find(seq).num_tokens

    def next_hash(self, running: Sequence) -> bytes | None:
        """The hash of the hash block that a running sequence computes next; None beyond its last whole one.

        Of a pending sequence it is the first that it waits for.
        """
        begin = running.num_computed - (0 if running.pending is None else running.pending.num_tokens)
        return self.prefix_cache.hash_after(running, begin, running.end)

    def missing_hash(self, waiting: Sequence) -> bytes | None:
        """The hash of the first hash block that a waiting sequence could find in the cache and does not.

        If a running sequence is going to compute it, it computes it next: what it has computed is cached.
        """
        return self.prefix_cache.hash_after(waiting, self.prefix_cache.find(waiting).num_tokens, waiting.num_cacheable)

    def register_computed(self, seq: Sequence, previously_computed: int) -> None:
        """Add the tokens computed since then to the prefix cache, as far as they complete hash blocks."""
        size = self.prefix_cache.hash_block_size
        if previously_computed // size < seq.num_computed // size:  # most decode steps complete no hash block
            self.prefix_cache.register(seq, previously_computed, self._blocks)

    def reset_prefix_cache(self) -> None:
        """Forget all cached content. Used blocks stay with their sequences, and are not found any more."""
        for evictor in self._evictors.values():
            while evictor:
                self._evict(evictor.oldest()[1])
        for block in self._blocks.values():
            self.prefix_cache.forget(block)
        for hook in self.hooks:
            hook.forget()

    def _find(self, seq: Sequence) -> PrefixHit:
        """What a waiting sequence need not compute."""
        return self.prefix_cache.find(seq, self._may_go_on_after if self.hooks else None)

    def _may_go_on_after(self, content_hash: bytes) -> bool:
        return all(hook.may_go_on_after(content_hash) for hook in self.hooks)

    # ---- physical blocks and tiers

    def physical_ids(self, seq: Sequence, num_tokens: int) -> list[list[int]]:
        """For each group the physical ids of the blocks of the sequence's first `num_tokens` tokens; holes stay."""
        physical_ids = self.tiers.physical_ids
        tables = zip(seq.block_tables, seq.first_held, self.groups, strict=True)
        return [
            [HOLE] * min(first, group.num_blocks(num_tokens))
            + [
                HOLE if block_id == HOLE else physical_ids[block_id]
                for block_id in table[first : group.num_blocks(num_tokens)]
            ]
            for table, first, group in tables
        ]

    def block_states(self) -> bytes:
        """The `KVBlockState` of every physical block, in the order of the physical ids; swapped blocks are used."""
        states = bytearray(self.num_blocks + self.tiers.num_swap_blocks)
        for block_id, block in self._blocks.items():
            states[self.tiers.physical_ids[block_id]] = KVBlockState.USED if block.ref_count else KVBlockState.CACHED
        return bytes(states)

    def promote(self, sequences: Iterable[Sequence]) -> None:
        """Move full host blocks of these sequences to device blocks that are free or cached.

        That loads a block once, instead of in every step.
        """
        if self.tiers.pools[Tier.HOST].num_free == self.tiers.num_host_blocks:
            return
        promoted = 0
        for block_id in (block_id for seq in sequences for block_id in self._full(seq)):
            if promoted == MAX_PROMOTIONS_PER_STEP or not self._can_vacate_device_block:
                return
            if self.tiers.tier_of(block_id) is Tier.HOST:
                self._vacate_device_block()
                self._move(block_id, Tier.DEVICE)
                promoted += 1

    def _full(self, seq: Sequence) -> Iterator[int]:
        """The blocks of a sequence that it has filled."""
        for table, first, group in zip(seq.block_tables, seq.first_held, self.groups, strict=True):
            for block_id in islice(table, first, seq.num_computed // group.block_size):
                if block_id != HOLE:
                    yield block_id

    @property
    def has_moves(self) -> bool:
        """Whether moves are decided that `take_moves` has not returned yet."""
        return bool(self._moves)

    def take_moves(self) -> list[BlockMove]:
        """The moves decided since the last call, in the order in which they must be carried out."""
        moves = self._moves
        self._moves = []
        return moves

    @property
    def _can_vacate_device_block(self) -> bool:
        return self.tiers.pools[Tier.DEVICE].num_free > 0 or bool(self._evictors[Tier.DEVICE])

    def _vacate_device_block(self) -> None:
        """Free a device block: its least recently used cached block moves to the host.

        If the host is full, the least recently used cached block of both tiers is evicted.
        """
        if self.tiers.pools[Tier.DEVICE].num_free:
            return
        on_device = self._evictors[Tier.DEVICE]
        on_host = self._evictors[Tier.HOST]
        last_used, leaving = on_device.oldest()
        if not self.tiers.pools[Tier.HOST].num_free:
            if not on_host or last_used < on_host.oldest()[0]:
                self._evict(leaving)
                return
            self._evict(on_host.oldest()[1])
        self._move(leaving, Tier.HOST, self._blocks[leaving].num_cached_tokens)
        on_host.add(leaving, on_device.remove(leaving))

    # ---- single blocks

    def _group_of(self, block_id: int) -> KVGroup:
        return self.groups[self._blocks[block_id].group]

    def _new_block(self, group: int) -> int:
        """A block for new content of a group, on the device if possible."""
        return self._add_block(self._tier_for_new_block(), group)

    def _tier_for_new_block(self) -> Tier:
        """The tier for the next block; frees a block there if it is full."""
        if self._can_vacate_device_block:
            self._vacate_device_block()
            return Tier.DEVICE
        if not self.tiers.pools[Tier.HOST].num_free:
            self._evict(self._evictors[Tier.HOST].oldest()[1])
        return Tier.HOST

    def _add_block(self, tier: Tier, group: int) -> int:
        block_id = self._ids.allocate()
        self._blocks[block_id] = Block(block_id, group)
        self.tiers.assign(block_id, tier)
        return block_id

    def _copy(self, block_id: int, num_tokens: int | None = None) -> int:
        """A new block with the same content, or its first `num_tokens` tokens; drops one reference to the old one."""
        copy = self._new_block(self._blocks[block_id].group)
        src = self.tiers.physical_ids[block_id]
        dst = self.tiers.physical_ids[copy]
        group = self._blocks[block_id].group
        self._moves.append(BlockMove(src, dst, keeps_source=True, num_tokens=num_tokens, group=group))
        self._drop_reference(block_id)
        return copy

    def _continue_block(self, cached: Block, was_unreferenced: bool, num_tokens: int, num_needed: int) -> int:
        """A block with the first `num_tokens` tokens of `cached`, which one sequence will fill.

        The sequence has a reference to `cached`. The result is a copy if another sequence uses `cached`, or if that
        holds more tokens and there are enough blocks for the `num_needed` that the sequence still needs. Otherwise it
        is `cached` itself, whose further tokens are forgotten.
        """
        has_more = cached.num_cached_tokens > num_tokens
        if not was_unreferenced or (has_more and self.num_allocatable >= num_needed):
            self.stats.copied_blocks += 1
            self.stats.copied_tokens += num_tokens
            return self._copy(cached.block_id, num_tokens)
        if has_more:
            self.prefix_cache.forget(cached)
        if self.tiers.tier_of(cached.block_id) is Tier.HOST and self._can_vacate_device_block:
            self._vacate_device_block()
            self._move(cached.block_id, Tier.DEVICE, num_tokens)
        return cached.block_id

    def _move(self, block_id: int, tier: Tier, num_tokens: int | None = None) -> None:
        """Move a block to another tier, with all its tokens or the first `num_tokens`."""
        move = self.tiers.move(block_id, tier)
        is_full = num_tokens in (None, self._group_of(block_id).block_size)
        group = self._blocks[block_id].group
        self._moves.append(move if is_full else replace(move, num_tokens=num_tokens, group=group))

    def _acquire(self, block_id: int) -> None:
        block = self._blocks[block_id]
        if block.ref_count == 0:
            self._evictors[self.tiers.tier_of(block_id)].remove(block_id)
        block.ref_count += 1

    def _drop_reference(self, block_id: int) -> None:
        block = self._blocks[block_id]
        block.ref_count -= 1
        if block.ref_count > 0:
            return
        if block.hashes:
            self._clock += 1
            self._evictors[self.tiers.tier_of(block_id)].add(block_id, self._clock)
        else:
            self._discard(block_id)

    def _evict(self, block_id: int) -> None:
        self.prefix_cache.forget(self._blocks[block_id])
        self._evictors[self.tiers.tier_of(block_id)].remove(block_id)
        self._discard(block_id)

    def _discard(self, block_id: int) -> None:
        del self._blocks[block_id]
        self.tiers.release(block_id)
        self._ids.free(block_id)
