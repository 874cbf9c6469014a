"""The block pool: what each KV block contains, who needs it, and on which tier it is.

Every block on the device or host tier is *used* (referenced by sequences), *cached* (unreferenced, and the prefix cache
can find it) or *free*; the three counts always add up to the total. Blocks on the swap tier are counted separately:
preempted sequences reference them, and they are swapped in before attention reads them.

Block ids name blocks for as long as they exist; physical block ids say where their content is. Moving a block changes
its physical id only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from enum import IntEnum

from nanovllm.data.batch import BlockMove, Tier
from nanovllm.data.kv_groups import KVGroup, KVGroups
from nanovllm.engine.prefix_cache import Block, Evictor, PrefixCache
from nanovllm.kvcache.hybrid_manager import HybridManager, IdPool

MAX_PROMOTIONS_PER_STEP = 4  # a step waits for its moves before it computes


class KVBlockState(IntEnum):
    """What a physical block is used for, see above. Fits a byte. `engine.view` tells the last two apart from USED."""

    FREE = 0
    CACHED = 1
    USED = 2
    FILLING = 3  # a running request has it, and some of its tokens are still to be computed
    IN_FLIGHT = 4  # on the host, and a copy to or from a ring slot or the layer buffer is under way


class BlockPool:
    """Blocks with reference counts. Active blocks are on the device tier as far as it reaches."""

    def __init__(self, tiers: HybridManager, groups: KVGroups, prefix_cache: PrefixCache) -> None:
        """prefix_cache: finds blocks of this pool."""
        self.groups = groups
        self.tiers = tiers
        self.num_blocks = tiers.num_device_blocks + tiers.num_host_blocks
        self.prefix_cache = prefix_cache
        self.most_used = self.most_used_on_device = 0  # blocks, in one step
        self.reset()

    def reset(self) -> None:
        """Forget all blocks, used and cached."""
        tiers = self.tiers
        self.tiers = HybridManager(tiers.num_device_blocks, tiers.num_host_blocks, tiers.num_swap_blocks)
        self._ids = IdPool(0, self.num_blocks + tiers.num_swap_blocks)
        self.blocks: dict[int, Block] = {}  # by block id: used, cached and swapped out
        self.prefix_cache.clear()
        self._evictors = {tier: Evictor() for tier in Tier}  # cached blocks
        self._clock = 0  # time of last use: how often a block had become unreferenced, or was refreshed, before
        self._moves: list[BlockMove] = []

    # ---- counts

    @property
    def num_free(self) -> int:
        return self.tiers.pools[Tier.DEVICE].num_free + self.tiers.pools[Tier.HOST].num_free

    @property
    def num_cached(self) -> int:
        return sum(len(evictor) for evictor in self._evictors.values())

    @property
    def num_used(self) -> int:
        return len(self.blocks) - self.num_cached - self.num_swapped

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

    def block_states(self) -> bytes:
        """The `KVBlockState` of every physical block, in the order of the physical ids; swapped blocks are used."""
        states = bytearray(self.num_blocks + self.tiers.num_swap_blocks)
        for block_id, block in self.blocks.items():
            states[self.tiers.physical_ids[block_id]] = KVBlockState.USED if block.ref_count else KVBlockState.CACHED
        return bytes(states)

    # ---- references

    def group_of(self, block_id: int) -> KVGroup:
        return self.groups[self.blocks[block_id].group]

    def new_block(self, group: int) -> int:
        """A block for new content of a group, on the device if possible."""
        return self._add_block(self._tier_for_new_block(), group)

    def _tier_for_new_block(self) -> Tier:
        """The tier for the next block; frees a block there if it is full."""
        if self._can_vacate_device:
            self._vacate_device_block()
            return Tier.DEVICE
        if not self.tiers.pools[Tier.HOST].num_free:
            self._evict(self._evictors[Tier.HOST].oldest()[1])
        return Tier.HOST

    def _add_block(self, tier: Tier, group: int) -> int:
        block_id = self._ids.allocate()
        self.blocks[block_id] = Block(block_id, group)
        self.tiers.assign(block_id, tier)
        return block_id

    def copy(self, block_id: int, num_tokens: int | None = None) -> int:
        """A new block with the same content, or its first `num_tokens` tokens; drops one reference to the old one."""
        copy = self.new_block(self.blocks[block_id].group)
        src = self.tiers.physical_ids[block_id]
        dst = self.tiers.physical_ids[copy]
        group = self.blocks[block_id].group
        self._moves.append(BlockMove(src, dst, keeps_source=True, num_tokens=num_tokens, group=group))
        self.drop_reference(block_id)
        return copy

    def continue_block(self, cached: Block, was_unreferenced: bool, num_tokens: int, num_needed: int) -> int:
        """A block with the first `num_tokens` tokens of `cached`, which one sequence will fill.

        The sequence has a reference to `cached`. The result is a copy if another sequence uses `cached`, or if that
        holds more tokens and there are enough blocks for the `num_needed` that the sequence still needs. Otherwise it
        is `cached` itself, whose further tokens are forgotten.
        """
        has_more = cached.num_cached_tokens > num_tokens
        if not was_unreferenced or (has_more and self.num_allocatable >= num_needed):
            self.prefix_cache.stats.copied_blocks += 1
            self.prefix_cache.stats.copied_tokens += num_tokens
            return self.copy(cached.block_id, num_tokens)
        if has_more:
            self.prefix_cache.forget(cached)
        if self.tiers.tier_of(cached.block_id) is Tier.HOST and self._can_vacate_device:
            self._vacate_device_block()
            self._move(cached.block_id, Tier.DEVICE, num_tokens)
        return cached.block_id

    def _move(self, block_id: int, tier: Tier, num_tokens: int | None = None) -> None:
        """Move a block to another tier, with all its tokens or the first `num_tokens`."""
        move = self.tiers.move(block_id, tier)
        is_full = num_tokens in (None, self.group_of(block_id).block_size)
        group = self.blocks[block_id].group
        self._moves.append(move if is_full else replace(move, num_tokens=num_tokens, group=group))

    def acquire(self, block_id: int) -> None:
        block = self.blocks[block_id]
        if block.ref_count == 0:
            self._evictors[self.tiers.tier_of(block_id)].remove(block_id)
        block.ref_count += 1

    def drop_reference(self, block_id: int, is_spare: bool = False) -> None:
        """is_spare: if this was the last reference, the block is evicted before all that are not."""
        block = self.blocks[block_id]
        block.ref_count -= 1
        if block.ref_count > 0:
            return
        if block.hashes:
            self._clock += 1
            is_kept = block.is_usable and not is_spare
            self._evictors[self.tiers.tier_of(block_id)].add(block_id, (is_kept, self._clock))
        else:
            self._discard(block_id)

    def set_kept(self, block: Block, is_kept: bool) -> None:
        """Whether a cached block is worth keeping; if not, it is spare."""
        if self.blocks.get(block.block_id) is block and not block.ref_count:
            evictor = self._evictors[self.tiers.tier_of(block.block_id)]
            _, clock = evictor[block.block_id]
            evictor.add(block.block_id, (is_kept, clock))

    def set_usable(self, block: Block, is_usable: bool) -> None:
        """Whether a prompt can begin with the tokens of a block, of a group without a window; if not, it is spare."""
        block.is_usable = is_usable
        self.set_kept(block, is_usable)

    def refresh(self, block_ids: Iterable[int]) -> None:
        """Cached blocks that are not spare count as used now, in the order in which they were used before."""
        tier_of = self.tiers.tier_of
        cached = [block_id for block_id in block_ids if not self.blocks[block_id].ref_count]
        uses = ((self._evictors[tier_of(block_id)][block_id], block_id) for block_id in cached)
        for (is_kept, _), block_id in sorted(uses):
            if is_kept:
                self._clock += 1
                self._evictors[tier_of(block_id)].add(block_id, (True, self._clock))

    def _evict(self, block_id: int) -> None:
        self.prefix_cache.forget(self.blocks[block_id])
        self._evictors[self.tiers.tier_of(block_id)].remove(block_id)
        self._discard(block_id)

    def _discard(self, block_id: int) -> None:
        del self.blocks[block_id]
        self.tiers.release(block_id)
        self._ids.free(block_id)

    def forget_content(self) -> None:
        """Let the prefix cache find nothing any more. Cached blocks are free then."""
        for evictor in self._evictors.values():
            while evictor:
                self._evict(evictor.oldest()[1])
        for block in self.blocks.values():
            self.prefix_cache.forget(block)

    # ---- tiers

    def promote(self, block_ids: Iterable[int]) -> None:
        """Move those of these full blocks that are on the host to device blocks that are free or cached.

        That loads a block once, instead of in every step.
        """
        if self.tiers.pools[Tier.HOST].num_free == self.tiers.num_host_blocks:
            return
        promoted = 0
        for block_id in block_ids:
            if promoted == MAX_PROMOTIONS_PER_STEP or not self._can_vacate_device:
                return
            if self.tiers.tier_of(block_id) is Tier.HOST:
                self._vacate_device_block()
                self._move(block_id, Tier.DEVICE)
                promoted += 1

    @property
    def _can_vacate_device(self) -> bool:
        return self.tiers.pools[Tier.DEVICE].num_free > 0 or bool(self._evictors[Tier.DEVICE])

    def _vacate_device_block(self) -> None:
        """Free a device block: its least recently used cached block moves to the host, unless it is spare.

        If the host is full, the least recently used cached block of both tiers is evicted.
        """
        if self.tiers.pools[Tier.DEVICE].num_free:
            return
        on_device = self._evictors[Tier.DEVICE]
        on_host = self._evictors[Tier.HOST]
        last_used, leaving = on_device.oldest()
        is_kept, _ = last_used
        is_host_full = not self.tiers.pools[Tier.HOST].num_free
        if not is_kept or (is_host_full and (not on_host or last_used < on_host.oldest()[0])):
            self._evict(leaving)
            return
        if is_host_full:
            self._evict(on_host.oldest()[1])
        self._move(leaving, Tier.HOST, self.blocks[leaving].num_cached_tokens)
        on_host.add(leaving, on_device.remove(leaving))

    # ---- swap tier

    def swap_out(self, block_id: int, holders: int) -> tuple[int, BlockMove]:
        """Move or copy a block with `holders` references to the swap tier. Returns its id there, and the move."""
        block = self.blocks[block_id]
        if block.ref_count == holders:
            self.prefix_cache.forget(block)  # swapped blocks cannot be attended
            move = self.tiers.move(block_id, Tier.SWAP)
            self._moves.append(move)
            return block_id, move
        copy = self._add_block(Tier.SWAP, block.group)
        self.blocks[copy].ref_count = holders
        block.ref_count -= holders
        move = BlockMove(self.tiers.physical_ids[block_id], self.tiers.physical_ids[copy], keeps_source=True)
        self._moves.append(move)
        return copy, move

    def swap_in(self, block_id: int) -> BlockMove:
        """Move a block back from the swap tier. The caller has checked that a block can be allocated."""
        move = self.tiers.move(block_id, self._tier_for_new_block())
        self._moves.append(move)
        return move

    # ---- moves

    @property
    def has_moves(self) -> bool:
        """Whether moves are decided that `take_moves` has not returned yet."""
        return bool(self._moves)

    def take_moves(self) -> list[BlockMove]:
        """The moves decided since the last call, in the order in which they must be carried out."""
        moves = self._moves
        self._moves = []
        return moves
