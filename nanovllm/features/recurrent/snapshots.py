"""Where in a prompt chunks end, and where the recurrent state is kept: functions of numbers."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from math import lcm

from nanovllm.config import EngineConfig
from nanovllm.data.network import RECURRENT_CHUNK
from nanovllm.engine.branch_points import branch_points

LONG_PROMPT = 4  # chunks; snapshots on the way of longer prompts cut no chunk in two, since each chunk loads all KV


@dataclass(frozen=True, slots=True)
class SnapshotPlan:
    """Where the state of a prompt is kept. A chunk ends at each of these positions."""

    fixed: tuple[int, ...] = ()  # positions, ascending
    places: tuple[int, ...] = ()  # of these, all but those of the grid alone
    interval: int = 0  # a chunk that passes a multiple of it ends at the last multiple of `unit`; 0: no such positions
    unit: int = 1  # all positions are multiples of it

    def chunk(self, begin: int, most: int) -> int:
        """How many tokens to compute after `begin`, of `most` that a step could."""
        due = bisect_right(self.fixed, begin)
        end = min([begin + most, *self.fixed[due : due + 1]])
        last = end // self.unit * self.unit
        return (last if self._passes(begin, last) else end) - begin

    def is_due(self, begin: int, end: int) -> bool:
        """Whether the state is kept after a chunk of tokens [begin, end)."""
        return end in self.fixed or (end % self.unit == 0 and self._passes(begin, end))

    def within(self, begin: int, end: int, chunk: int) -> list[int]:
        """Where the state is kept before `end` while tokens [begin, end) are computed in chunks of `chunk`."""
        positions = []
        at = begin
        while at < end:
            first = at
            at += self.chunk(at, min(chunk, end - at))
            if at < end and self.is_due(first, at):
                positions.append(at)
        return positions

    def _passes(self, begin: int, end: int) -> bool:
        return self.interval > 0 and begin // self.interval < end // self.interval


def planned_snapshots(
    begin: int,
    end: int,
    places: Iterable[int],
    interval: int,
    unit: int,
    chunk: int | None,
    stored_unit: int = 1,
    has_windows: bool = False,
) -> SnapshotPlan:
    """Where the state of a prompt of `end` tokens is kept, of which `begin` are computed, in chunks of up to `chunk`.

    They are its branch points. In a prompt of many chunks those of the grid are at the ends of chunks instead, so that
    no further chunk loads the KV before it; but not if other layers have windows, which are kept before the grid. They
    are multiples of `stored_unit` too, which the block store takes, unless that is longer than the interval.
    """
    points = branch_points(end, places, interval, unit)
    if (common := lcm(unit, stored_unit)) <= interval:
        unit = common
    interval = -(-points.interval // unit) * unit
    is_long = chunk is not None and end > LONG_PROMPT * chunk and not has_windows
    fixed = {*points.places, *(() if is_long else range(interval, end, interval))}
    between = tuple(sorted(position for position in fixed if begin < position < end))
    places = tuple(position for position in between if position in points.places)
    return SnapshotPlan(between, places, interval if is_long else 0, unit)


def recurrent_edge(config: EngineConfig, num_seqs: int) -> int:
    """`SchedulerLimits.edge` of a network with recurrent layers; 1 if steps are too small. num_seqs: that may run."""
    beside_decodes = config.max_num_batched_tokens - num_seqs * (1 + config.num_speculative_tokens)
    return RECURRENT_CHUNK if config.chunk >= RECURRENT_CHUNK and beside_decodes >= 2 * RECURRENT_CHUNK else 1
