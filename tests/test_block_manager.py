"""The block manager: allocation, sharing, and finding blocks by their content. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from block_helpers import BLOCK, cache, check_blocks, compute, found, new_tokens, one_group, running, sequence, tiers

from nanovllm.engine import prefix_cache
from nanovllm.engine.block_manager import AllocStatus, BlockManager

OK, LATER, NEVER = AllocStatus.OK, AllocStatus.LATER, AllocStatus.NEVER


# ---- allocation


def test_device_blocks_are_allocated_before_host_blocks() -> None:
    manager = BlockManager(3, 4, one_group(BLOCK))
    first, second = running(manager, range(2 * BLOCK)), running(manager, range(100, 100 + 3 * BLOCK + 1))
    assert manager.physical_ids(first, 2 * BLOCK)[0] == [0, 1]
    assert manager.physical_ids(second, 3 * BLOCK + 1)[0] == [2, 3, 4, 5]
    assert tiers(manager, second) == "DHHH"
    assert (manager.num_free, manager.num_cached, manager.num_used) == (1, 0, 6)


def test_a_sequence_grows_when_its_last_token_needs_a_block() -> None:
    manager = BlockManager(2, 0, one_group(BLOCK))
    seq = running(manager, range(BLOCK))
    manager.grow([seq])
    assert len(seq.block_tables[0]) == 1, "its block holds all tokens"
    seq.token_ids.append(7)
    assert manager.num_to_grow([seq]) == manager.num_allocatable == 1
    manager.grow([seq])
    manager.grow([seq])
    assert len(seq.block_tables[0]) == 2
    seq.token_ids.extend([7] * BLOCK)
    assert manager.num_to_grow([seq]) == 1 > manager.num_allocatable, "all blocks are in use"


# ---- admission


def test_cached_blocks_are_allocatable_unless_the_sequence_itself_uses_them(fresh: Iterator[int]) -> None:
    manager = BlockManager(10, 0, one_group(BLOCK))
    prefix = new_tokens(fresh, 6)
    cache(manager, prefix)
    assert (manager.num_free, manager.num_cached) == (4, 6)
    assert manager.can_allocate(sequence(range(10 * BLOCK))) is OK, "all cached blocks can be evicted for it"
    wanted = sequence([*prefix, *new_tokens(fresh, 4)])
    assert manager.can_allocate(wanted) is OK, "6 hits and 4 free blocks"
    other = running(manager, new_tokens(fresh, 1))
    assert manager.can_allocate(wanted) is LATER, "its own hits cannot be evicted for its other blocks"
    manager.free(other)
    assert manager.can_allocate(wanted) is OK
    manager.allocate(wanted)
    assert wanted.num_computed == 6 * BLOCK and manager.num_allocatable == 0


# ---- prefix cache


def test_shared_blocks_stay_until_the_last_holder_lets_go(fresh: Iterator[int]) -> None:
    manager = BlockManager(8, 0, one_group(BLOCK))
    prompt = new_tokens(fresh, 2)
    first = running(manager, [*prompt, 1])
    second = running(manager, [*prompt, 2])
    (table,), (other,) = first.block_tables, second.block_tables
    assert table[:2] == other[:2] and table[2] != other[2]
    assert manager.num_used == 4
    manager.free(first)
    assert (manager.num_used, manager.num_cached) == (3, 0), "the shared blocks are still used"
    manager.free(second)
    assert (manager.num_used, manager.num_cached) == (0, 2)


def test_the_same_content_computed_twice_is_cached_once(fresh: Iterator[int]) -> None:
    manager = BlockManager(8, 0, one_group(BLOCK))
    prompt = new_tokens(fresh, 2)
    first, second = sequence(prompt), sequence(prompt)
    manager.allocate(first)
    manager.allocate(second)  # the cache is still empty
    assert not set(first.block_tables[0]) & set(second.block_tables[0])
    compute(manager, first)
    compute(manager, second)
    manager.free(second)
    assert (manager.num_free, manager.num_cached, manager.num_used) == (6, 0, 2)
    manager.free(first)
    assert (manager.num_cached, found(manager, prompt)) == (2, 2)


def test_a_hash_collision_is_no_hit(fresh: Iterator[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_cache, "xxhash", SimpleNamespace(xxh3_128_digest=lambda data: b"always the same"))
    manager = BlockManager(8, 0, one_group(BLOCK))
    prompt, other = new_tokens(fresh, 2), new_tokens(fresh, 2)
    cache(manager, prompt)
    assert found(manager, prompt) >= 1, "the hashes collide"
    assert found(manager, other) == 0
    cache(manager, other)
    assert found(manager, other) == 0 and found(manager, prompt) >= 1
    manager.reset_prefix_cache()
    check_blocks(manager)
    assert manager.num_free == 8


def test_reset_forgets_all_content_and_takes_no_block_from_its_holder(fresh: Iterator[int]) -> None:
    manager = BlockManager(4, 4, one_group(BLOCK))
    old, current = new_tokens(fresh, 3), new_tokens(fresh, 2)
    cache(manager, old)
    seq = running(manager, current)
    blocks = list(seq.block_tables[0])
    manager.reset_prefix_cache()
    check_blocks(manager)
    assert (manager.num_free, manager.num_cached, manager.num_used) == (6, 0, 2)
    assert found(manager, old) == found(manager, current) == 0
    assert seq.block_tables[0] == blocks
    manager.free(seq)
    assert manager.num_free == 8, "blocks that were forgotten are free"
    cache(manager, old)
    assert found(manager, old) == 3, "the cache works on"
