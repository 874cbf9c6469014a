"""What is stored and what is read: pure functions of numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from nanovllm.data.kv_groups import KVGroup, KVGroups

UNIT = 256  # tokens of a record, whatever the block size of an engine
WINDOW_MARGIN = 4096  # tokens before a window: a reader with larger blocks needs the first of them whole


def wanted_units(group: KVGroup, prompt_len: int, begin: int, end: int) -> range:
    """The units of a prompt that are worth storing once the tokens from `begin` to `end` have been computed.

    Of a group with a window only those near the prompt's end: that is where another prompt goes on.
    """
    first = begin // UNIT
    if group.window is not None:
        first = max(first, (prompt_len - group.window - WINDOW_MARGIN) // UNIT)
    return range(first, min(end, prompt_len) // UNIT)


def needed_units(group: KVGroup, begin: int, end: int) -> range:
    """The units that a sequence reads to go on at `end`, when it has what it needs to go on at `begin`.

    Of the first block of a window all tokens are read, since the prefix cache knows a block from its start.
    """
    first = begin if group.window is None else max(begin, group.first_visible(end) * group.block_size)
    return range(first // UNIT, end // UNIT)


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
