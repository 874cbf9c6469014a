"""Eviction, and block moves between device and host. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from block_helpers import BLOCK, cache, found, new_tokens, one_group, running, sequence, tiers

from nanovllm.data.batch import BlockMove
from nanovllm.engine.block_manager import BlockManager

# ---- eviction


def test_least_recently_used_goes_first(fresh: Iterator[int]) -> None:
    manager = BlockManager(3, 0, one_group(BLOCK))
    a, b, c, d = (new_tokens(fresh, 1) for _ in range(4))
    for prompt in (a, b, c):
        cache(manager, prompt)
    manager.free(running(manager, [*a, 1]))  # uses a again; its own half block evicts b
    assert [found(manager, p) for p in (a, b, c)] == [1, 0, 1]
    cache(manager, d)
    assert [found(manager, p) for p in (a, b, c, d)] == [1, 0, 1, 1]
    cache(manager, b)
    assert [found(manager, p) for p in (a, b, c, d)] == [1, 1, 0, 1]


def test_cached_device_blocks_move_to_the_host_before_anything_is_evicted(fresh: Iterator[int]) -> None:
    manager = BlockManager(2, 3, one_group(BLOCK))
    prompt = new_tokens(fresh, 2)
    cache(manager, prompt)
    seq = running(manager, new_tokens(fresh, 2))
    # The end of the old prefix was evicted first.
    assert manager.pool.take_moves() == [BlockMove(1, 2), BlockMove(0, 3)]
    assert manager.pool.take_moves() == []
    assert tiers(manager, seq) == "DD" and found(manager, prompt) == 2
    hit = sequence([*prompt, 1])
    manager.allocate(hit)
    assert tiers(manager, hit) == "HHH" and hit.num_computed == 2 * BLOCK
    assert manager.physical_ids(hit, len(hit))[0] == [3, 2, 4]


def test_the_oldest_block_goes_first_whatever_its_tier(fresh: Iterator[int]) -> None:
    """The start of a long prefix is on the device and its end on the host: the end is still evicted first."""
    manager = BlockManager(4, 4, one_group(BLOCK))
    prompt = new_tokens(fresh, 8)
    cache(manager, prompt)
    for left in (7, 6, 5, 4, 3, 2, 1, 0):
        cache(manager, new_tokens(fresh, 1))
        assert found(manager, prompt) == left


# ---- promotion


def test_full_host_blocks_of_active_sequences_move_to_free_device_blocks(fresh: Iterator[int]) -> None:
    manager = BlockManager(2, 4, one_group(BLOCK), enable_prefix_caching=False)
    filler = running(manager, new_tokens(fresh, 2))
    seq = running(manager, [*new_tokens(fresh, 2), 1])
    assert tiers(manager, seq) == "HHH"
    manager.promote([seq])
    assert manager.pool.take_moves() == [], "the device is full"
    manager.free(filler)
    manager.promote([seq])
    assert tiers(manager, seq) == "DDH", "the block being written is not moved"
    assert manager.pool.take_moves() == [BlockMove(2, 0), BlockMove(3, 1)]
    manager.promote([seq])
    assert manager.pool.take_moves() == []
