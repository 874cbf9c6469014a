"""Which block is on which tier. Pure bookkeeping, without torch: the KV cache carries out the moves.

Sequences and the prefix cache hold a block by its block id. Its physical block id says where its bytes are. Physical
ids are numbered across the tiers: resident device blocks first, then host blocks, then swap blocks, which are host
memory too but are never attended. Moving a block changes its physical id only, so no block table has to be rewritten.
"""

from __future__ import annotations

import heapq

from nanovllm.data.batch import BlockMove, Tier


class IdPool:
    """The free physical block ids of one tier: a range of integers, handed out lowest first.

    Blocks allocated one after the other are then neighbours where possible, and are copied in one call.
    """

    def __init__(self, first: int, count: int) -> None:
        self._next = first
        self._end = first + count
        self._returned: list[int] = []  # a heap
        self.count = count

    @property
    def num_free(self) -> int:
        return self._end - self._next + len(self._returned)

    def allocate(self) -> int:
        """A free id, used from now on. Raises IndexError if there is none: the caller checks `num_free` first."""
        if self._returned:
            return heapq.heappop(self._returned)
        if self._next == self._end:
            raise IndexError("no free block")
        self._next += 1
        return self._next - 1

    def free(self, physical_id: int) -> None:
        heapq.heappush(self._returned, physical_id)


class HybridManager:
    """Maps block ids to physical block ids. Only its methods change the maps."""

    def __init__(self, num_device_blocks: int, num_host_blocks: int, num_swap_blocks: int = 0) -> None:
        self.num_device_blocks = num_device_blocks
        self.num_host_blocks = num_host_blocks
        self.num_swap_blocks = num_swap_blocks
        self.pools = {  # the free physical ids
            Tier.DEVICE: IdPool(0, num_device_blocks),
            Tier.HOST: IdPool(num_device_blocks, num_host_blocks),
            Tier.SWAP: IdPool(num_device_blocks + num_host_blocks, num_swap_blocks),
        }
        self.physical_ids: dict[int, int] = {}  # by block id

    def tier_of(self, block_id: int) -> Tier:
        physical_id = self.physical_ids[block_id]
        if physical_id < self.num_device_blocks:
            return Tier.DEVICE
        return Tier.HOST if physical_id < self.num_device_blocks + self.num_host_blocks else Tier.SWAP

    def assign(self, block_id: int, tier: Tier) -> None:
        """Give a new block a free physical id on `tier`. Raises ValueError if the block already has one."""
        if block_id in self.physical_ids:
            raise ValueError(f"block {block_id} already has physical block id {self.physical_ids[block_id]}")
        self.physical_ids[block_id] = self.pools[tier].allocate()

    def release(self, block_id: int) -> None:
        """Forget the block and free its physical id."""
        tier = self.tier_of(block_id)
        self.pools[tier].free(self.physical_ids.pop(block_id))

    def move(self, block_id: int, tier: Tier) -> BlockMove:
        """Assign the block to another tier. Carry out the returned move before the next forward pass."""
        source_tier = self.tier_of(block_id)
        source = self.physical_ids[block_id]
        if source_tier is tier:
            raise ValueError(f"block {block_id} is already on the {tier.value}")
        self.physical_ids[block_id] = self.pools[tier].allocate()
        self.pools[source_tier].free(source)
        return BlockMove(source, self.physical_ids[block_id])
