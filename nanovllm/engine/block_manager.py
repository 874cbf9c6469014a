"""Blocks of the KV cache: who holds them, what they contain, and which tier they should live on.

Each block is in one of three states: *used* (referenced by sequences), *cached* (referenced by none, full, and found
again by its content) or *free*. free + cached + used is always the total. Blocks on the swap tier count apart: they are
referenced by preempted sequences, are never attended, and return to the other tiers first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from enum import Enum

from nanovllm.engine.evictor import Evictor
from nanovllm.engine.prefix_cache import Block, PrefixCache, PrefixCacheStats
from nanovllm.engine.request import Sequence
from nanovllm.kvcache.hybrid_manager import BlockMove, HybridManager, IdPool, Tier

WATERMARK = 0.01  # share of the blocks that admission leaves free, so that running sequences can grow
MAX_PROMOTIONS_PER_STEP = 4  # a step waits for its moves before it computes


class AllocStatus(Enum):
    OK = "ok"
    LATER = "later"
    NEVER = "never"


class BlockManager:
    """Allocates blocks to sequences, shares full ones by content, and keeps active ones on the device."""

    def __init__(
        self,
        num_device_blocks: int,
        num_host_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        num_swap_blocks: int = 0,
    ) -> None:
        self.block_size = block_size
        self.tiers = HybridManager(num_device_blocks, num_host_blocks, num_swap_blocks)
        self.num_blocks = num_device_blocks + num_host_blocks
        self.watermark = int(WATERMARK * self.num_blocks)
        self.prefix_cache = PrefixCache(block_size, enable_prefix_caching)
        self.num_copied_blocks = 0  # by copy-on-write
        self.reset()

    def reset(self) -> None:
        """Forget all blocks, used and cached. Whoever held blocks must not use them any more."""
        tiers = self.tiers
        self.tiers = HybridManager(tiers.num_device_blocks, tiers.num_host_blocks, tiers.num_swap_blocks)
        self._ids = IdPool(0, self.num_blocks + tiers.num_swap_blocks)
        self._blocks: dict[int, Block] = {}  # used, cached and swapped
        self.prefix_cache.clear()
        self._evictors = {tier: Evictor() for tier in Tier}  # cached blocks, by where they are
        self._clock = 0  # counts the times that a block became idle
        self._moves: list[BlockMove] = []

    # ---- counts

    @property
    def stats(self) -> PrefixCacheStats:
        return self.prefix_cache.stats

    @property
    def num_free(self) -> int:
        return self.tiers.num_free(Tier.DEVICE) + self.tiers.num_free(Tier.HOST)

    @property
    def num_cached(self) -> int:
        return sum(len(evictor) for evictor in self._evictors.values())

    @property
    def num_used(self) -> int:
        return len(self._blocks) - self.num_cached - self.num_swapped

    @property
    def num_swapped(self) -> int:
        return self.tiers.num_swap_blocks - self.tiers.num_free(Tier.SWAP)

    @property
    def num_allocatable(self) -> int:
        """Blocks that a sequence can get: free ones, and cached ones by evicting them."""
        return self.num_free + self.num_cached

    @property
    def max_sequence_tokens(self) -> int:
        """The longest sequence that admission ever accepts."""
        return (self.num_blocks - self.watermark) * self.block_size

    # ---- allocation

    def can_allocate(self, seq: Sequence, beside: int = 0) -> AllocStatus:
        """Whether a waiting sequence's blocks and `beside` more can be had, leaving the watermark free."""
        needed = seq.num_blocks(self.block_size) + beside
        if self.num_blocks - needed < self.watermark:
            return AllocStatus.NEVER
        hits = self.find_prefix(seq)
        unused_hits = sum(self._blocks[block_id].ref_count == 0 for block_id in hits)
        left = self.num_allocatable - unused_hits - (needed - len(hits))
        return AllocStatus.OK if left >= self.watermark else AllocStatus.LATER

    def allocate(self, seq: Sequence) -> None:
        """Give a waiting sequence the blocks of its tokens; a cached prefix counts as computed."""
        hits = self.find_prefix(seq)
        for block_id in hits:
            self._acquire(block_id)
        seq.block_table = hits
        seq.num_computed = len(hits) * self.block_size
        self.stats.queried_tokens += seq.end
        self.stats.hit_tokens += seq.num_computed
        for _ in range(seq.num_blocks(self.block_size) - len(hits)):
            seq.block_table.append(self._new_block())

    def num_to_grow(self, sequences: Iterable[Sequence]) -> int:
        """Blocks that `grow` takes: for new tokens, and for copies of blocks that are shared and written next."""
        needed, writers = 0, dict[int, int]()
        for seq in sequences:
            table, written = seq.block_table, seq.num_computed // self.block_size
            needed += max(0, seq.num_blocks(self.block_size) - len(table))
            if written < len(table) and self._blocks[table[written]].ref_count > 1:
                writers[table[written]] = writers.get(table[written], 0) + 1
        for block_id, count in writers.items():  # the last holder of a block writes in place
            needed += min(count, self._blocks[block_id].ref_count - 1)
        return needed

    def can_grow(self, sequences: Seq[Sequence]) -> bool:
        """Whether the running sequences of a request can all go on."""
        return self.num_to_grow(sequences) <= self.num_allocatable

    def grow(self, sequences: Iterable[Sequence]) -> None:
        """Give running sequences the blocks of all their tokens, and each a block of its own to write its next in."""
        for seq in sequences:
            index = seq.num_computed // self.block_size
            if index < len(seq.block_table) and self._blocks[seq.block_table[index]].ref_count > 1:
                seq.block_table[index] = self._copy(seq.block_table[index])
            while len(seq.block_table) < seq.num_blocks(self.block_size):
                seq.block_table.append(self._new_block())

    def free(self, seq: Sequence) -> None:
        """Take back a sequence's blocks. Those with known content stay cached; a half-written one never does."""
        # Last block first: the end of a prefix is worth less than its start, so it is evicted first.
        for block_id in reversed(seq.block_table):
            self._drop_reference(block_id)
        seq.block_table = []
        seq.num_computed = 0
        seq.layerwise, seq.layerwise_done = None, 0

    # ---- sequences of one request

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """The child shares all that the parent has computed, a half-written last block too."""
        child.block_table = list(parent.block_table)
        child.num_computed = parent.num_computed
        child.block_hashes = parent.block_hashes[: parent.num_computed // self.block_size]
        for block_id in child.block_table:
            self._blocks[block_id].ref_count += 1

    def swap_out(self, sequences: Seq[Sequence]) -> dict[int, int] | None:
        """Move all that the sequences of one request have computed to the swap tier, a shared block once.

        A block that other requests hold too stays with them, and its content is copied. Blocks without content are
        freed. Returns places, from where to where; None, with nothing done, if the swap tier has no room.
        """
        computed = [seq.block_table[: -(-seq.num_computed // self.block_size)] for seq in sequences]
        holders = Counter(block_id for table in computed for block_id in table)
        if len(holders) > self.tiers.num_free(Tier.SWAP):
            return None
        moves: list[BlockMove] = []
        swapped = {block_id: self._swap_out(block_id, count, moves) for block_id, count in holders.items()}
        for seq, table in zip(sequences, computed, strict=True):
            for block_id in seq.block_table[len(table) :]:
                self._drop_reference(block_id)
            seq.block_table = [swapped[block_id] for block_id in table]
            seq.layerwise, seq.layerwise_done = None, 0
        self._moves += moves
        return {move.src: move.dst for move in moves}

    def num_swapped_blocks(self, sequences: Iterable[Sequence]) -> int:
        """Blocks that `swap_in` has to find room for."""
        return len({block_id for seq in sequences for block_id in seq.block_table})

    def swap_in(self, sequences: Seq[Sequence]) -> dict[int, int]:
        """Bring back what `swap_out` moved; the caller has checked that there is room. Returns places likewise."""
        moved: dict[int, int] = {}
        for block_id in dict.fromkeys(block_id for seq in sequences for block_id in seq.block_table):
            move = self.tiers.move(block_id, self._tier_for_new_block())
            self._moves.append(move)
            moved[move.src] = move.dst
        for seq in sequences:
            self.register_computed(seq, 0)
        return moved

    def _swap_out(self, block_id: int, holders: int, moves: list[BlockMove]) -> int:
        """The block that has this one's content and `holders` references on the swap tier."""
        block = self._blocks[block_id]
        if block.ref_count == holders:
            self.prefix_cache.forget(block)  # what is found must be there to be attended
            moves.append(self.tiers.move(block_id, Tier.SWAP))
            return block_id
        copy = self._add_block(Tier.SWAP)
        self._blocks[copy].ref_count = holders
        block.ref_count -= holders
        moves.append(BlockMove(self.tiers.physical_id(block_id), self.tiers.physical_id(copy), keeps_source=True))
        return copy

    # ---- prefix cache

    def find_prefix(self, seq: Sequence) -> list[int]:
        """Blocks whose content is the start of `seq`, as far as it need not be computed."""
        return self.prefix_cache.find(seq)

    def register_computed(self, seq: Sequence, previously_computed: int) -> None:
        """Make the blocks that the last step filled findable."""
        for index in range(previously_computed // self.block_size, seq.num_computed // self.block_size):
            self.prefix_cache.register(seq, index, self._blocks[seq.block_table[index]])

    def reset_prefix_cache(self) -> None:
        """Forget all cached content. Blocks in use stay with their sequences and are no longer findable."""
        for evictor in self._evictors.values():
            while evictor:
                self._evict(evictor.oldest()[1])
        self.prefix_cache.clear()

    # ---- places

    def physical_ids(self, seq: Sequence, num_tokens: int) -> list[int]:
        """Places of the blocks that hold the sequence's first `num_tokens` tokens."""
        return [self.tiers.physical_id(block_id) for block_id in seq.block_table[: -(-num_tokens // self.block_size)]]

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
                    self._vacate_device_block()
                    self._moves.append(self.tiers.move(block_id, Tier.DEVICE))
                    promoted += 1

    def take_moves(self) -> list[BlockMove]:
        """The moves decided since the last call, in the order in which they must be carried out."""
        moves, self._moves = self._moves, []
        return moves

    def _device_can_be_had(self) -> bool:
        return self.tiers.num_free(Tier.DEVICE) > 0 or bool(self._evictors[Tier.DEVICE])

    def _vacate_device_block(self) -> None:
        """Free a device place. The device's oldest idle block goes to the host, unless the oldest of all must go."""
        if self.tiers.num_free(Tier.DEVICE):
            return
        on_device, on_host = self._evictors[Tier.DEVICE], self._evictors[Tier.HOST]
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
        return self._add_block(self._tier_for_new_block())

    def _tier_for_new_block(self) -> Tier:
        """The tier where a block goes next. There is a free place on it now."""
        if self._device_can_be_had():
            self._vacate_device_block()
            return Tier.DEVICE
        if not self.tiers.num_free(Tier.HOST):
            self._evict(self._evictors[Tier.HOST].oldest()[1])
        return Tier.HOST

    def _add_block(self, tier: Tier) -> int:
        block_id = self._ids.take()
        self._blocks[block_id] = Block(block_id)
        self.tiers.assign(block_id, tier)
        return block_id

    def _copy(self, block_id: int) -> int:
        """A block of its own for one of a shared block's holders, with the same content."""
        copy = self._new_block()
        self._moves.append(BlockMove(self.tiers.physical_id(block_id), self.tiers.physical_id(copy), keeps_source=True))
        self._drop_reference(block_id)
        self.num_copied_blocks += 1
        return copy

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
        if block.content_hash is None:
            self._discard(block_id)
        else:
            self._clock += 1
            self._evictors[self.tiers.tier_of(block_id)].add(block_id, self._clock)

    def _evict(self, block_id: int) -> None:
        self.prefix_cache.forget(self._blocks[block_id])
        self._evictors[self.tiers.tier_of(block_id)].remove(block_id)
        self._discard(block_id)

    def _discard(self, block_id: int) -> None:
        del self._blocks[block_id]
        self.tiers.release(block_id)
        self._ids.give_back(block_id)

    # ---- invariants

    def check(self) -> None:
        """Raise AssertionError if the bookkeeping contradicts itself. For tests and for fuzzing."""
        assert self.num_free + self.num_cached + self.num_used == self.num_blocks
        assert self.tiers.num_assigned == len(self._blocks)
        for tier, evictor in self._evictors.items():
            for block_id in evictor:
                block = self._blocks[block_id]
                assert block.ref_count == 0 and block.content_hash is not None
                assert self.tiers.tier_of(block_id) is tier
        for block_id, block in self._blocks.items():
            assert self.tiers.tier_of(block_id) is not Tier.SWAP or (block.ref_count > 0 and not block.content_hash)
        self.prefix_cache.check()
