"""The prefix cache: salts, resets, hit rates, collisions; and admission. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from block_helpers import cache, check_blocks, found, new_tokens, one_group, sequence
from content_model import expected_output
from engine_helpers import BLOCK, Bench, prompt_of

from nanovllm.engine import prefix_cache
from nanovllm.engine.block_manager import AllocStatus, BlockManager
from nanovllm.errors import RequestError
from nanovllm.sampling_params import SamplingParams

# ---- salts, resets, rates


def test_only_requests_of_one_salt_share() -> None:
    bench = Bench()
    prompt = prompt_of(2 * BLOCK + 1)
    expected = expected_output(prompt, 2)
    for name, salt, cached in (("a", None, 0), ("b", "x", 0), ("c", "x", 8), ("d", "y", 0), ("e", None, 8)):
        params = SamplingParams(temperature=0.0, max_tokens=2)
        bench.engine.add_request(name, None, params, prompt, cache_salt=salt)
        assert bench.run()[name].num_cached_tokens == cached, name
        assert bench.tokens(name) == expected


@pytest.mark.parametrize("salt", ["", 5, b"x"])
def test_a_salt_is_a_string(salt: Any) -> None:
    with pytest.raises(RequestError, match=r"cache_salt=.*must be None or a string that is not empty"):
        Bench().engine.add_request("a", None, None, [1], cache_salt=salt)


def test_reset_and_hit_rate() -> None:
    bench = Bench()
    prompt = prompt_of(3 * BLOCK)
    for name in "abc":
        bench.add(name, prompt, 1)
        bench.run()
        if name == "b":
            bench.engine.reset_prefix_cache()
    metrics = bench.engine.metrics()
    assert [bench.finished[name].num_cached_tokens for name in "abc"] == [0, 8, 0]
    assert (metrics.prefix_cache.queried_tokens, metrics.prefix_cache.hit_tokens) == (36, 8)
    assert metrics.prefix_cache.hit_rate == 8 / 36
    assert (metrics.blocks.used, metrics.blocks.cached, metrics.blocks.free) == (0, 3, 61)


# ---- content


def test_a_hash_collision_is_no_hit(fresh: Iterator[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_cache, "xxhash", SimpleNamespace(xxh3_128_digest=lambda data: b"always the same"))
    manager = BlockManager(8, 0, one_group(BLOCK))
    prompt = new_tokens(fresh, 2)
    other = new_tokens(fresh, 2)
    cache(manager, prompt)
    assert found(manager, prompt) >= 1, "the hashes collide"
    assert found(manager, other) == 0
    cache(manager, other)
    assert found(manager, other) == 0 and found(manager, prompt) >= 1
    manager.reset_prefix_cache()
    check_blocks(manager)
    assert manager.pool.num_free == 8


# ---- admission

OK = AllocStatus.OK
LATER = AllocStatus.LATER
NEVER = AllocStatus.NEVER


@pytest.mark.parametrize("total", [10, 99, 100, 250, 1000])
def test_the_grid_of_admission(total: int) -> None:
    """total - needed < watermark: never; free - needed >= watermark: now; else later."""
    watermark = total // 100
    for used in (0, 1, watermark, total // 2, total - watermark - 1):
        manager = BlockManager(total // 3, total - total // 3, one_group(1))
        assert (manager.watermark, manager.capacity.max_sequence_tokens) == (watermark, total - watermark)
        if used:
            manager.allocate(sequence(range(10_000, 10_000 + used)))
        for needed in {1, 2, total - used - watermark, total - used - watermark + 1, total - watermark, total}:
            expected = OK if total - used - needed >= watermark else LATER
            expected = NEVER if total - needed < watermark else expected
            assert manager.can_allocate(sequence(range(needed))) is expected, (used, needed)
            if needed > 1:  # some of the blocks for other sequences
                assert manager.can_allocate(sequence(range(1)), extra_blocks=needed - 1) is expected
