"""The prefix cache: an example step by step, salts, resets, hit rates; and admission. No torch."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
from block_helpers import compute, one_group, sequence
from content_model import expected_output
from engine_helpers import BLOCK, Bench, prompt_of

from nanovllm.data.kv_groups import KVCapacity
from nanovllm.engine.block_manager import AllocStatus, BlockManager
from nanovllm.engine.prefix_cache import PrefixCache
from nanovllm.engine.request import Request
from nanovllm.errors import RequestError
from nanovllm.sampling_params import SamplingParams


def test_a_waiting_prompt_is_compared_once_while_nothing_leaves_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = BlockManager(12, 0, one_group(BLOCK))
    old = sequence(prompt_of(6 * BLOCK))
    manager.allocate(old)
    compute(manager, old)
    manager.free(old)
    compared: list[int] = []
    content = PrefixCache._content

    def counted(self: PrefixCache, seq: Any, begin: int, end: int) -> bytes:
        compared.append(begin)
        return content(self, seq, begin, end)

    monkeypatch.setattr(PrefixCache, "_content", counted)
    waiting = sequence([*prompt_of(6 * BLOCK), *prompt_of(4 * BLOCK, 1)])
    assert manager.can_allocate(waiting) is AllocStatus.OK
    first = len(compared)
    for _ in range(50):
        assert manager.can_allocate(waiting) is AllocStatus.OK
    assert 0 < first == len(compared)
    manager.allocate(sequence(prompt_of(7 * BLOCK, 2)))  # evicts one of the six
    first = len(compared)
    assert manager.can_allocate(waiting) is AllocStatus.LATER
    assert len(manager.prefix_cache.find(waiting).tables[0]) == 5
    assert len(compared) == first, "the other five are not compared again"


def test_what_was_found_is_looked_up_again_from_the_first_removed_block_on() -> None:
    manager = BlockManager(12, 0, one_group(BLOCK))
    first, second = sequence(prompt_of(4 * BLOCK)), sequence(prompt_of(2 * BLOCK, 1))
    waiting = sequence([*first.token_ids, 0])
    for seq in (first, second):
        manager.allocate(seq)
        compute(manager, seq)
    blocks = first.block_tables[0]
    assert manager.prefix_cache.find(waiting).tables[0] == blocks
    manager.prefix_cache.forget(manager._blocks[second.block_tables[0][0]])
    assert manager.prefix_cache.find(waiting).tables[0] == blocks
    manager.prefix_cache.forget(manager._blocks[blocks[1]])
    assert manager.prefix_cache.find(waiting).tables[0] == blocks[:1]
    manager.prefix_cache.register(first, BLOCK, manager._blocks)  # the block has the content again
    assert manager.prefix_cache.find(waiting).tables[0] == blocks
    manager.free(first)
    manager.free(second)
    manager.reset()
    other = sequence(prompt_of(4 * BLOCK, 2))  # the same block ids with other content
    manager.allocate(other)
    compute(manager, other)
    assert other.block_tables[0] == blocks and manager.prefix_cache.find(waiting).tables[0] == []


def test_content_that_appears_while_a_prompt_waits_is_found() -> None:
    manager = BlockManager(12, 0, one_group(BLOCK))
    waiting = sequence(prompt_of(4 * BLOCK))
    assert manager.prefix_cache.find(waiting).tables[0] == []
    other = sequence(prompt_of(4 * BLOCK))
    manager.allocate(other)
    for upto, found in ((BLOCK, 1), (2 * BLOCK + 1, 2), (4 * BLOCK, 3)):
        compute(manager, other, upto)
        assert manager.prefix_cache.find(waiting).tables[0] == other.block_tables[0][:found]


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
    assert (metrics.prefix_cache_queried_tokens, metrics.prefix_cache_hit_tokens) == (36, 8)
    assert metrics.prefix_cache_hit_rate == 8 / 36
    assert (metrics.used_blocks, metrics.cached_blocks, metrics.free_blocks) == (0, 3, 61)


# ---- admission

OK, LATER, NEVER = AllocStatus.OK, AllocStatus.LATER, AllocStatus.NEVER


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


@pytest.mark.parametrize(
    ("prompt_len", "max_tokens", "n", "blocks"),
    [
        (8, 1, 4, 2),  # all end with the token that is sampled from the prompt
        (7, 1, 4, 2),
        (8, 2, 4, 2 + 4),  # the ninth token is computed, the tenth is not
        (7, 2, 4, 1 + 4),
        (7, 3, 4, 1 + 4 * 2),
        (8, 5, 3, 2 + 3),
        (8, 6, 3, 2 + 3 * 2),
        (8, None, 3, 2 + 3 * 6),  # up to max_model_len
    ],
)
def test_the_most_blocks_that_a_group_can_hold(prompt_len: int, max_tokens: int | None, n: int, blocks: int) -> None:
    params = SamplingParams(n=n, max_tokens=max_tokens)
    group = Request("r", prompt_of(prompt_len), params, number=0, seq_ids=count(), seed=0, arrival_time=0.0)
    longest = 32 if max_tokens is None else min(prompt_len + max_tokens, 32)
    assert group.most_blocks(longest, KVCapacity(one_group(BLOCK), None, 0, 0)) == blocks
    bench = Bench(blocks, max_num_seqs=8, caching=False, max_model_len=min(32, blocks * BLOCK))
    if max_tokens is not None:
        bench.add("fits", prompt_of(prompt_len), max_tokens, temperature=1.0, n=n)
        bench.run()
        tables = [[row.block_tables[0] for row in batch.sequences] for batch in bench.executor.batches]
        held = [{assign for table in of_step for assign in table} for of_step in tables]
        assert max(map(len, held)) == blocks and bench.scheduler.preemption.stats.total == 0
