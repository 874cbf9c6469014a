"""The block manager: which sequences hold which KV blocks. `BlockPool` has the blocks themselves.

Steps see only full blocks shared: `fork` shares a partly filled one too, and `grow` copies it before it is written. If
a cached block begins with a sequence's next tokens and then differs, or is not full, the sequence gets a copy of that
part, or the block itself if no other sequence has it (`BlockPool.continue_block`). A new block is on the device while
one there is free or merely cached, else on the host (`BlockPool.new_block`).

A sequence has a block table for each KV group. In groups without a window it holds blocks for all its tokens, from its
admission on. In groups with a window it holds those that the next step sees and writes: `grow` adds blocks for a chunk,
and after the step `release_hidden` lets go of those that lie behind the window. They stay cached until others need the
room; `KeptWindows` says which of them are worth keeping.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from enum import Enum
from itertools import islice

from nanovllm.data.batch import Tier
from nanovllm.data.kv_groups import HOLE, KVCapacity, KVGroup, KVGroups
from nanovllm.engine.block_pool import BlockPool
from nanovllm.engine.kept_windows import KeptWindows
from nanovllm.engine.prefix_cache import PrefixCache, PrefixCacheStats, PrefixHit
from nanovllm.engine.request import Sequence
from nanovllm.engine.step_hook import StepHook
from nanovllm.kvcache.hybrid_manager import HybridManager

WATERMARK = 0.01  # fraction of the blocks that admission leaves free, so that running sequences can grow


class AllocStatus(Enum):
    OK = "ok"
    LATER = "later"
    NEVER = "never"


def held_blocks(tables: Iterable[Seq[int]]) -> list[int]:
    """The block ids in block tables, without holes."""
    return [block_id for table in tables for block_id in table if block_id != HOLE]


class BlockManager:
    """Allocates KV blocks to sequences, and shares full blocks by content."""

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
        tiers = HybridManager(num_device_blocks, num_host_blocks, num_swap_blocks)
        self.pool = BlockPool(tiers, groups, PrefixCache(groups, enable_prefix_caching, hash_block_size))
        self.watermark = int(WATERMARK * self.pool.num_blocks)
        self.capacity = KVCapacity(groups, chunk, self.pool.num_blocks, self.watermark)
        self.num_copied_blocks = 0  # by copy-on-write
        self._windows = KeptWindows(self.pool)
        self.hooks: list[StepHook] = []  # called in this order; to be filled before the first request

    @property
    def prefix_cache(self) -> PrefixCache:
        return self.pool.prefix_cache

    @property
    def stats(self) -> PrefixCacheStats:
        return self.prefix_cache.stats

    def reset(self, sequences: Seq[Sequence] = ()) -> None:
        """Forget all blocks, used and cached. sequences: all that may hold some; afterwards none does."""
        for hook in self.hooks:
            hook.reset(sequences)
        for seq in sequences:
            self._clear(seq)
        self.pool.reset()

    def _clear(self, seq: Sequence) -> None:
        """The sequence holds no blocks from now on."""
        seq.block_tables = []
        seq.first_held = []
        seq.num_computed = seq.num_ahead = 0
        seq.part_end = 0
        seq.pending = None

    # ---- allocation

    def can_allocate(self, seq: Sequence, extra_blocks: int = 0) -> AllocStatus:
        """Whether what a waiting sequence holds at once and `extra_blocks` more fit, with the watermark left free."""
        needed = self.capacity.most_blocks(seq.end) + extra_blocks
        if self.pool.num_blocks - needed < self.watermark:
            return AllocStatus.NEVER
        hits = held_blocks(self._find(seq).tables)
        unused_hits = sum(self.pool.blocks[block_id].ref_count == 0 for block_id in hits)
        left = self.pool.num_allocatable - unused_hits - (needed - len(hits))
        return AllocStatus.OK if left >= self.watermark else AllocStatus.LATER

    def allocate(self, seq: Sequence) -> None:
        """Give a waiting sequence its blocks; a cached prefix counts as computed.

        In groups without a window they are those of all its tokens, in the others those of its next step.

        What a hook fills beyond that counts as computed too, while it is still being filled. Then `seq.pending` is set,
        and the sequence must not run before `end_pending`.
        """
        hit = self._find(seq)
        on_host = self._num_on_host(hit)
        for block_id in held_blocks(hit.tables):
            self.pool.acquire(block_id)
        seq.block_tables = hit.tables
        seq.num_computed = hit.num_tokens
        seq.first_held = [group.first_visible(hit.num_tokens) for group in self.groups]
        end = self.reach(seq, hit.num_tokens)
        self._windows.plan(seq, (end, hit.num_known))
        if any(hit.parts):
            self._continue_parts(seq, hit)
        seq.prefix.num_on_host = on_host
        if end > hit.num_tokens:
            self.hold_beyond(seq, end)  # if there are too few blocks, it computes those tokens itself
        self._extend(seq)
        self._use_again(seq, hit)
        for hook in self.hooks:
            hook.admitted(seq, hit)
        if seq.pending is None:
            self.stats.count_hit(seq)

    def _use_again(self, seq: Sequence, hit: PrefixHit) -> None:
        """Use the cached blocks whose tokens a sequence computes again: they stay those that the prefix cache finds."""
        size = self.prefix_cache.hash_block_size
        hashes = seq.prefix.hashes[hit.num_tokens // size : hit.num_known // size]
        again = {block for content_hash in hashes for block in self.prefix_cache.full_blocks(content_hash)}
        for block in again:
            self.pool.set_usable(block, True)
        self.pool.refresh(block.block_id for block in again)

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
            if block_id != HOLE and self.pool.tiers.tier_of(block_id) is Tier.HOST
        )

    def _continue_parts(self, seq: Sequence, hit: PrefixHit) -> None:
        """Add to each group's table the block that begins with the cached tokens after its full blocks."""
        unreferenced = [part is not None and part.ref_count == 0 for part in hit.parts]
        for part in hit.parts:
            if part is not None:
                self.pool.acquire(part.block_id)  # so that it is not evicted for the copy of another
        for index, (part, group) in enumerate(zip(hit.parts, self.groups, strict=True)):
            if part is not None:
                num_tokens = hit.num_tokens % group.block_size
                needed = self._num_lacking(seq)
                seq.block_tables[index].append(self.pool.continue_block(part, unreferenced[index], num_tokens, needed))
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
            needed += min(count, self.pool.blocks[block_id].ref_count - 1)
        return needed

    def grow(self, sequences: Iterable[Sequence]) -> None:
        """Give running sequences the blocks of their next step, and copy shared blocks that they write next.

        The caller has checked that `num_to_grow` blocks can be allocated.
        """
        for seq in sequences:
            for table, index, block_id in self._shared_and_written(seq):
                table[index] = self.pool.copy(block_id)
                self.num_copied_blocks += 1
                block_size = self.pool.group_of(table[index]).block_size
                self.register_computed(seq, index * block_size)
            self._extend(seq)

    def _shared_and_written(self, seq: Sequence) -> list[tuple[list[int], int, int]]:
        """The shared blocks that the sequence writes next: each with its block table and its index there."""
        shared = []
        for table, group in zip(seq.block_tables, self.groups, strict=True):
            index = seq.num_computed // group.block_size
            if index < len(table) and table[index] != HOLE and self.pool.blocks[table[index]].ref_count > 1:
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
                table.append(self.pool.new_block(index))

    # ---- looking ahead

    def num_ahead(self, seq: Sequence, most: int) -> int:
        """For how many tokens beyond its own, up to `most`, there are blocks for a sequence."""
        while most and self._num_needed_ahead(seq, most) > self.pool.num_allocatable:
            most -= 1
        return most

    def look_ahead(self, seq: Sequence, most: int) -> int:
        """Give a sequence the blocks of up to `most` tokens beyond its own. Returns for how many it has them.

        They are for one step, after which `end_look_ahead` takes them back.
        """
        count = self.num_ahead(seq, most)
        for index, (table, group) in enumerate(zip(seq.block_tables, self.groups, strict=True)):
            while count and len(table) < group.num_blocks(seq.end + count):
                table.append(self.pool.new_block(index))
        seq.num_ahead = count
        return count

    def end_look_ahead(self, seq: Sequence) -> None:
        """Free the blocks beyond the sequence's tokens. They hold nothing that is right, and none is cached."""
        seq.num_ahead = 0
        for hook in self.hooks:
            hook.looked_ahead(seq)
        for table, group in zip(seq.block_tables, self.groups, strict=False):
            while len(table) > group.num_blocks(seq.end):
                self.pool.drop_reference(table.pop())

    def _num_needed_ahead(self, seq: Sequence, count: int) -> int:
        tables = zip(seq.block_tables, self.groups, strict=True)
        return sum(max(0, group.num_blocks(seq.end + count) - len(table)) for table, group in tables)

    # ---- windows

    def release_hidden(self, seq: Sequence) -> None:
        """Release the blocks that no token still to be computed sees. Those with hashes stay cached."""
        self._windows.release(seq)

    def hold_part(self, seq: Sequence, end: int, firsts: Seq[int]) -> bool:
        """Give a sequence the blocks of the part of its prompt up to `end`, which becomes its `part_end`.

        Returns False, with nothing changed, if there are too few. firsts: of each group the first block to hold beyond
        what is computed, if the group has a window. Blocks before it are held if they are worth keeping and fit.
        """
        tables = seq.block_tables
        filled = [
            group.num_blocks(seq.num_computed) if group.window is not None else len(table)
            for table, group in zip(tables, self.groups, strict=True)
        ]
        room = self.pool.num_allocatable + sum(len(table) - full for table, full in zip(tables, filled, strict=True))
        wanted = self._blocks_of_part(seq, end, filled, firsts, keeps_windows=True)
        if sum(map(len, wanted)) > room:
            wanted = self._blocks_of_part(seq, end, filled, firsts, keeps_windows=False)
        if sum(map(len, wanted)) > room:
            return False
        for table, full in zip(tables, filled, strict=True):
            self._punch(table, range(full, len(table)))
            del table[full:]
        for index, (table, group) in enumerate(zip(tables, self.groups, strict=True)):
            held = set(wanted[index])
            for at in range(len(table), group.num_blocks(end)):
                table.append(self.pool.new_block(index) if at in held else HOLE)
        seq.part_end = end
        return True

    def _blocks_of_part(
        self, seq: Sequence, end: int, filled: Seq[int], firsts: Seq[int], keeps_windows: bool
    ) -> list[list[int]]:
        """For each group the indices of the blocks to allocate up to `end`; the first `filled` ones are there."""
        points = seq.prefix.branch_points
        return [
            [
                index
                for index in range(full, group.num_blocks(end))
                if index >= first or (keeps_windows and group.window is not None and points.is_seen(group, index))
            ]
            for group, full, first in zip(self.groups, filled, firsts, strict=True)
        ]

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
        if needed > self.pool.num_allocatable:
            seq.num_computed = begin
            return False
        for index, ((table, group), first) in enumerate(zip(tables, firsts, strict=True)):
            table += [HOLE] * (first - len(table))
            table += [self.pool.new_block(index) for _ in range(len(table), group.num_blocks(end))]
        self.release_hidden(seq)
        return True

    def _punch(self, table: list[int], indices: range) -> None:
        """Leave holes at these indices."""
        for index in indices:
            if table[index] != HOLE:
                self.pool.drop_reference(table[index])
                table[index] = HOLE

    def free(self, seq: Sequence) -> None:
        """Release a sequence's blocks. Those that the prefix cache can find stay cached."""
        if seq.pending is not None:
            seq.pending.cancel()
        for hook in self.hooks:
            hook.freed(seq)
        tables = zip(seq.block_tables, self.groups, strict=False)
        held = [(at * group.block_size, block) for table, group in tables for at, block in enumerate(table)]
        in_turn = [(position, True, block_id) for position, block_id in held if block_id != HOLE]
        in_turn += [(position, False, block_id) for position, block_id in self._windows.on_grid(seq)]
        # From the last token to the first, so that the end of a prefix is evicted before its start.
        for _, is_held, block_id in sorted(in_turn, reverse=True):
            if is_held:
                self.pool.drop_reference(block_id)
            else:
                self.pool.refresh([block_id])
        self._clear(seq)

    # ---- sequences of one request

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Share all computed blocks of the parent with the child, including a partly filled last block."""
        child.block_tables = list(map(list, parent.block_tables))
        child.first_held = list(parent.first_held)
        child.num_computed = parent.num_computed
        child.prefix.hashes = parent.prefix.hashes[: parent.num_computed // self.prefix_cache.hash_block_size]
        child.prefix.branch_points = parent.prefix.branch_points
        for block_id in child.blocks:
            self.pool.blocks[block_id].ref_count += 1
        for hook in self.hooks:
            hook.forked(parent, child)

    def swap_out(self, sequences: Seq[Sequence]) -> dict[int, int] | None:
        """Move the computed blocks of one request to the swap tier, shared blocks once.

        Blocks that other requests reference too are copied instead; blocks without content are freed. Returns
        {source physical id: destination physical id}, or None, with nothing changed, if the swap tier is too full or a
        hook does not agree.
        """
        holders = Counter(block_id for seq in sequences for block_id in held_blocks(self._computed(seq)))
        if len(holders) > self.pool.tiers.pools[Tier.SWAP].num_free:
            return None
        if not all(hook.swap_out(sequences) for hook in self.hooks):
            return None
        out = {block_id: self.pool.swap_out(block_id, count) for block_id, count in holders.items()}
        for seq in sequences:
            computed = self._computed(seq)
            for table, kept in zip(seq.block_tables, computed, strict=True):
                self._punch(table, range(len(kept), len(table)))
            tables = [[HOLE if block_id == HOLE else out[block_id][0] for block_id in table] for table in computed]
            seq.block_tables = tables
            seq.part_end = 0
        return {move.src: move.dst for _, move in out.values()}

    def _computed(self, seq: Sequence) -> list[list[int]]:
        """Its block tables without the blocks that have no content; none for a sequence that holds no blocks."""
        tables = zip(seq.block_tables, self.groups, strict=False)
        return [table[: group.num_blocks(seq.num_computed)] for table, group in tables]

    def num_swapped_blocks(self, sequences: Iterable[Sequence]) -> int:
        """Blocks that `swap_in` allocates on the device and host tiers."""
        return len({block_id for seq in sequences for block_id in seq.blocks})

    def swap_in(self, sequences: Seq[Sequence]) -> dict[int, int]:
        """Undo `swap_out`, and return as it does. The caller has checked that enough blocks can be allocated."""
        swapped = dict.fromkeys(block_id for seq in sequences for block_id in seq.blocks)
        moves = [self.pool.swap_in(block_id) for block_id in swapped]
        for seq in sequences:
            self.register_computed(seq, 0)
        return {move.src: move.dst for move in moves}

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
            self.prefix_cache.register(seq, previously_computed, self.pool.blocks)

    def reset_prefix_cache(self) -> None:
        """Forget all cached content. Used blocks stay with their sequences, and are not found any more."""
        self.pool.forget_content()
        for hook in self.hooks:
            hook.forget()

    def _find(self, seq: Sequence) -> PrefixHit:
        """What a waiting sequence need not compute."""
        return self.prefix_cache.find(seq, self._may_go_on_after if self.hooks else None)

    def _may_go_on_after(self, content_hash: bytes) -> bool:
        return all(hook.may_go_on_after(content_hash) for hook in self.hooks)

    # ---- physical blocks

    def physical_ids(self, seq: Sequence, num_tokens: int) -> list[list[int]]:
        """For each group the physical ids of the blocks of the sequence's first `num_tokens` tokens; holes stay."""
        physical_ids = self.pool.tiers.physical_ids
        tables = zip(seq.block_tables, seq.first_held, self.groups, strict=True)
        return [
            [HOLE] * min(first, group.num_blocks(num_tokens))
            + [
                HOLE if block_id == HOLE else physical_ids[block_id]
                for block_id in table[first : group.num_blocks(num_tokens)]
            ]
            for table, first, group in tables
        ]

    def promote(self, sequences: Iterable[Sequence]) -> None:
        """Move full host blocks of these sequences to device blocks, as far as that displaces only cached ones."""
        self.pool.promote(block_id for seq in sequences for block_id in self._full(seq))

    def _full(self, seq: Sequence) -> Iterator[int]:
        """The blocks of a sequence that it has filled."""
        for table, first, group in zip(seq.block_tables, seq.first_held, self.groups, strict=True):
            for block_id in islice(table, first, seq.num_computed // group.block_size):
                if block_id != HOLE:
                    yield block_id
