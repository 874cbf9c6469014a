"""Rows in groups, one below the other, and the tiles of rows that each group takes, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def group_of_tile(ends_ptr, num_groups, tile, GROUPS: tl.constexpr, BLOCK_M: tl.constexpr):  # type: ignore[no-untyped-def]
    """(group, first row, end of the group's rows) of a tile of BLOCK_M rows; the group `num_groups` has no rows.

    Tiles are counted over the groups in order. A program finds its group from the ends of all groups, so that the host
    need not know them. ends: int64 [num_groups], where the rows of each group end; GROUPS: a power of 2 of at least
    num_groups.
    """
    groups = tl.arange(0, GROUPS)
    known = groups < num_groups
    ends = tl.load(ends_ptr + groups, mask=known, other=0).to(tl.int32)
    starts = tl.load(ends_ptr + groups - 1, mask=known & (groups > 0), other=0).to(tl.int32)
    tiles = tl.where(known, tl.cdiv(ends - starts, BLOCK_M), 0)
    tiles_until = tl.cumsum(tiles, 0)
    group = tl.sum((tiles_until <= tile).to(tl.int32), 0)
    group = tl.minimum(group, num_groups)  # behind the last tile the padding up to GROUPS is counted, too
    is_own = groups == group
    first_tile = tl.sum(tl.where(is_own, tiles_until - tiles, 0), 0)
    begin = tl.sum(tl.where(is_own, starts, 0), 0) + (tile - first_tile) * BLOCK_M
    return group, begin, tl.sum(tl.where(is_own, ends, 0), 0)


def most_tiles(rows: int, num_groups: int, block_m: int) -> int:
    """The most tiles that so many rows can take, however they are grouped."""
    return rows // block_m + min(rows, num_groups)
