"""The block manager: allocation, sharing, and finding blocks by their content. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from block_helpers import BLOCK, cache, check_blocks, found, new_tokens, one_group, running

from nanovllm.engine import prefix_cache
from nanovllm.engine.block_manager import BlockManager

# ---- prefix cache


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
