"""Idle blocks in the order in which they were last used."""

from __future__ import annotations

import heapq
from collections.abc import Iterator


class Evictor:
    """A set of blocks, each with the time of its last use, whose oldest is found at once.

    A heap with lazy deletion: what was removed stays in it until it comes up, or until it outweighs what is left.
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
        """Take a block out; returns the time of its last use."""
        last_used = self._last_used.pop(block_id)
        if len(self._heap) > 2 * len(self._last_used) + 16:
            self._heap = [(time, block) for block, time in self._last_used.items()]
            heapq.heapify(self._heap)
        return last_used

    def oldest(self) -> tuple[int, int]:
        """(time of last use, block) of the block used longest ago. The caller has checked that there is one."""
        while self._last_used.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0]
