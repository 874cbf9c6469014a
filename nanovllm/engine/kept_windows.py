"""What stays of windows: of the blocks that a sequence has left behind, those that later prompts are likely to see.

A block behind the window is worth keeping if it is seen from a branch point of the sequence, or from the end of the
last whole hash block that is computed, where the sequence may end. All others are *spare*: they are evicted before
anything else.

What earlier prompts with the same start kept is used whenever a sequence with that start is, so that old conversations
go whole, and not each of them a little. So the cache keeps what the sessions used last go on from, if all their tokens
fit (docs/memory-and-ordering.md, "Prefixes", has the promise).
"""

from __future__ import annotations

from collections.abc import Iterable

from nanovllm.data.kv_groups import HOLE, KVGroup
from nanovllm.engine.block_pool import BlockPool
from nanovllm.engine.branch_points import BranchPoints, branch_points, grid_interval
from nanovllm.engine.request import Sequence

GRID_SHARE = 4  # windows before the grid of a prompt take at most 1 / GRID_SHARE of all blocks


class KeptWindows:
    """For the groups with a window of a block manager."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._groups = pool.groups
        windows = [group for group in pool.groups if group.window is not None and pool.prefix_cache.enabled]
        of_a_point = sum(group.num_blocks(group.window or 0) + 1 for group in windows)
        self._most_on_grid = pool.num_blocks // GRID_SHARE // max(1, of_a_point)
        self._is_needed = bool(windows)

    def plan(self, seq: Sequence, places: Iterable[int]) -> None:
        """Choose the branch points of a sequence that is admitted. places: see `branch_points`."""
        if self._is_needed:
            interval = grid_interval(seq.end, self._most_on_grid)
            unit = self._pool.prefix_cache.hash_block_size
            seq.prefix.branch_points = branch_points(seq.end, places, interval, unit)
            seq.prefix.lingering = []  # of an earlier admission: those stay, as the sequence ended there
            self._refresh(seq)

    def release(self, seq: Sequence) -> None:
        """Let go of the blocks that no token still to be computed sees."""
        if seq.prefix.lingering:
            self._end_lingering(seq)
        for group, table in enumerate(seq.block_tables):
            first = self._groups[group].first_visible(seq.num_computed)
            for index in range(seq.first_held[group], min(first, len(table))):
                if table[index] != HOLE:
                    self._let_go(seq, group, index, table[index])
                    table[index] = HOLE
            seq.first_held[group] = max(first, seq.first_held[group])

    def _let_go(self, seq: Sequence, group: int, index: int, block_id: int) -> None:
        is_kept = seq.prefix.branch_points.is_seen(self._groups[group], index)
        lingers = not is_kept and self._may_end_behind(seq, group, index)
        if lingers:
            seq.prefix.lingering.append((self._pool.blocks[block_id], index))
        self._pool.drop_reference(block_id, is_spare=not (is_kept or lingers))

    def _may_end_behind(self, seq: Sequence, group: int, index: int) -> bool:
        """Whether a later prompt would see the block if the sequence ended now."""
        unit = self._pool.prefix_cache.hash_block_size
        return BranchPoints((seq.num_computed // unit * unit,)).is_seen(self._groups[group], index)

    def _end_lingering(self, seq: Sequence) -> None:
        """Blocks that were kept in case the sequence ended are not worth it where it has gone on."""
        lingering = seq.prefix.lingering
        seq.prefix.lingering = []
        for block, index in lingering:
            if self._may_end_behind(seq, block.group, index):
                seq.prefix.lingering.append((block, index))
            else:
                self._pool.set_kept(block, False)

    def on_grid(self, seq: Sequence) -> list[tuple[int, int]]:
        """(first position, block id) of what is kept before the grid along a sequence that ends.

        All that is kept along it counts as used now.
        """
        is_on_grid = seq.prefix.branch_points.is_on_grid
        kept = self._refresh(seq) if self._is_needed else []
        return [(index * group.block_size, block_id) for group, index, block_id in kept if is_on_grid(group, index)]

    def _refresh(self, seq: Sequence) -> list[tuple[KVGroup, int, int]]:
        """All cached blocks of windows along a sequence count as used now, also those that it computes again.

        What would be kept of its own blocks is kept of these, too: they stay those that the prefix cache finds.
        """
        windows = [each for each in self._pool.prefix_cache.windows(seq) if not each[2].ref_count]
        for group, index, block in windows:
            if seq.prefix.branch_points.is_seen(self._groups[group], index) or self._may_end_behind(seq, group, index):
                self._pool.set_kept(block, True)
        idle = [(self._groups[group], index, block.block_id) for group, index, block in windows]
        self._pool.refresh(block_id for _, _, block_id in idle)
        return idle
