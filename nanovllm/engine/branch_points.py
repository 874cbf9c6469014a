"""Where later prompts are likely to go on from a prompt: functions of numbers.

A later prompt begins like an earlier one up to where that ended, where its answer ended, or where two prompts parted
before, such as after a system prompt; or just before the end, where templates begin an answer with "<think>" that they
leave out once the thought is dropped. Those are the *places*. An edit may part prompts anywhere: for that there is a
*grid*. At these points the cache keeps what layers with a window see, and the states of recurrent layers.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

from nanovllm.data.kv_groups import KVGroup

BEGUN_ANSWER = 16  # tokens at the end of a prompt that begin the answer, and that the next prompt may not have there
LEAST_INTERVAL = 2048  # tokens between the points of the grid, where there is much memory


@dataclass(frozen=True, slots=True)
class BranchPoints:
    """The points of one prompt."""

    places: tuple[int, ...] = ()  # ascending
    interval: int = 0  # of the grid; 0: there is none

    def is_seen(self, group: KVGroup, index: int) -> bool:
        """Whether a prompt that goes on at one of the points sees a block of a group with a window."""
        begin, last = _seen_from(group, index)
        after = bisect_right(self.places, begin)
        return (after < len(self.places) and self.places[after] <= last) or self.is_on_grid(group, index)

    def is_on_grid(self, group: KVGroup, index: int) -> bool:
        """Whether a prompt that goes on at a point of the grid sees such a block."""
        begin, last = _seen_from(group, index)
        return self.interval > 0 and begin // self.interval < last // self.interval

    def after(self, position: int) -> int:
        """The first point at or after a position; 0 if there is none."""
        place = bisect_left(self.places, position)
        on_grid = -(-position // self.interval) * self.interval if self.interval else 0
        return min([point for point in (*self.places[place : place + 1], on_grid) if point], default=0)


def _seen_from(group: KVGroup, index: int) -> tuple[int, int]:
    """The first token of a block, and the last position at which a prompt that goes on there sees the block."""
    assert group.window is not None
    begin = index * group.block_size
    return begin, begin + group.block_size + group.window - 2


def branch_points(end: int, places: Iterable[int], interval: int, unit: int) -> BranchPoints:
    """The points of a prompt of `end` tokens, of which all places are multiples of `unit`.

    places: where its own start was found, and where it parts from an earlier prompt. interval: see `grid_interval`.
    """
    last = (end - 1) // unit * unit  # a longer prompt computes at least the token after it
    before_answer = (end - 1 - min(BEGUN_ANSWER, unit // 8)) // unit * unit
    return BranchPoints(tuple(sorted({last, before_answer, *places})), -(-interval // unit) * unit)


def grid_interval(tokens: int, most: int) -> int:
    """Tokens between the points of a grid, of which a prompt of `tokens` tokens has at most `most`.

    It doubles as prompts grow, so that the points of a longer prompt are among those of its start.
    """
    interval = LEAST_INTERVAL
    while tokens // interval > max(1, most):
        interval *= 2
    return interval
