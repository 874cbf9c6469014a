"""Adapters in the scheduler: how many run at a time, who waits for whom, and whose KV blocks are shared. No torch."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from content_model import expected_output
from engine_helpers import Bench, adapter_salt, prompt_of

from nanovllm.data.batch import Batch


def check_adapters(batch: Batch, max_loras: int) -> None:
    """At most max_loras adapters, and every sequence's among those that the executor is told to load."""
    numbers = [adapter.number for adapter in batch.adapters]
    assert len(numbers) == len(set(numbers)) <= max_loras
    assert {seq.adapter for seq in batch.sequences} <= {*numbers, None}


ENGINES: dict[str, dict[str, Any]] = {
    "plenty of blocks": {"device": 200},
    "recomputation": {"device": 24, "mode": "recompute"},
    "swapping": {"device": 24, "swap": 40, "mode": "swap"},
    "two tiers": {"device": 8, "host": 40, "budget": 9},
}


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("max_loras", [1, 3])
def test_each_request_is_answered_with_its_own_adapter(name: str, max_loras: int) -> None:
    """Many requests with the same prompts and other adapters: the content of a KV block tells them apart."""
    random = Random(f"{name} {max_loras}")
    bench = Bench(**ENGINES[name], max_loras=max_loras)
    expected: dict[str, list[int]] = {}
    for index in range(60):
        prompt = prompt_of(random.choice([3, 9, 16, 21]), 0)
        adapter = random.choice([None, 1, 2, 3, 4, 5])
        tokens = random.randrange(1, 12)
        bench.add(f"r{index}", prompt, tokens, adapter=adapter)
        expected[f"r{index}"] = expected_output(prompt, tokens, salt=adapter_salt(adapter))
    bench.run()
    for batch in bench.executor.batches:
        check_adapters(batch, max_loras)
    assert {request_id: bench.tokens(request_id) for request_id in expected} == expected
    assert max(len(batch.adapters) for batch in bench.executor.batches) == max_loras
    stats = bench.scheduler.preemption.stats
    assert (stats.swapped > 0) == (name == "swapping") and (stats.recomputed > 0 or name != "recomputation")
    assert bench.scheduler.block_manager.stats.hit_tokens > 0


def test_requests_whose_adapter_is_in_use_overtake_and_so_do_those_without() -> None:
    bench = Bench(max_loras=1, max_num_seqs=8)
    for name, adapter in (("a1", 1), ("b1", 2), ("plain", None), ("a2", 1), ("b2", 2)):
        bench.add(name, prompt_of(4, len(name)), 6, adapter=adapter)
    bench.step()
    assert [request.request_id for request in bench.scheduler.running] == ["a1", "plain", "a2"]
    assert [request.request_id for request in bench.scheduler.waiting] == ["b1", "b2"]
    bench.run()
    assert bench.order[:3] == ["a1", "plain", "a2"] and set(bench.order[3:]) == {"b1", "b2"}


def test_no_request_waits_for_ever_behind_an_adapter_that_is_in_use() -> None:
    """A stream of requests of one adapter, always two at a time: the other's turn comes after max_num_seqs of them."""
    bench = Bench(max_loras=1, max_num_seqs=4)
    bench.add("a0", prompt_of(4), 3, adapter=1)
    bench.step()
    bench.add("b", prompt_of(5), 3, adapter=2)
    for index in range(1, 30):
        bench.add(f"a{index}", prompt_of(4, index), 3, adapter=1)
        bench.step()
    assert "b" in bench.finished
    before = bench.order[: bench.order.index("b")]
    assert 4 <= len(before) <= 6
    bench.run()
    assert bench.tokens("b") == expected_output(prompt_of(5), 3, salt=adapter_salt(2))
    assert len(bench.finished) == 31
