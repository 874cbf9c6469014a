"""The prefix cache finds full blocks by their content; the evictor chooses the least recently used one."""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterator
from dataclasses import dataclass

import xxhash

from nanovllm.engine.request import Sequence


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
    """A block that is not free. `tokens` and `content_hash` are set while the prefix cache can find it."""

    block_id: int
    ref_count: int = 1
    content_hash: bytes | None = None
    tokens: bytes = b""


@dataclass(slots=True)
class PrefixCacheStats:
    """Tokens looked up at admission, and how many of them were in the cache."""

    queried_tokens: int = 0
    hit_tokens: int = 0

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / self.queried_tokens if self.queried_tokens else 0.0


class PrefixCache:
    """Full blocks by the hash of their content and of everything before it.

    The hash is xxh3-128 of (hash of the previous block, tokens); the chain starts from the request's salt. A hit also
    compares the tokens, so a hash collision is not a hit.
    """

    def __init__(self, block_size: int, enabled: bool) -> None:
        self.block_size = block_size
        self.enabled = enabled
        self.stats = PrefixCacheStats()
        self._by_hash: dict[bytes, Block] = {}
        self._num_removals = 0  # earlier results of `find` are valid while it does not change

    def find(self, seq: Sequence) -> list[int]:
        """The cached blocks that `seq` starts with, at most those of its `num_cacheable` tokens.

        The result is kept on the sequence, so that a waiting sequence is not looked up again in every step.
        """
        if not self.enabled:
            return []
        limit = seq.num_cacheable // self.block_size
        found = seq.found_prefix if seq.prefix_age == self._num_removals else []
        while len(found) < limit:
            block = self._by_hash.get(self._hash_of(seq, len(found)))
            if block is None or block.tokens != self._content(seq, len(found)):
                break
            found.append(block.block_id)
        seq.found_prefix, seq.prefix_age = found, self._num_removals
        return found[:limit]

    def register(self, seq: Sequence, index: int, block: Block) -> None:
        """Add a block that was just filled, unless a block with the same content is already cached."""
        if not self.enabled:
            return
        content_hash = self._hash_of(seq, index)
        if content_hash not in self._by_hash:
            block.content_hash, block.tokens = content_hash, self._content(seq, index)
            self._by_hash[content_hash] = block

    def forget(self, block: Block) -> None:
        """Remove a block; does nothing if it is not in the cache."""
        if block.content_hash is not None:
            del self._by_hash[block.content_hash]
            block.content_hash, block.tokens = None, b""
            self._num_removals += 1

    def clear(self) -> None:
        """Remove all blocks."""
        for block in list(self._by_hash.values()):
            self.forget(block)
        self._num_removals += 1

    def check(self) -> None:
        """Raise AssertionError if the bookkeeping is inconsistent."""
        assert all(block.content_hash == content_hash for content_hash, block in self._by_hash.items())

    def _content(self, seq: Sequence, index: int) -> bytes:
        start = index * self.block_size
        return array("q", seq.token_ids[start : start + self.block_size]).tobytes()

    def _hash_of(self, seq: Sequence, index: int) -> bytes:
        """The content hash of a sequence's block; hashes are kept on the sequence."""
        while len(seq.block_hashes) <= index:
            known = len(seq.block_hashes)
            parent = seq.block_hashes[-1] if known else xxhash.xxh3_128_digest(seq.request.cache_salt)
            seq.block_hashes.append(xxhash.xxh3_128_digest(parent + self._content(seq, known)))
        return seq.block_hashes[index]
