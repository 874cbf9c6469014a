"""The prefix cache finds blocks, or the first part of one, by content; the evictor chooses the least recently used."""

from __future__ import annotations

import heapq
import struct
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import xxhash

from nanovllm.data.kv_groups import HOLE, KVGroups, hash_block_size_of
from nanovllm.engine.request import Sequence

TOKEN_BYTES = struct.calcsize("q")


# Whether a block is worth keeping, and when it was used: what is spare is older than all else.
LastUse = tuple[bool, int]


class Evictor:
    """Unreferenced blocks with their last use, in least recently used order.

    A heap with lazy deletion: removed entries stay in it until they reach the top, or until they are the majority.
    """

    def __init__(self) -> None:
        self._last_used: dict[int, LastUse] = {}
        self._heap: list[tuple[LastUse, int]] = []

    def __len__(self) -> int:
        return len(self._last_used)

    def __iter__(self) -> Iterator[int]:
        return iter(self._last_used)

    def __getitem__(self, block_id: int) -> LastUse:
        return self._last_used[block_id]

    def add(self, block_id: int, last_used: LastUse) -> None:
        self._last_used[block_id] = last_used
        heapq.heappush(self._heap, (last_used, block_id))

    def remove(self, block_id: int) -> LastUse:
        """Remove a block and return its last use."""
        last_used = self._last_used.pop(block_id)
        if len(self._heap) > 2 * len(self._last_used) + 16:
            self._heap = [(last_use, block) for block, last_use in self._last_used.items()]
            heapq.heapify(self._heap)
        return last_used

    def oldest(self) -> tuple[LastUse, int]:
        """(last use, block id) of the least recently used block. There must be one."""
        while self._last_used.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0]


@dataclass(slots=True, eq=False)
class Block:
    """A block that is not free."""

    block_id: int
    group: int = 0  # index of its KV group
    ref_count: int = 1
    tokens: bytes = b""  # content of its complete hash blocks, from the start of the block
    hashes: list[bytes] = field(default_factory=list)  # of its hash blocks that the prefix cache finds here
    is_usable: bool = True  # False: no prompt can begin with these tokens, and the block is spare while it is cached

    @property
    def num_cached_tokens(self) -> int:
        """How many of its tokens the prefix cache knows."""
        return len(self.tokens) // TOKEN_BYTES


@dataclass(slots=True)
class PrefixCacheStats:
    """Tokens looked up at admission, and how many of them were in the cache."""

    queried_tokens: int = 0
    hit_tokens: int = 0
    hit_tokens_on_host: int = 0  # of these, in host blocks
    hit_tokens_on_disk: int = 0  # of these, in the block store
    recomputed_tokens: int = 0  # not in the cache, but computed for an earlier prompt
    copied_blocks: int = 0  # of which a sequence got a copy of the part that it shares
    copied_tokens: int = 0  # in these parts

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / self.queried_tokens if self.queried_tokens else 0.0

    def count_hit(self, seq: Sequence) -> None:
        """Count what a sequence that is admitted need not compute."""
        self.queried_tokens += seq.end
        self.hit_tokens += seq.num_computed
        self.hit_tokens_on_host += seq.prefix.num_on_host


@dataclass(slots=True)
class PrefixHit:
    """The cached start of a sequence, in whole hash blocks. Both lists are by KV group."""

    num_tokens: int
    num_known: int  # so many tokens are cached in groups without a window, where others may lack what the next one sees
    tables: list[list[int]]  # ids of the full blocks by index, with HOLE for those that no later token sees
    parts: list[Block | None]  # the block that begins with the tokens after the full ones; None if there are none


class PrefixCache:
    """Blocks of each KV group by the hashes of their content and of everything before it.

    A hit ends where every group has what later tokens see: all tokens before it, or those of its window. A block
    consists of hash blocks of `hash_block_size` tokens, so that a sequence also finds the first part of a block that
    differs later, or that is not full yet. The hash is xxh3-128 of (hash of the previous hash block, tokens); the chain
    starts from the request's salt. A hit also compares the tokens, so a hash collision is not a hit.
    """

    def __init__(self, groups: KVGroups, enabled: bool, hash_block_size: int | None = None) -> None:
        self.groups = groups
        self.hash_block_size = hash_block_size or hash_block_size_of(groups.common_block_size)
        self.enabled = enabled
        self.stats = PrefixCacheStats()
        self._full_groups = [index for index, group in enumerate(groups) if group.window is None]
        self._by_hash: list[dict[bytes, Block]] = [{} for _ in groups]
        self._num_removals = 0
        self._removed_at: dict[int, int] = {}  # by block id: `_num_removals` after its content was last forgotten
        self._cleared_at = 0  # `_num_removals` after the last `clear`

    def find(self, seq: Sequence, is_kept: Callable[[bytes], bool] | None = None) -> PrefixHit:
        """The longest cached start of `seq`, at most its `num_cacheable` tokens.

        is_kept: whether the sequence can go on after the tokens of a hash; None if it always can.
        """
        if not self.enabled:
            return PrefixHit(0, 0, [[] for _ in self.groups], [None] * len(self.groups))
        from_start = self._find_from_start(seq)
        known = self._longest(seq, from_start, seq.num_cacheable, self._full_groups, None)
        end = self._longest(seq, from_start, known, range(len(self.groups)), is_kept)
        tables: list[list[int]] = []
        parts: list[Block | None] = []
        for index, group in enumerate(self.groups):
            full, rest = divmod(end, group.block_size)
            if group.window is None:
                tables.append(from_start[index][:full])
            else:
                first = min(group.first_visible(end), full)
                blocks = (self._find_full(seq, index, block_index) for block_index in range(first, full))
                tables.append([HOLE] * first + [block.block_id for block in blocks if block is not None])
            is_known = rest > 0 and full < len(from_start[index])
            parts.append(self._find_full(seq, index, full) if is_known else self._find_part(seq, index, full, rest)[0])
        return PrefixHit(end, known, tables, parts)

    def _longest(
        self,
        seq: Sequence,
        from_start: list[list[int]],
        most: int,
        groups: Seq[int],
        is_kept: Callable[[bytes], bool] | None,
    ) -> int:
        """The longest start of up to `most` tokens for which each of these groups has what later tokens see.

        from_start: the result of `_find_from_start`.
        """
        end = most // self.hash_block_size * self.hash_block_size
        while True:
            before = end
            for index in groups:
                if self.groups[index].window is None:
                    end = self._reach_from_start(seq, index, end, len(from_start[index]))
                else:
                    end = self._reach_of_window(seq, index, end)
            if is_kept is not None:
                end = self._longest_kept(seq, end, is_kept)
            if end == before or (len(groups) <= 1 and is_kept is None):  # all agree
                return end

    def _longest_kept(self, seq: Sequence, num_tokens: int, is_kept: Callable[[bytes], bool]) -> int:
        """The longest start of up to `num_tokens` tokens, in whole hash blocks, whose hash `is_kept`."""
        ends = range(num_tokens, 0, -self.hash_block_size)
        return next((end for end in ends if is_kept(self.hash_before(seq, end))), 0)

    def _find_from_start(self, seq: Sequence) -> list[list[int]]:
        """The ids of the cached full blocks that `seq` starts with, for each group; none for groups with a window.

        The result is kept on the sequence, so that a waiting sequence is not looked up again in every step.
        """
        known = seq.prefix.blocks or [[] for _ in self.groups]
        cached = [self._still_cached(blocks, seq.prefix.age) for blocks in known]
        for index, group in enumerate(self.groups):
            limit = 0 if group.window is not None else seq.num_cacheable // group.block_size
            while len(cached[index]) < limit:
                block = self._find_full(seq, index, len(cached[index]))
                if block is None:
                    break
                cached[index].append(block.block_id)
        seq.prefix.blocks = cached
        seq.prefix.age = self._num_removals
        return cached

    def _reach_from_start(self, seq: Sequence, group: int, end: int, num_full: int) -> int:
        """How many of the first `end` tokens of `seq` a group without a window has. It has `num_full` full blocks."""
        size = self.groups[group].block_size
        index = min(end // size, num_full)
        if index < num_full:
            return end
        return index * size + self._find_part(seq, group, index, min(size, end - index * size))[1]

    def _reach_of_window(self, seq: Sequence, group: int, end: int) -> int:
        """The longest start of up to `end` tokens for which a group has the tokens of its window."""
        size = self.groups[group].block_size
        while end > 0:
            for index in reversed(range(self.groups[group].first_visible(end), -(-end // size))):
                wanted = min(size, end - index * size)
                num_tokens = self._find_part(seq, group, index, wanted)[1]
                if num_tokens < wanted:
                    end = index * size + num_tokens
                    break
            else:
                break
        return end

    def _find_full(self, seq: Sequence, group: int, index: int) -> Block | None:
        """The cached block of the group with all tokens of the block `index` of `seq`."""
        hashes_per_block = self.groups[group].block_size // self.hash_block_size
        return self._find_block(seq, group, (index + 1) * hashes_per_block - 1)

    def _find_part(self, seq: Sequence, group: int, index: int, most: int) -> tuple[Block | None, int]:
        """The block that shares the longest beginning, of up to `most` tokens, with the block `index` of `seq`.

        Returns it with the number of these tokens, which are whole hash blocks; (None, 0) if there is none.
        """
        first = index * self.groups[group].block_size // self.hash_block_size
        for last in reversed(range(first, first + most // self.hash_block_size)):
            block = self._find_block(seq, group, last)
            if block is not None:
                return block, (last + 1 - first) * self.hash_block_size
        return None, 0

    def windows(self, seq: Sequence) -> Iterator[tuple[int, int, Block]]:
        """(group, index in the sequence, block) of the blocks of windows that hold what the sequence begins with."""
        for group, by_hash in enumerate(self._by_hash):
            if self.groups[group].window is None or not by_hash:
                continue
            hashes_per_block = self.groups[group].block_size // self.hash_block_size
            found = (by_hash.get(content_hash) for content_hash in seq.prefix.hashes)
            indices = {block: at // hashes_per_block for at, block in enumerate(found) if block is not None}
            yield from ((group, index, block) for block, index in indices.items())

    def full_blocks(self, content_hash: bytes) -> Iterator[Block]:
        """The blocks of groups without a window that hold the tokens of a hash."""
        found = (self._by_hash[group].get(content_hash) for group in self._full_groups)
        return (block for block in found if block is not None)

    def hash_after(self, seq: Sequence, num_tokens: int, end: int) -> bytes | None:
        """The hash of the hash block that follows the first `num_tokens` tokens, if it ends by `end`."""
        index = num_tokens // self.hash_block_size
        return self._hash_of(seq, index) if self.enabled and (index + 1) * self.hash_block_size <= end else None

    def hash_before(self, seq: Sequence, num_tokens: int) -> bytes:
        """The hash of the first `num_tokens` tokens, one or more whole hash blocks."""
        return self._hash_of(seq, num_tokens // self.hash_block_size - 1)

    def register(self, seq: Sequence, previously_computed: int, blocks: Mapping[int, Block]) -> None:
        """Add the hash blocks of `seq` that were completed since it had `previously_computed` computed tokens.

        blocks: by block id. Content that is already cached in another block is found there.
        """
        if not self.enabled:
            return
        size = self.hash_block_size
        for index in range(previously_computed // size, seq.num_computed // size):
            for group, table in enumerate(seq.block_tables):
                self._register_hash_block(seq, group, index, table, blocks)

    def _register_hash_block(
        self, seq: Sequence, group: int, index: int, table: Seq[int], blocks: Mapping[int, Block]
    ) -> None:
        size = self.hash_block_size
        block_size = self.groups[group].block_size
        block_index, offset = divmod(index * size, block_size)
        if table[block_index] == HOLE:
            return
        block = blocks[table[block_index]]
        if block.num_cached_tokens != offset:
            return  # it is known already, or the cache was emptied when the block was partly filled
        block.tokens += self._content(seq, index * size, (index + 1) * size)
        content_hash = self._hash_of(seq, index)
        if content_hash not in self._by_hash[group]:
            block.hashes.append(content_hash)
            self._by_hash[group][content_hash] = block

    def forget(self, block: Block) -> None:
        """Forget the content of a block; does nothing if it is not in the cache."""
        for content_hash in block.hashes:
            del self._by_hash[block.group][content_hash]
        if block.hashes:
            self._num_removals += 1
            self._removed_at[block.block_id] = self._num_removals
        block.tokens = b""
        block.hashes = []
        block.is_usable = True

    def clear(self) -> None:
        """Forget all blocks. The caller gives up their records, or forgets each of them too."""
        for by_hash in self._by_hash:
            by_hash.clear()
        self._removed_at.clear()
        self._num_removals += 1
        self._cleared_at = self._num_removals

    def _still_cached(self, block_ids: list[int], age: int) -> list[int]:
        """The first of these blocks, up to one that was removed since there had been `age` removals."""
        if age == self._num_removals:
            return block_ids
        removed_at = self._removed_at
        cleared_at = self._cleared_at
        removed = (index for index, block_id in enumerate(block_ids) if removed_at.get(block_id, cleared_at) > age)
        return block_ids[: next(removed, len(block_ids))]

    def _find_block(self, seq: Sequence, group: int, index: int) -> Block | None:
        """The group's block that holds hash block `index` of the sequence, and its tokens before it in the block."""
        block = self._by_hash[group].get(self._hash_of(seq, index))
        if block is None:
            return None
        end = (index + 1) * self.hash_block_size
        block_size = self.groups[group].block_size
        begin = (end - 1) // block_size * block_size
        return block if block.tokens.startswith(self._content(seq, begin, end)) else None

    def _content(self, seq: Sequence, begin: int, end: int) -> bytes:
        return struct.pack(f"{end - begin}q", *seq.token_ids[begin:end])

    def _hash_of(self, seq: Sequence, index: int) -> bytes:
        """The hash of a sequence's hash block; hashes are kept on the sequence."""
        while len(seq.prefix.hashes) <= index:
            known = len(seq.prefix.hashes)
            size = self.hash_block_size
            parent = seq.prefix.hashes[-1] if known else xxhash.xxh3_128_digest(seq.request.cache_salt)
            content = self._content(seq, known * size, (known + 1) * size)
            seq.prefix.hashes.append(xxhash.xxh3_128_digest(parent + content))
        return seq.prefix.hashes[index]
