"""Blocks of the KV cache: who holds them, what they contain, and which tier they should live on.

Each block is in one of three states: *used* (referenced by sequences), *cached* (referenced by none, full, and found
again by its content) or *free*. free + cached + used is always the total.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

import xxhash

from nanovllm.engine.idle_blocks import IdleBlocks
from nanovllm.engine.request import Sequence
from nanovllm.kvcache.hybrid_manager import BlockMove, HybridManager, PlacePool, Tier

WATERMARK = 0.01  # share of the blocks that admission leaves free, so that running sequences can grow
MAX_PROMOTIONS_PER_STEP = 4  # a step waits for its moves before it computes


class AllocStatus(Enum):
    OK = "ok"
    LATER = "later"
    NEVER = "never"


@dataclass(slots=True)
class Block:
    """A block that holds content: `tokens` and `content_hash` are set once it is full and computed."""

    block_id: int
    ref_count: int = 1
    content_hash: bytes | None = None
    tokens: bytes = b""


@dataclass(slots=True)
class PrefixCacheStats:
    """Tokens looked up at admission, and how many of them were found."""

    queried_tokens: int = 0
    hit_tokens: int = 0

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / self.queried_tokens if self.queried_tokens else 0.0


class BlockManager:
    """Allocates blocks to sequences, shares full ones by content, and keeps active ones on the device."""

    def __init__(
        self, num_device_blocks: int, num_host_blocks: int, block_size: int, enable_prefix_caching: bool = True
    ) -> None:
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.tiers = HybridManager(num_device_blocks, num_host_blocks)
        self.num_blocks = num_device_blocks + num_host_blocks
        self.watermark = int(WATERMARK * self.num_blocks)
        self.stats = PrefixCacheStats()
        self.reset()

    def reset(self) -> None:
        """Forget all blocks, used and cached. Whoever held blocks must not use them any more."""
        self.tiers = HybridManager(self.tiers.num_device_blocks, self.tiers.num_host_blocks)
        self._ids = PlacePool(0, self.num_blocks)
        self._blocks: dict[int, Block] = {}  # used and cached
        self._by_hash: dict[bytes, int] = {}
        self._idle = {tier: IdleBlocks() for tier in Tier}  # cached blocks, by where they are
        self._clock = 0  # counts the times that a block became idle
        self._moves: list[BlockMove] = []

    # ---- counts

    @property
    def num_free(self) -> int:
        return self._ids.num_free

    @property
    def num_cached(self) -> int:
        return sum(len(idle) for idle in self._idle.values())

    @property
    def num_used(self) -> int:
        return len(self._blocks) - self.num_cached

    @property
    def num_allocatable(self) -> int:
        """Blocks that a sequence can get: free ones, and cached ones by evicting them."""
        return self.num_free + self.num_cached

    @property
    def max_sequence_tokens(self) -> int:
        """The longest sequence that admission ever accepts."""
        return (self.num_blocks - self.watermark) * self.block_size

    # ---- allocation

    def can_allocate(self, seq: Sequence) -> AllocStatus:
        """Whether the blocks of all tokens of a waiting sequence can be had, leaving the watermark free."""
        needed = seq.num_blocks(self.block_size)
        if self.num_blocks - needed < self.watermark:
            return AllocStatus.NEVER
        hits = self.find_prefix(seq)
        idle_hits = sum(self._blocks[block_id].ref_count == 0 for block_id in hits)
        left = self.num_allocatable - idle_hits - (needed - len(hits))
        return AllocStatus.OK if left >= self.watermark else AllocStatus.LATER

    def allocate(self, seq: Sequence) -> None:
        """Give a waiting sequence the blocks of all its tokens; a cached prefix counts as computed."""
        hits = self.find_prefix(seq)
        for block_id in hits:
            self._acquire(block_id)
        seq.block_table = hits
        seq.num_computed = len(hits) * self.block_size
        self.stats.queried_tokens += len(seq)
        self.stats.hit_tokens += seq.num_computed
        for _ in range(seq.num_blocks(self.block_size) - len(hits)):
            seq.block_table.append(self._new_block())

    def can_grow(self, seq: Sequence) -> bool:
        """Whether the block of the sequence's last token is there, or can be had."""
        return len(seq.block_table) >= seq.num_blocks(self.block_size) or self.num_allocatable > 0

    def grow(self, seq: Sequence) -> None:
        """Give a running sequence the block of its last token, if it has not got it."""
        if len(seq.block_table) < seq.num_blocks(self.block_size):
            seq.block_table.append(self._new_block())

    def free(self, seq: Sequence) -> None:
        """Take back a sequence's blocks. Those with known content stay cached; a half-written one never does."""
        # Last block first: the end of a prefix is worth less than its start, so it is evicted first.
        for block_id in reversed(seq.block_table):
            self._drop_reference(block_id)
        seq.block_table = []
        seq.num_computed = 0
        seq.span, seq.span_units = None, 0

    # ---- prefix cache

    def find_prefix(self, seq: Sequence) -> list[int]:
        """Blocks whose content is the start of `seq`, as far as it need not be computed."""
        if not self.enable_prefix_caching:
            return []
        found: list[int] = []
        for index in range(seq.num_cacheable // self.block_size):
            block_id = self._by_hash.get(self._content_hash(seq, index))
            if block_id is None or self._blocks[block_id].tokens != self._content(seq, index):
                break
            found.append(block_id)
        return found

    def register_computed(self, seq: Sequence, previously_computed: int) -> None:
        """Make the blocks that the last step filled findable."""
        if not self.enable_prefix_caching:
            return
        for index in range(previously_computed // self.block_size, seq.num_computed // self.block_size):
            content_hash = self._content_hash(seq, index)
            if content_hash in self._by_hash:  # another sequence computed the same content first
                continue
            block = self._blocks[seq.block_table[index]]
            block.content_hash, block.tokens = content_hash, self._content(seq, index)
            self._by_hash[content_hash] = block.block_id

    def reset_prefix_cache(self) -> None:
        """Forget all cached content. Blocks in use stay with their sequences and are no longer findable."""
        for idle in self._idle.values():
            while idle:
                self._evict(idle.oldest()[1])
        for block in self._blocks.values():
            block.content_hash, block.tokens = None, b""
        self._by_hash.clear()

    def _content(self, seq: Sequence, index: int) -> bytes:
        start = index * self.block_size
        return array("q", seq.token_ids[start : start + self.block_size]).tobytes()

    def _content_hash(self, seq: Sequence, index: int) -> bytes:
        """xxh3-128 over (parent's hash, tokens); the first block's parent is the hash of the sequence's salt."""
        while len(seq.block_hashes) <= index:
            known = len(seq.block_hashes)
            parent = seq.block_hashes[-1] if known else xxhash.xxh3_128_digest(seq.request.cache_salt)
            seq.block_hashes.append(xxhash.xxh3_128_digest(parent + self._content(seq, known)))
        return seq.block_hashes[index]

    # ---- places

    def places(self, seq: Sequence, num_tokens: int) -> list[int]:
        """Places of the blocks that hold the sequence's first `num_tokens` tokens."""
        return [self.tiers.place_of(block_id) for block_id in seq.block_table[: -(-num_tokens // self.block_size)]]

    def promote(self, sequences: Iterable[Sequence]) -> None:
        """Bring full host blocks of the given sequences to free or idle device places.

        A promoted block is loaded once instead of once a step.
        """
        if self.tiers.num_free(Tier.HOST) == self.tiers.num_host_blocks:
            return
        promoted = 0
        for seq in sequences:
            for block_id in seq.block_table[: seq.num_computed // self.block_size]:
                if promoted == MAX_PROMOTIONS_PER_STEP or not self._device_can_be_had():
                    return
                if self.tiers.tier_of(block_id) is Tier.HOST:
                    self._vacate_device_place()
                    self._moves.append(self.tiers.move(block_id, Tier.DEVICE))
                    promoted += 1

    def take_moves(self) -> list[BlockMove]:
        """The moves decided since the last call, in the order in which they must be carried out."""
        moves, self._moves = self._moves, []
        return moves

    def _device_can_be_had(self) -> bool:
        return self.tiers.num_free(Tier.DEVICE) > 0 or bool(self._idle[Tier.DEVICE])

    def _vacate_device_place(self) -> None:
        """Free a device place. The device's oldest idle block goes to the host, unless the oldest of all must go."""
        if self.tiers.num_free(Tier.DEVICE):
            return
        on_device, on_host = self._idle[Tier.DEVICE], self._idle[Tier.HOST]
        last_used, leaving = on_device.oldest()
        if not self.tiers.num_free(Tier.HOST):
            if not on_host or last_used < on_host.oldest()[0]:
                self._evict(leaving)
                return
            self._evict(on_host.oldest()[1])
        self._moves.append(self.tiers.move(leaving, Tier.HOST))
        on_host.add(leaving, on_device.remove(leaving))

    # ---- single blocks

    def _new_block(self) -> int:
        """A block for new content, on the device if a place can be had there."""
        if self._device_can_be_had():
            tier = Tier.DEVICE
            self._vacate_device_place()
        else:
            tier = Tier.HOST
            if not self.tiers.num_free(tier):
                self._evict(self._idle[tier].oldest()[1])
        block_id = self._ids.take()
        self._blocks[block_id] = Block(block_id)
        self.tiers.place(block_id, tier)
        return block_id

    def _acquire(self, block_id: int) -> None:
        block = self._blocks[block_id]
        if block.ref_count == 0:
            self._idle[self.tiers.tier_of(block_id)].remove(block_id)
        block.ref_count += 1

    def _drop_reference(self, block_id: int) -> None:
        block = self._blocks[block_id]
        block.ref_count -= 1
        if block.ref_count > 0:
            return
        if block.content_hash is None:
            self._discard(block_id)
        else:
            self._clock += 1
            self._idle[self.tiers.tier_of(block_id)].add(block_id, self._clock)

    def _evict(self, block_id: int) -> None:
        content_hash = self._blocks[block_id].content_hash
        assert content_hash is not None, "only findable blocks are idle"
        del self._by_hash[content_hash]
        self._idle[self.tiers.tier_of(block_id)].remove(block_id)
        self._discard(block_id)

    def _discard(self, block_id: int) -> None:
        del self._blocks[block_id]
        self.tiers.release(block_id)
        self._ids.give_back(block_id)

    # ---- invariants

    def check(self) -> None:
        """Raise AssertionError if the bookkeeping contradicts itself. For tests and for fuzzing."""
        assert self.num_free + self.num_cached + self.num_used == self.num_blocks
        assert self.tiers.num_placed == len(self._blocks)
        for tier, idle in self._idle.items():
            for block_id in idle:
                block = self._blocks[block_id]
                assert block.ref_count == 0 and block.content_hash is not None
                assert self.tiers.tier_of(block_id) is tier
        for content_hash, block_id in self._by_hash.items():
            assert self._blocks[block_id].content_hash == content_hash
