"""Branch points: which blocks of a window are worth keeping, against the definition, and what the cache then has."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nanovllm.data.kv_groups import KVGroup
from nanovllm.engine.branch_points import LEAST_INTERVAL, BranchPoints, branch_points, grid_interval

GROUPS = st.builds(KVGroup, st.integers(1, 40), st.integers(1, 20), st.just((0,)))
POINTS = st.builds(
    BranchPoints,
    st.lists(st.integers(1, 200), max_size=4).map(lambda places: tuple(sorted(set(places)))),
    st.one_of(st.just(0), st.integers(1, 90)),
)
MOST = 400  # tokens


def sees(group: KVGroup, position: int, index: int) -> bool:
    """Whether a prompt that goes on at a position sees a block of what is before it."""
    return group.first_visible(position) <= index < group.num_blocks(position)


@given(GROUPS, POINTS, st.integers(0, 40))
def test_a_block_is_kept_if_a_prompt_that_goes_on_at_a_point_sees_it(
    group: KVGroup, points: BranchPoints, index: int
) -> None:
    on_grid = range(points.interval, MOST * 4, points.interval) if points.interval else ()
    assert points.is_on_grid(group, index) == any(sees(group, position, index) for position in on_grid)
    wanted = any(sees(group, position, index) for position in {*points.places, *on_grid})
    assert points.is_seen(group, index) == wanted


@given(POINTS, st.integers(1, MOST))
def test_after(points: BranchPoints, position: int) -> None:
    on_grid = range(points.interval, MOST * 2, points.interval) if points.interval else ()
    wanted = min((point for point in {*points.places, *on_grid} if point >= position), default=0)
    assert points.after(position) == wanted


@given(st.integers(1, 10_000), st.lists(st.integers(0, 40), max_size=3), st.integers(1, 64))
def test_the_points_of_a_prompt(end: int, places: list[int], unit: int) -> None:
    points = branch_points(end, [place * unit for place in places], 2048, unit)
    assert 0 <= (end - 1) // unit * unit in points.places and list(points.places) == sorted(set(points.places))
    assert points.interval >= 2048 and points.interval % unit == 0


@given(st.integers(1, 10**6), st.integers(0, 50))
def test_a_grid_has_few_points_and_those_of_longer_prompts_are_among_them(tokens: int, most: int) -> None:
    interval = grid_interval(tokens, most)
    assert tokens // interval <= max(1, most)
    assert interval == LEAST_INTERVAL or tokens // (interval // 2) > max(1, most)
    assert grid_interval(2 * tokens, most) % interval == 0
