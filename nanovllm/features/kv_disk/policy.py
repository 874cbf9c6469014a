"""What is stored and what is read: functions of numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from nanovllm.data.kv_groups import KVGroup, KVGroups
from nanovllm.memory.layout import KVLayout

UNIT = 256  # tokens of a record, whatever the block size of an engine
KEPT = 0.8  # of the weight of a measurement, when the next one comes
TRY_AGAIN = 16  # times that computing was faster
WINDOW_MARGIN = 4096  # tokens before a window: a reader with larger blocks needs the first of them whole


def wanted_units(group: KVGroup, prompt_len: int, begin: int, end: int) -> range:
    """The units that are worth storing once the tokens from `begin` to `end` have been computed.

    Those of the output too, with which the next prompt of a conversation begins. Of a group with a window only those
    near the prompt's end and after it: that is where another prompt goes on.
    """
    first = begin // UNIT
    if group.window is not None:
        first = max(first, (prompt_len - group.window - WINDOW_MARGIN) // UNIT)
    return range(first, end // UNIT)


def needed_units(group: KVGroup, begin: int, end: int) -> range:
    """The units that a sequence reads to go on at `end`, when it has what it needs to go on at `begin`.

    Of the first block of a window all tokens are read, since the prefix cache knows a block from its start.
    """
    first = begin if group.window is None else max(begin, group.first_visible(end) * group.block_size)
    return range(first // UNIT, end // UNIT)


def first_read(group: KVGroup, unit: int) -> int:
    """The first token of a unit that is ever read into blocks of the group's size.

    Whoever reads the unit goes on at its end or later, and what a window needs there begins no earlier.
    """
    return max(unit * UNIT, group.first_visible((unit + 1) * UNIT) * group.block_size)


def stored_bytes(layout: KVLayout, state_bytes: int, prompt_len: int) -> int:
    """What a prompt reads that is stored as far as it can be. state_bytes: of the state of recurrent layers."""
    end = (prompt_len - 1) // UNIT * UNIT
    groups = zip(layout.groups, layout.of_groups, strict=True)
    kept = sum(len(needed_units(group, 0, end)) * UNIT * of_group.token_bytes for group, of_group in groups)
    return kept + (state_bytes if end else 0)


def longest_end(groups: KVGroups, begin: int, limit: int, is_stored: Callable[[int, int], bool]) -> int:
    """Up to which token units can be read, at most `limit`; `begin` if none helps.

    is_stored: whether a unit of a group is on disk.
    """

    def missing(end: int) -> Iterator[int]:
        return (
            unit
            for index, group in enumerate(groups)
            for unit in needed_units(group, begin, end)
            if not is_stored(unit, index)
        )

    end = limit // UNIT * UNIT
    while end > begin:
        unit = next(missing(end), None)
        if unit is None:
            return end
        # An end that still needs this unit cannot be read either. Of a full group the unit itself is the bound; what a
        # window needs moves with the end, so there the next shorter end is tried.
        is_full = any(
            group.window is None and unit in needed_units(group, begin, end) and not is_stored(unit, index)
            for index, group in enumerate(groups)
        )
        end = unit * UNIT if is_full else end - UNIT
    return begin


def reads_faster(tokens: int, num_bytes: int, bytes_per_second: float | None, tokens_per_second: float | None) -> bool:
    """Whether reading takes no longer than computing; true while one of the rates is not known."""
    if bytes_per_second is None or tokens_per_second is None:
        return True
    return num_bytes / bytes_per_second <= tokens / tokens_per_second


@dataclass(slots=True)
class RecentRate:
    """Units in a second, of all pieces of work so far, of which each counts more than the one before it."""

    amount: float = 0.0
    seconds: float = 0.0

    def add(self, amount: float, seconds: float) -> None:
        self.amount = KEPT * self.amount + amount
        self.seconds = KEPT * self.seconds + seconds

    @property
    def value(self) -> float | None:
        return self.amount / self.seconds if self.seconds > 0 and self.amount > 0 else None


@dataclass(slots=True)
class ReadOrCompute:
    """Chooses what is faster by the rates so far: of reading, in bytes, and of prefill, in tokens.

    Every TRY_AGAIN-th time it reads all the same: a disk that was slow when it was measured may be fast now.
    """

    reading: RecentRate = field(default_factory=RecentRate)
    prefill: RecentRate = field(default_factory=RecentRate)
    declined: int = 0

    def reads(self, tokens: int, num_bytes: int) -> bool:
        """Whether a request should read so much. Ask once for each request."""
        if reads_faster(tokens, num_bytes, self.reading.value, self.prefill.value):
            return True
        self.declined += 1
        return self.declined % TRY_AGAIN == 0
