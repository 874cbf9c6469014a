"""The prefix cache finds blocks, or the first part of one, by content; the evictor chooses the least recently used."""

from __future__ import annotations

import heapq
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import xxhash

from nanovllm.engine.request import Sequence

MAX_HASH_BLOCK_SIZE = 256  # tokens; small beside a prompt that is worth caching, and many for one hash
TOKEN_BYTES = struct.calcsize("q")


def hash_block_size_of(block_size: int) -> int:
    """Tokens in a hash block: the largest divisor of `block_size` up to MAX_HASH_BLOCK_SIZE."""
    return next(size for size in range(min(block_size, MAX_HASH_BLOCK_SIZE), 0, -1) if block_size % size == 0)


class Evictor:
    """Unreferenced blocks with the time of their last use, in least recently used order.

    A heap with lazy deletion: removed entries stay in it until they reach the top, or until they are the majority.
    """

    def __init__(self) -> None:
        self._last_used: dict[int, int] = {}
        self._heap: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return len(self._last_used)

    def __iter__(self) -> Iterator[int]:
        return iter(self._last_used)

    def add(self, block_id: int, last_used: int) -> None:
        self._last_used[block_id] = last_used
        heapq.heappush(self._heap, (last_used, block_id))

    def remove(self, block_id: int) -> int:
        """Remove a block and return the time of its last use."""
        last_used = self._last_used.pop(block_id)
        if len(self._heap) > 2 * len(self._last_used) + 16:
            self._heap = [(time, block) for block, time in self._last_used.items()]
            heapq.heapify(self._heap)
        return last_used

    def oldest(self) -> tuple[int, int]:
        """(time of last use, block id) of the least recently used block. There must be one."""
        while self._last_used.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0]


@dataclass(slots=True)
class Block:
    """A block that is not free.

    `tokens`: the content of its complete hash blocks, from the start of the block. `hashes`: those of its hash blocks
    that the prefix cache finds here.
    """

    block_id: int
    ref_count: int = 1
    tokens: bytes = b""
    hashes: list[bytes] = field(default_factory=list)

    @property
    def num_cached_tokens(self) -> int:
        """How many of its tokens the prefix cache knows."""
        return len(self.tokens) // TOKEN_BYTES


@dataclass(slots=True)
class PrefixCacheStats:
    """Tokens looked up at admission, and how many of them were in the cache.

    copied_blocks, copied_tokens: blocks of which a sequence got a copy of the part that it shares, and those tokens.
    """

    queried_tokens: int = 0
    hit_tokens: int = 0
    copied_blocks: int = 0
    copied_tokens: int = 0

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / self.queried_tokens if self.queried_tokens else 0.0


class PrefixCache:
    """Blocks by the hashes of their content and of everything before it.

    A block consists of hash blocks of `hash_block_size` tokens, so that a sequence also finds the first part of a block
    that differs later, or that is not full yet. The hash is xxh3-128 of (hash of the previous hash block, tokens); the
    chain starts from the request's salt. A hit also compares the tokens, so a hash collision is not a hit.
    """

    def __init__(self, block_size: int, enabled: bool, hash_block_size: int | None = None) -> None:
        self.block_size = block_size
        self.hash_block_size = hash_block_size or hash_block_size_of(block_size)
        self.enabled = enabled
        self.stats = PrefixCacheStats()
        self._hashes_per_block = block_size // self.hash_block_size
        self._by_hash: dict[bytes, Block] = {}
        self._num_removals = 0
        self._removed_at: dict[int, int] = {}  # by block id: `_num_removals` after its content was last forgotten
        self._cleared_at = 0  # `_num_removals` after the last `clear`

    def find(self, seq: Sequence) -> list[int]:
        """The cached full blocks that `seq` starts with, at most those of its `num_cacheable` tokens.

        The result is kept on the sequence, so that a waiting sequence is not looked up again in every step.
        """
        if not self.enabled:
            return []
        limit = seq.num_cacheable // self.block_size
        found = self._still_cached(seq.found_prefix, seq.prefix_age)
        while len(found) < limit:
            block = self._find_block(seq, (len(found) + 1) * self._hashes_per_block - 1)
            if block is None:
                break
            found.append(block.block_id)
        seq.found_prefix, seq.prefix_age = found, self._num_removals
        return found[:limit]

    def find_part(self, seq: Sequence, index: int) -> tuple[Block, int] | None:
        """The block that begins with the most tokens of the block `index` of `seq`, and their number.

        They are whole hash blocks, at most those of the sequence's `num_cacheable` tokens. None if there are none.
        """
        if not self.enabled:
            return None
        first, limit = index * self._hashes_per_block, seq.num_cacheable // self.hash_block_size
        for last in reversed(range(first, min(first + self._hashes_per_block, limit))):
            block = self._find_block(seq, last)
            if block is not None:
                return block, (last + 1 - first) * self.hash_block_size
        return None

    def longest(self, seq: Sequence, num_tokens: int, is_kept: Callable[[bytes], bool]) -> int:
        """Of the first `num_tokens` tokens, the most whole hash blocks whose hash `is_kept`."""
        size = self.hash_block_size
        ends = range(num_tokens // size * size, 0, -size)
        return next((end for end in ends if is_kept(self.hash_before(seq, end))), 0)

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
            block_index, offset = divmod(index * size, self.block_size)
            block = blocks[seq.block_table[block_index]]
            if block.num_cached_tokens != offset:
                continue  # it is known already, or the cache was emptied when the block was partly filled
            block.tokens += self._content(seq, index * size, (index + 1) * size)
            content_hash = self._hash_of(seq, index)
            if content_hash not in self._by_hash:
                block.hashes.append(content_hash)
                self._by_hash[content_hash] = block

    def forget(self, block: Block) -> None:
        """Forget the content of a block; does nothing if it is not in the cache."""
        for content_hash in block.hashes:
            del self._by_hash[content_hash]
        if block.hashes:
            self._num_removals += 1
            self._removed_at[block.block_id] = self._num_removals
        block.tokens, block.hashes = b"", []

    def clear(self) -> None:
        """Forget all blocks. The caller gives up their records, or forgets each of them too."""
        self._by_hash.clear()
        self._removed_at.clear()
        self._num_removals += 1
        self._cleared_at = self._num_removals

    def _still_cached(self, found: list[int], age: int) -> list[int]:
        """What `find` found when there had been `age` removals, as far as nothing of it was removed since."""
        if age == self._num_removals:
            return found
        removed_at, cleared_at = self._removed_at, self._cleared_at
        removed = (index for index, block_id in enumerate(found) if removed_at.get(block_id, cleared_at) > age)
        return found[: next(removed, len(found))]

    def _find_block(self, seq: Sequence, index: int) -> Block | None:
        """The block that holds hash block `index` of the sequence, and the sequence's tokens before it in the block."""
        block = self._by_hash.get(self._hash_of(seq, index))
        if block is None:
            return None
        end = (index + 1) * self.hash_block_size
        begin = (end - 1) // self.block_size * self.block_size
        return block if block.tokens.startswith(self._content(seq, begin, end)) else None

    def _content(self, seq: Sequence, begin: int, end: int) -> bytes:
        return struct.pack(f"{end - begin}q", *seq.token_ids[begin:end])

    def _hash_of(self, seq: Sequence, index: int) -> bytes:
        """The hash of a sequence's hash block; hashes are kept on the sequence."""
        while len(seq.block_hashes) <= index:
            known, size = len(seq.block_hashes), self.hash_block_size
            parent = seq.block_hashes[-1] if known else xxhash.xxh3_128_digest(seq.request.cache_salt)
            content = self._content(seq, known * size, (known + 1) * size)
            seq.block_hashes.append(xxhash.xxh3_128_digest(parent + content))
        return seq.block_hashes[index]
