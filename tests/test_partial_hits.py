"""Hits of the prefix cache that end within a block: found by hash block, copied or continued. No torch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from block_helpers import check_blocks, compute, one_group, sequence
from content_model import VOCAB, expected_output
from engine_helpers import Bench, prompt_of

from nanovllm.engine.block_manager import AllocStatus, BlockManager
from nanovllm.engine.request import Sequence

BLOCK = 12
HASH = 4
EDGES = sorted({edge + d for edge in (0, HASH, 2 * HASH, BLOCK, 2 * BLOCK, 3 * BLOCK) for d in (-1, 0, 1)} - {-1})


def make_manager(device: int, host: int = 0, swap: int = 0) -> BlockManager:
    return BlockManager(device, host, one_group(BLOCK), True, swap, HASH)


def admitted(manager: BlockManager, tokens: list[int]) -> Sequence:
    seq = sequence(tokens)
    assert manager.can_allocate(seq) is AllocStatus.OK
    manager.allocate(seq)
    check_blocks(manager)
    return seq


def take(fresh: Iterator[int], number: int) -> list[int]:
    return [next(fresh) for _ in range(number)]


# ---- every length, on every tier


@pytest.mark.parametrize("first_ends", [True, False], ids=["cached", "running"])
@pytest.mark.parametrize(("device", "host"), [(16, 0), (0, 16), (2, 14), (4, 12)])
@pytest.mark.parametrize("shared", EDGES)
def test_a_prefix_is_found_to_the_last_hash_block(shared: int, device: int, host: int, first_ends: bool) -> None:
    """The tokens are checked against a model of KV content, so a wrong copy fails."""
    document = prompt_of(3 * BLOCK + 2, 1)
    prompts = {"first": document}
    for number, tail in enumerate((1, 2, BLOCK + 1)):
        start = document[:shared]
        other = (document[shared] + 1 + number) % VOCAB  # no two go on alike
        prompts[str(number)] = [*start, other, *prompt_of(tail, 2 + number)]
    bench = Bench(device, host, budget=100, block_size=BLOCK, hash_block_size=HASH)
    bench.add("first", document, 2 if first_ends else 15)
    while (bench.engine.has_unfinished_requests() and first_ends) or not bench.executor.batches:
        bench.step()
    for name, prompt in list(prompts.items())[1:]:
        bench.add(name, prompt, 5)
        while name not in bench.finished:
            bench.step()
        found = shared // HASH * HASH
        assert bench.finished[name].num_cached_tokens == found
        assert bench.tokens(name) == expected_output(prompt, 5)
    bench.run()
    assert bench.tokens("first") == expected_output(document, len(bench.tokens("first")))
    assert bench.manager.pool.num_used == 0


# ---- a copy, or the block itself


def test_a_conversation_continues_its_last_block(fresh: Iterator[int]) -> None:
    """Nothing is copied, and ten turns hold no more blocks than their tokens."""
    manager = make_manager(12)
    tokens: list[int] = []
    for turn in range(10):
        tokens += take(fresh, 5)
        seq = admitted(manager, tokens)
        assert len(tokens) - 5 - seq.num_computed < HASH or turn == 0
        compute(manager, seq)
        manager.free(seq)
        check_blocks(manager)
        assert manager.pool.num_cached <= -(-len(tokens) // BLOCK)
    assert manager.pool.take_moves() == [] and manager.stats.copied_blocks == 0


# ---- requests that come together


def questions(bench: Bench, document: list[int], count: int) -> dict[str, list[int]]:
    """Add questions about one document; their prompts by name."""
    prompts = {f"q{number}": [*document, *prompt_of(5, 10 + number)] for number in range(count)}
    for name, prompt in prompts.items():
        bench.add(name, prompt, 4)
    return prompts


@pytest.mark.parametrize("budget", [100, 10])
def test_questions_that_come_together_compute_their_document_once(budget: int) -> None:
    bench = Bench(8, 24, budget=budget, block_size=BLOCK, hash_block_size=HASH)
    document = prompt_of(2 * BLOCK + HASH + 1, 1)
    prompts = questions(bench, document, 4)
    bench.add("other", prompt_of(5, 50), 4)
    bench.run()
    cached = [bench.finished[name].num_cached_tokens for name in prompts]
    assert cached == [0, *[len(document) // HASH * HASH] * 3]
    assert all(bench.tokens(name) == expected_output(prompt, 4) for name, prompt in prompts.items())
    computed = sum(len(seq.token_ids) for batch in bench.executor.batches for seq in batch.sequences)
    assert computed == len(document) + 3 * (len(document) % HASH) + 4 * (5 + 3) + 5 + 3
    if budget == 100:  # others do not wait for the document
        assert bench.rows("other")[0] in bench.executor.batches[0].sequences
