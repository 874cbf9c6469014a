"""Hits of the prefix cache that end within a block: found by hash block, copied or continued. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from block_helpers import check_blocks, compute, one_group, running, sequence
from content_model import VOCAB, expected_output
from engine_helpers import Bench, prompt_of

from nanovllm.engine.block_manager import AllocStatus, BlockManager
from nanovllm.engine.prefix_cache import hash_block_size_of
from nanovllm.engine.request import Sequence
from nanovllm.sampling_params import SamplingParams

BLOCK, HASH = 12, 4
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


@pytest.mark.parametrize(
    ("block_size", "expected"),
    [(1, 1), (16, 16), (255, 255), (256, 256), (257, 1), (384, 192), (512, 256), (1000, 250), (4096, 256)],
)
def test_hash_blocks_are_of_256_tokens_at_most_and_divide_the_block(block_size: int, expected: int) -> None:
    assert hash_block_size_of(block_size) == expected


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
    assert bench.manager.num_used == 0


@pytest.mark.parametrize("length", [length for length in EDGES if length])
def test_a_hit_never_covers_the_whole_prompt(length: int, fresh: Iterator[int]) -> None:
    manager = make_manager(8)
    document = take(fresh, 3 * BLOCK + 2)
    manager.free(running(manager, document))
    seq = admitted(manager, document[:length])
    assert seq.num_computed == (length - 1) // HASH * HASH < length
    assert manager.stats.hit_tokens == seq.num_computed


# ---- what is found


def test_an_emptied_cache_does_not_find_what_a_block_held_before(fresh: Iterator[int]) -> None:
    manager = make_manager(6)
    prompt = take(fresh, 2 * BLOCK)
    seq = sequence(prompt)
    manager.allocate(seq)
    compute(manager, seq, HASH)
    manager.reset_prefix_cache()
    compute(manager, seq, 2 * BLOCK)
    assert manager.num_cached_tokens(sequence([*prompt, 0])) == 0
    manager.free(seq)
    check_blocks(manager)
    again = running(manager, prompt)
    assert manager.num_cached_tokens(sequence([*prompt, 0])) == 2 * BLOCK
    manager.free(again)


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
        assert manager.num_cached <= -(-len(tokens) // BLOCK)
    assert manager.take_moves() == [] and manager.stats.copied_blocks == 0


def test_without_a_block_for_the_copy_the_cached_one_is_shortened(fresh: Iterator[int]) -> None:
    """So that a prompt as long as the cache is still admitted."""
    manager = make_manager(2)
    prompt = take(fresh, BLOCK)
    manager.free(running(manager, prompt))
    seq = admitted(manager, [*prompt[: 2 * HASH], *take(fresh, BLOCK)])
    assert seq.num_computed == 2 * HASH and manager.num_used == 2
    assert manager.take_moves() == [] and manager.stats.copied_blocks == 0
    assert manager.num_cached_tokens(sequence([*prompt, 0])) == 2 * HASH


# ---- with copy-on-write and swapping


@pytest.mark.parametrize("known", [0, 3, HASH, HASH + 1, 2 * HASH, BLOCK + 1])
def test_prompt_logprobs_that_are_missing_are_computed(known: int, fresh: Iterator[int]) -> None:
    manager = make_manager(4)
    prompt = take(fresh, BLOCK + 2 * HASH + 1)
    manager.free(running(manager, prompt))
    seq = sequence(prompt)
    seq.request.params = SamplingParams(prompt_logprobs=1)
    seq.request.sampling = SimpleNamespace(num_prompt_logprobs=1)  # type: ignore[assignment]
    seq.request.prompt_logprobs = [None] * known  # type: ignore[list-item]
    assert manager.num_cached_tokens(seq) == known // HASH * HASH


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


def test_a_request_no_longer_waits_when_the_one_that_it_waits_for_ends() -> None:
    bench = Bench(16, budget=10, block_size=BLOCK, hash_block_size=HASH)
    prompts = questions(bench, prompt_of(3 * BLOCK, 1), 2)
    bench.step()
    assert [len(bench.rows(name)) for name in prompts] == [1, 0]
    bench.engine.abort_request("q0")
    bench.run()
    assert bench.finished["q1"].num_cached_tokens == 10 // HASH * HASH
    assert bench.tokens("q1") == expected_output(prompts["q1"], 4)


@pytest.mark.parametrize(("priority", "steps"), [(0, 1), (1, 0)], ids=["urgent", "not urgent"])
def test_no_request_waits_for_one_of_lower_priority(priority: int, steps: int) -> None:
    bench = Bench(16, budget=16, block_size=BLOCK, hash_block_size=HASH)
    document = prompt_of(3 * BLOCK + 4, 1)
    bench.add("first", document, 4, priority=1)
    bench.step()
    bench.add("second", document[:30], 4, priority=priority)
    bench.step()
    assert [seq.context_len for seq in bench.rows("second")] == [16] * steps
    bench.run()
    assert bench.tokens("second") == expected_output(document[:30], 4)
