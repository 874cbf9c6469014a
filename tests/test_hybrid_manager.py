"""The bookkeeping of physical block ids on the tiers."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.data.batch import BlockMove, Tier
from nanovllm.engine.prefix_cache import Evictor
from nanovllm.kvcache.hybrid_manager import HybridManager, IdPool


def test_ids_are_handed_out_once_each_and_lowest_first() -> None:
    """So that blocks placed one after the other are neighbours, which one copy moves."""
    pool = IdPool(5, 9)
    taken = [pool.allocate() for _ in range(7)]
    for freed in (8, 5, 7, 6):
        pool.free(freed)
    assert taken == list(range(5, 12)) and [pool.allocate() for _ in range(6)] == [5, 6, 7, 8, 12, 13]
    with pytest.raises(IndexError, match="no free block"):
        pool.allocate()


def test_the_hybrid_manager_refuses_what_contradicts_it() -> None:
    manager = HybridManager(1, 1)
    manager.assign(7, Tier.DEVICE)
    with pytest.raises(ValueError, match="block 7 already has physical block id 0"):
        manager.assign(7, Tier.HOST)
    with pytest.raises(ValueError, match="block 7 is already on the device"):
        manager.move(7, Tier.DEVICE)
    with pytest.raises(IndexError):
        manager.assign(8, Tier.DEVICE)
    assert len(manager.physical_ids) == 1
    assert manager.move(7, Tier.HOST) == BlockMove(0, 1)
    manager.release(7)
    assert not manager.physical_ids and manager.pools[Tier.DEVICE].num_free == manager.pools[Tier.HOST].num_free == 1


@given(st.lists(st.integers(0, 9), max_size=120))
@settings(max_examples=60)
def test_the_oldest_idle_block_is_the_one_used_longest_ago(touched: list[int]) -> None:
    """Each number is a block that becomes idle, or, where it is idle, is taken out."""
    evictor, ages = Evictor(), dict[int, int]()
    for time, block in enumerate(touched):
        if block in ages:
            assert evictor.remove(block) == ages.pop(block)
        else:
            evictor.add(block, time)
            ages[block] = time
        assert len(evictor) == len(ages) and set(evictor) == set(ages)
        if ages:
            assert evictor.oldest() == min((age, block) for block, age in ages.items())
    for expected in sorted((age, block) for block, age in ages.items()):
        assert evictor.oldest() == expected
        evictor.remove(expected[1])
    assert not evictor
