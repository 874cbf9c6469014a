"""Which block lives on which tier. Pure bookkeeping: what it decides is carried out by the room.

A block has an identity (its id, which sequences and the prefix cache hold) and a place (where its bytes are). Places
are numbered through: resident device blocks first, then host blocks, then swap blocks, which are host memory too but
are never attended. Moving a block changes its place and nothing else, so no block table has to be rewritten.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from enum import Enum


class Tier(Enum):
    """The kinds of KV memory. SWAP holds the blocks of preempted requests until they run again."""

    DEVICE = "device"
    HOST = "host"
    SWAP = "swap"


@dataclass(frozen=True, slots=True)
class BlockMove:
    """All layers of one block, from place to place. Moves of one step are carried out in order.

    `keeps_source`: the block at `src` stays in use, as in copy-on-write. The bytes go the same way.
    """

    src: int
    dst: int
    keeps_source: bool = False


class IdPool:
    """The free places of one tier: a range of integers, handed out lowest first.

    Blocks that are placed one after the other so lie beside each other where they can, and are copied in one call.
    """

    def __init__(self, first: int, count: int) -> None:
        self._next = first
        self._end = first + count
        self._returned: list[int] = []  # a heap
        self.count = count

    @property
    def num_free(self) -> int:
        return self._end - self._next + len(self._returned)

    def take(self) -> int:
        """A free place. The caller has checked that there is one."""
        if self._returned:
            return heapq.heappop(self._returned)
        if self._next == self._end:
            raise IndexError("no free place")
        self._next += 1
        return self._next - 1

    def give_back(self, physical_id: int) -> None:
        heapq.heappush(self._returned, physical_id)


class HybridManager:
    """Maps block ids to places on the tiers."""

    def __init__(self, num_device_blocks: int, num_host_blocks: int, num_swap_blocks: int = 0) -> None:
        self.num_device_blocks = num_device_blocks
        self.num_host_blocks = num_host_blocks
        self.num_swap_blocks = num_swap_blocks
        self._pools = {
            Tier.DEVICE: IdPool(0, num_device_blocks),
            Tier.HOST: IdPool(num_device_blocks, num_host_blocks),
            Tier.SWAP: IdPool(num_device_blocks + num_host_blocks, num_swap_blocks),
        }
        self._physical_ids: dict[int, int] = {}

    @property
    def num_assigned(self) -> int:
        return len(self._physical_ids)

    def num_free(self, tier: Tier) -> int:
        """Places of `tier` that hold no block."""
        return self._pools[tier].num_free

    def tier_of(self, block_id: int) -> Tier:
        physical_id = self._physical_ids[block_id]
        if physical_id < self.num_device_blocks:
            return Tier.DEVICE
        return Tier.HOST if physical_id < self.num_device_blocks + self.num_host_blocks else Tier.SWAP

    def physical_id(self, block_id: int) -> int:
        return self._physical_ids[block_id]

    def assign(self, block_id: int, tier: Tier) -> None:
        """Give a new block a free place on `tier`."""
        if block_id in self._physical_ids:
            raise ValueError(f"block {block_id} already has place {self._physical_ids[block_id]}")
        self._physical_ids[block_id] = self._pools[tier].take()

    def release(self, block_id: int) -> None:
        """The block's content is gone; its place is free."""
        tier = self.tier_of(block_id)
        self._pools[tier].give_back(self._physical_ids.pop(block_id))

    def move(self, block_id: int, tier: Tier) -> BlockMove:
        """Put the block on another tier. The returned move must be carried out before the next forward pass."""
        source_tier, source = self.tier_of(block_id), self._physical_ids[block_id]
        if source_tier is tier:
            raise ValueError(f"block {block_id} is already on the {tier.value}")
        self._physical_ids[block_id] = self._pools[tier].take()
        self._pools[source_tier].give_back(source)
        return BlockMove(source, self._physical_ids[block_id])
