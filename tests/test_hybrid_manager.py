"""The bookkeeping under the block manager: places on two tiers, and idle blocks by age."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.engine.idle_blocks import IdleBlocks
from nanovllm.kvcache.hybrid_manager import BlockMove, HybridManager, PlacePool, Tier


def test_a_place_pool_hands_out_each_place_once() -> None:
    pool = PlacePool(5, 3)
    assert [pool.take() for _ in range(3)] == [5, 6, 7] and pool.num_free == 0
    with pytest.raises(IndexError, match="no free place"):
        pool.take()
    pool.give_back(6)
    assert (pool.num_free, pool.take(), pool.num_free) == (1, 6, 0)


def test_places_are_handed_out_lowest_first() -> None:
    """So that blocks placed one after the other are neighbours, which one copy moves."""
    pool = PlacePool(5, 9)
    taken = [pool.take() for _ in range(7)]
    for place in (8, 5, 7, 6):
        pool.give_back(place)
    assert taken == list(range(5, 12)) and [pool.take() for _ in range(6)] == [5, 6, 7, 8, 12, 13]


def test_the_hybrid_manager_refuses_what_contradicts_it() -> None:
    manager = HybridManager(1, 1)
    manager.place(7, Tier.DEVICE)
    with pytest.raises(ValueError, match="block 7 already has place 0"):
        manager.place(7, Tier.HOST)
    with pytest.raises(ValueError, match="block 7 is already on the device"):
        manager.move(7, Tier.DEVICE)
    with pytest.raises(IndexError):
        manager.place(8, Tier.DEVICE)
    assert manager.num_placed == 1
    assert manager.move(7, Tier.HOST) == BlockMove(0, 1)
    manager.release(7)
    assert manager.num_placed == 0 and manager.num_free(Tier.DEVICE) == manager.num_free(Tier.HOST) == 1


@given(st.lists(st.integers(0, 9), max_size=120))
@settings(max_examples=60, deadline=None)
def test_the_oldest_idle_block_is_the_one_used_longest_ago(touched: list[int]) -> None:
    """Each number is a block that becomes idle, or, where it is idle, is taken out."""
    idle, ages = IdleBlocks(), dict[int, int]()
    for time, block in enumerate(touched):
        if block in ages:
            assert idle.remove(block) == ages.pop(block)
        else:
            idle.add(block, time)
            ages[block] = time
        assert len(idle) == len(ages) and set(idle) == set(ages)
        if ages:
            assert idle.oldest() == min((age, block) for block, age in ages.items())
    for expected in sorted((age, block) for block, age in ages.items()):
        assert idle.oldest() == expected
        idle.remove(expected[1])
    assert not idle


def test_idle_blocks_take_room_for_what_is_idle_only() -> None:
    idle = IdleBlocks()
    for time in range(5000):
        idle.add(time % 7, time)
        idle.remove(time % 7)
    assert len(idle) == 0 and len(idle._heap) < 100
