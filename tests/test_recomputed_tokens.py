"""Recomputed tokens: the record of past prompts, and what each request counts. No torch."""

from __future__ import annotations

from typing import Any

import pytest
from content_store import FAILS_EVERY, ContentStore
from engine_helpers import BLOCK, Bench, prompt_of
from hypothesis import given
from hypothesis import strategies as st
from recomputed_oracle import CheckedRecomputedTokens

from nanovllm.features.kv_disk.stored_blocks import StoredBlocks
from nanovllm.features.recomputed_tokens import PastPrompts, RecomputedTokens
from nanovllm.sampling_params import SamplingParams

# ---- the record

TEXTS = st.lists(st.lists(st.integers(0, 1), max_size=8), min_size=1, max_size=12)


def hashes(text: list[int]) -> list[bytes]:
    """Of hash blocks of one token."""
    return [bytes(text[:end]) for end in range(1, len(text) + 1)]


def num_common(text: list[int], texts: list[list[int]]) -> int:
    """The longest start of a text with which one of the others begins."""
    starts = (end for end in range(len(text), 0, -1) if any(other[:end] == text[:end] for other in texts))
    return next(starts, 0)


@given(texts=TEXTS, pieces=st.integers(1, 4), most=st.integers(0, 30), asked=st.lists(st.integers(0, 1), max_size=8))
def test_the_record_knows_what_a_plain_list_knows_until_it_is_full(
    texts: list[list[int]], pieces: int, most: int, asked: list[int]
) -> None:
    past = PastPrompts(most)
    for text in texts:
        own = hashes(text)
        known = past.num_known(own)
        past.use(own[:known])
        for begin in range(known, len(own), pieces):
            past.use(own[begin : begin + pieces])
    every = {one for text in texts for one in hashes(text)}
    assert sum(past.num_known([one]) for one in every) == min(most, len(every)), "it is bounded, and full"
    common = num_common(asked, texts)
    assert past.num_known(hashes(asked)) == common if len(every) <= most else past.num_known(hashes(asked)) <= common
    for index, text in enumerate(texts):
        used_since = {one for later in texts[index:] for one in hashes(later)}
        if len(used_since) <= most:
            assert past.num_known(hashes(text)) == len(text), "the least recently used are forgotten first"
    past.clear()
    assert past.num_known(hashes(texts[0])) == 0


# ---- what requests count


def counting(**arguments: Any) -> Bench:
    bench = Bench(**arguments)
    bench.manager.hooks.append(CheckedRecomputedTokens(bench.manager))
    return bench


def ask(bench: Bench, name: str, prompt: list[int], max_tokens: int = 3, **others: Any) -> tuple[int, int]:
    """Run a request. Returns its recomputed and its cached tokens."""
    bench.add(name, prompt, max_tokens, **others)
    metrics = bench.run()[name].metrics
    return metrics.recomputed_tokens, metrics.cached_tokens


@pytest.mark.parametrize("budget", [8, 80])
@pytest.mark.parametrize("windows", [(None,), (None, 6), (6, 6), (None, 6, 20)])
def test_what_is_evicted_is_computed_again(windows: tuple[int | None, ...], budget: int) -> None:
    """There is room for one conversation of 63 tokens, whatever a step computes of it."""
    bench = counting(device=17 * len(set(windows)), windows=windows, budget=budget)
    prompts = {name: prompt_of(60, seed) for seed, name in enumerate("ab")}
    assert ask(bench, "a", prompts["a"]) == ask(bench, "b", prompts["b"]) == (0, 0)
    branch = [*prompts["a"][:41], *prompt_of(19, 5)]
    recomputed, cached = ask(bench, "branch", branch)
    assert recomputed + cached == 40
    answer = bench.tokens("b")
    recomputed, cached = ask(bench, "next turn", [*prompts["b"], *answer, 1, 2, 3])
    assert recomputed + cached == 60, "and of the answer not one hash block"
    total = sum(output.metrics.recomputed_tokens for output in bench.finished.values())
    assert bench.engine.metrics().prefix_cache.recomputed_tokens == total > 0


def test_nothing_is_computed_again_while_there_is_room() -> None:
    bench = counting(device=100)
    prompt = prompt_of(50)
    asked = {"first": prompt, "same": prompt, "shorter": prompt[:40], "branch": [*prompt[:30], *prompt_of(30, 1)]}
    for name, tokens in asked.items():
        assert ask(bench, name, tokens)[0] == 0
    assert ask(bench, "next turn", [*asked["branch"], *bench.tokens("branch"), 7, 8]) == (0, 60)


def test_what_must_be_computed_anyway_is_not_counted() -> None:
    """The last token of a prompt, with the hash block around it, and a prompt whose log-probabilities are asked for."""
    bench = counting()
    prompt = prompt_of(8 * BLOCK)
    ask(bench, "first", prompt)
    assert ask(bench, "same", prompt) == (0, 7 * BLOCK)
    assert ask(bench, "scored", prompt, prompt_logprobs=1) == (0, 0)


def test_other_salts_and_adapters_have_no_tokens_in_common() -> None:
    bench = counting(max_loras=2)
    prompt = prompt_of(41)
    ask(bench, "first", prompt, adapter=1)
    bench.manager.pool.forget_content()  # the blocks alone
    assert ask(bench, "another adapter", prompt, adapter=2) == ask(bench, "none", prompt) == (0, 0)
    for name, counts in (("salted", (0, 0)), ("salted again", (0, 40))):
        params = SamplingParams(temperature=0.0, max_tokens=1)
        bench.engine.add_request(name, None, params, prompt, cache_salt="ours")
        metrics = bench.run()[name].metrics
        assert (metrics.recomputed_tokens, metrics.cached_tokens) == counts
    assert ask(bench, "the first one", prompt, adapter=1) == (40, 0)


def test_a_request_counts_once_whatever_happens_to_it() -> None:
    """It is preempted and computed again; it has several sequences, all of whose answers are known then."""
    bench = counting(device=24, max_num_seqs=4)
    prompts = {str(seed): prompt_of(21 + seed, seed) for seed in range(4)}
    for name, prompt in prompts.items():
        bench.add(name, prompt, 20)
    finished = bench.run()
    assert bench.engine.metrics().preemptions.recomputed > 0
    assert any(finished[name].metrics.prefill_tokens > len(prompts[name]) for name in prompts)
    assert all(output.metrics.recomputed_tokens == 0 for output in finished.values())
    bench.manager.pool.forget_content()
    bench.add("several", prompts["0"], 9, n=3, temperature=1.0)
    output = bench.run()["several"]
    assert output.metrics.recomputed_tokens == 20
    bench.manager.pool.forget_content()
    for completion in output.outputs:
        found = ask(bench, f"after {completion.index}", [*prompts["0"], *completion.token_ids, 1], 1)
        assert sum(found) == (21 + 8) // BLOCK * BLOCK


def test_reset_prefix_cache_forgets_the_prompts() -> None:
    bench = counting()
    ask(bench, "first", prompt_of(40))
    bench.engine.reset_prefix_cache()
    assert ask(bench, "same", prompt_of(40)) == (0, 0)


def test_the_record_is_bounded() -> None:
    bench = Bench()
    bench.manager.hooks.append(RecomputedTokens(bench.manager, most=10))
    short, long = prompt_of(17, 1), prompt_of(45, 2)
    # Of the long one's 11 hash blocks 10 are known, without the last one of its first chunk.
    for prompt, recomputed in ((short, 0), (short, 16), (long, 0), (long, 20), (short, 0)):
        bench.manager.pool.forget_content()
        name = str(len(bench.finished))
        assert ask(bench, name, prompt) == (recomputed, 0)


def test_what_the_cache_has_is_remembered_longer_when_it_is_used() -> None:
    bench = Bench()
    bench.manager.hooks.append(RecomputedTokens(bench.manager, most=10))
    first, second, third = (prompt_of(17, seed) for seed in (1, 2, 3))
    for name, prompt, cached in (("1", first, 0), ("2", second, 0), ("3", first, 16), ("4", third, 0)):
        assert ask(bench, name, prompt) == (0, cached)
    bench.manager.pool.forget_content()
    assert ask(bench, "5", first) == (16, 0)
    assert ask(bench, "6", second)[0] < 16


# ---- pending requests


def with_store(device: int) -> tuple[Bench, ContentStore]:
    bench = counting(device=device)
    store = ContentStore(bench.executor, BLOCK)
    bench.manager.hooks.append(StoredBlocks(bench.manager, store, None))
    return bench, store


def ask_store(bench: Bench, store: ContentStore, name: str, prompt: list[int]) -> tuple[int, int]:
    bench.add(name, prompt, 2)
    for _ in bench.steps():
        store.go_on()
    metrics = bench.finished[name].metrics
    return metrics.recomputed_tokens, metrics.cached_tokens


def test_what_was_read_is_known_from_then_on() -> None:
    bench, store = with_store(64)
    prompt = prompt_of(49)
    ask_store(bench, store, "written", prompt)
    bench.engine.reset_prefix_cache()
    assert ask_store(bench, store, "read", prompt) == (0, 48)
    store.stored.clear()
    bench.manager.pool.forget_content()
    assert ask_store(bench, store, "neither cached nor stored", prompt) == (48, 0)


def test_what_is_read_from_disk_is_not_computed() -> None:
    """Some reads fail. A request that is aborted while it is pending has not run, and counts nothing."""
    bench, store = with_store(17)
    prompts = [prompt_of(49, 1), prompt_of(49, 2)]
    counts = []
    for number in range(2 + 2 * FAILS_EVERY):
        recomputed, cached = ask_store(bench, store, str(number), prompts[number % 2])
        counts.append(recomputed)
        assert recomputed + cached == (48 if number > 1 else 0)
    assert store.num_failed > 0 and counts.count(0) < len(counts), "what could not be read is computed again"
    assert 0 in counts[2:] and store.num_read > 0
    bench.add("aborted", prompts[0], 2)
    bench.step()
    assert bench.scheduler.pending
    output = bench.engine.abort_request("aborted")
    assert output is not None and output.metrics.recomputed_tokens == 0
    assert bench.engine.metrics().prefix_cache.recomputed_tokens == sum(counts)
