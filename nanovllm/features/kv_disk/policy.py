"""What is stored and what is read: functions of numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from nanovllm.data.kv_groups import KVGroup, KVGroups
from nanovllm.engine.branch_points import BranchPoints
from nanovllm.memory.layout import KVLayout

UNIT = 256  # tokens of a file, whatever the block size of an engine
WINDOW_MARGIN = 4096  # tokens before a window: a reader with larger blocks needs the first of them whole


def wanted_units(group: KVGroup, prompt_len: int, begin: int, end: int, points: BranchPoints) -> Iterator[int]:
    """The units that are worth storing once the tokens from `begin` to `end` have been computed.

    Those of the output too, with which the next prompt of a conversation begins. Of a group with a window only those
    near the prompt's end and after it, and what is read to go on at another of the prompt's branch points.
    """
    near_end = 0 if group.window is None else (prompt_len - group.window - WINDOW_MARGIN) // UNIT
    for unit in range(begin // UNIT, end // UNIT):
        if unit >= near_end or unit in needed_units(group, 0, points.after((unit + 1) * UNIT) // UNIT * UNIT):
            yield unit


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


def longest_end(
    groups: KVGroups,
    begin: int,
    limit: int,
    is_stored: Callable[[int, int], bool],
    has_state: Callable[[int], bool],
) -> int:
    """Up to which token a sequence with `begin` tokens can read, at most `limit`; `begin` if nothing helps.

    is_stored: whether a unit of a group is on disk; has_state: whether the recurrent state after a unit is.
    """
    end = limit // UNIT * UNIT
    for index, group in enumerate(groups):
        if group.window is None:
            missing = (unit for unit in needed_units(group, begin, end) if not is_stored(unit, index))
            end = next(missing, end // UNIT) * UNIT
    windows = [(index, group) for index, group in enumerate(groups) if group.window is not None]
    while end > begin:
        needed = ((unit, index) for index, group in windows for unit in needed_units(group, begin, end))
        if has_state(end // UNIT - 1) and all(is_stored(unit, index) for unit, index in needed):
            return end
        end -= UNIT
    return begin
