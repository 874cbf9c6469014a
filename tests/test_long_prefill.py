"""Prompts that take several steps, layer by layer or chunk by chunk, and how they share steps with others. No torch."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from content_model import expected_output
from engine_helpers import BLOCK, Bench, prompt_of
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.data.batch import ScheduledSequence
from nanovllm.engine.request import Request
from nanovllm.engine.scheduler import MOST_PASSED_OVER, Scheduler
from nanovllm.memory.layerwise import NO_LAYERWISE, LayerwiseMemory

LAYERS = 4
BUDGET = 24
ANY_LENGTH = LayerwiseMemory(buffer_blocks=250, max_tokens=1000)


def bench_with_layerwise(device: int = 4, host: int = 96, **options: Any) -> Bench:
    options = {"budget": BUDGET, "num_layers": LAYERS, "layerwise_memory": ANY_LENGTH, **options}
    return Bench(device, host, **options)


def layerwise_parts(bench: Bench, name: str) -> list[ScheduledSequence]:
    """The steps in which a request went layer by layer."""
    return [row for row in bench.rows(name) if row.layerwise is not None]


def layer_chunks(bench: Bench, name: str) -> list[tuple[int, int]]:
    return [
        (row.layerwise.first_layer_chunk, row.layerwise.end_layer_chunk)
        for row in layerwise_parts(bench, name)
        if row.layerwise is not None
    ]


# ---- one prompt


def test_alone_a_layerwise_prefill_advances_as_fast_as_chunks_would() -> None:
    bench = bench_with_layerwise()
    bench.add("long", prompt_of(5 * BUDGET), 1)
    bench.run()
    assert layer_chunks(bench, "long") == [(0, 4), (4, 8), (8, 12), (12, 16), (16, 20)], (
        "a step is BUDGET tokens, all layers"
    )
    assert bench.tokens("long") == expected_output(prompt_of(5 * BUDGET), 1)


def test_a_layerwise_prefill_is_cached_when_its_last_layer_is_done_and_not_before() -> None:
    bench = bench_with_layerwise()
    bench.add("long", prompt_of(100), 3)
    (seq,) = bench.scheduler.waiting[0].sequences
    (by_hash,) = bench.manager.prefix_cache._by_hash
    while bench.step()[0].outputs[0].token_ids == []:
        assert seq.num_computed == 0 and not by_hash
    assert seq.num_computed == 100 and seq.part_end == 0 and len(by_hash) == 100 // BLOCK
    assert bench.run()["long"].metrics.prefill_tokens == 100
    assert [bool(row.samples) for row in bench.rows("long")] == [False] * 4 + [True] * 3


def test_a_prompt_beyond_the_layerwise_memory_goes_in_parts_and_its_tail_by_chunks() -> None:
    bench = bench_with_layerwise(
        layerwise_memory=LayerwiseMemory(buffer_blocks=43, max_tokens=60)
    )  # 172 tokens; 2 chunks at a time
    bench.add("long", prompt_of(200), 2)
    bench.run()
    rows = [(row.context_len, len(row.token_ids), row.layerwise is not None) for row in bench.rows("long")]
    layerwise_memory = [(0, 48, True), (48, 48, True), (96, 48, True)]
    assert rows == [
        *(layerwise for layerwise in layerwise_memory for _ in range(2)),
        (144, 24, False),
        (168, 24, False),
        (192, 8, False),
        (200, 1, False),
    ]
    assert bench.tokens("long") == expected_output(prompt_of(200), 2)


# ---- with others


def test_decodes_go_on_in_every_step() -> None:
    bench = bench_with_layerwise()
    bench.add("talker", prompt_of(5), 30)
    bench.step()
    bench.add("long", prompt_of(10 * BUDGET, 1), 1)
    for step in range(2, 12):
        outputs = {output.request_id: output for output in bench.step()}
        assert len(outputs["talker"].outputs[0].token_ids) == step
    assert layer_chunks(bench, "long")[:3] == [(0, 4), (4, 8), (8, 12)], "the nearest to 23 tokens through 4 layers"
    bench.run()
    assert bench.tokens("long") == expected_output(prompt_of(10 * BUDGET, 1), 1)


@pytest.mark.parametrize("layerwise_memory", [NO_LAYERWISE, ANY_LENGTH])
def test_short_prompts_are_served_beside_a_long_one(layerwise_memory: LayerwiseMemory) -> None:
    """At most half of a step goes to them: a prompt of that length is answered in the step after its arrival."""
    bench = bench_with_layerwise(layerwise_memory=layerwise_memory)
    bench.add("long", prompt_of(10 * BUDGET), 1)
    bench.step()
    for index in range(6):
        bench.add(f"short {index}", prompt_of(BUDGET // 2, index + 1), 1)
        bench.step()
        assert f"short {index}" in bench.finished and "long" not in bench.finished
        (row,) = [seq for seq in bench.executor.batches[-1].sequences if bench.names[seq.seq_id] == "long"]
        worth = len(row.token_ids) * LAYERS if row.layerwise is None else row.layerwise.token_layers
        assert worth == BUDGET // 2 * LAYERS, "half is the long one's"
    bench.run()
    assert bench.tokens("long") == expected_output(prompt_of(10 * BUDGET), 1)


def test_a_step_looks_at_few_of_many_requests_that_wait_behind_a_long_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    """And at all of them in turn, so that the one that fits a step does not wait for the prefill."""
    bench = Bench(4000, budget=BUDGET, block_size=8)
    bench.add("long", prompt_of(20 * BUDGET), 1)
    bench.step()
    for index in range(300):
        bench.add(f"waits {index}", prompt_of(2 * BUDGET, index + 1), 1)
    bench.add("short", prompt_of(5, 500), 1)
    looks = list[str]()
    fits_a_step = Scheduler._fits_a_step

    def counted(self: Scheduler, request: Request) -> bool:
        looks.append(request.request_id)
        return fits_a_step(self, request)

    monkeypatch.setattr(Scheduler, "_fits_a_step", counted)
    steps = 0
    while "short" not in bench.finished:
        looks.clear()
        bench.step()
        steps += 1
        assert 32 < len(looks) <= MOST_PASSED_OVER + 1 and looks[:32] == [f"waits {index}" for index in range(32)]
    assert "long" not in bench.finished and steps == -(-(300 - 32) // (MOST_PASSED_OVER // 2))
    monkeypatch.undo()
    bench.run(2000)
    assert bench.order[:2] == ["short", "long"] and bench.order[2:] == [f"waits {index}" for index in range(300)]


def test_others_beside_a_long_prompt_of_chunks_wait_or_pass_and_find_what_it_left() -> None:
    bench = bench_with_layerwise(device=90, host=10)
    document = prompt_of(120)
    for name, prompt in (("first", [*document, 1]), ("same document", [*document, 2]), ("short", [3] * 30)):
        bench.add(name, prompt, 2)
    bench.add("shorter", [4] * 10, 2)
    bench.run()
    assert bench.order == ["shorter", "first", "same document", "short"]
    assert bench.finished["same document"].metrics.cached_tokens > 120 - BUDGET
    assert not any(layerwise_parts(bench, name) for name in bench.finished)
    assert bench.tokens("same document") == expected_output([*document, 2], 2)


def test_one_layerwise_prefill_at_a_time_and_the_next_finds_its_blocks() -> None:
    bench = bench_with_layerwise(host=200)
    document = prompt_of(120)
    bench.add("first", [*document, 1], 2)
    bench.add("same document", [*document, 2], 2)
    bench.add("another", prompt_of(110, 7), 2)
    bench.add("short", prompt_of(5), 2)
    bench.run()
    assert bench.finished["same document"].metrics.cached_tokens == 120
    assert not layerwise_parts(bench, "same document"), "a token is left to compute"
    steps = [[bench.names[seq.seq_id] for seq in batch.sequences if seq.layerwise] for batch in bench.executor.batches]
    assert all(len(names) <= 1 for names in steps)
    order = [names[0] for names in steps if names]
    assert order == ["first"] * order.count("first") + ["another"] * order.count("another")
    assert bench.order[0] == "short"
    for name, prompt in (("first", [*document, 1]), ("another", prompt_of(110, 7))):
        assert bench.tokens(name) == expected_output(prompt, 2)


# ---- when it does not end


def test_a_preempted_layerwise_prefill_begins_again() -> None:
    bench = bench_with_layerwise(device=2, host=28, caching=False)
    bench.add("talker", prompt_of(4), 40)
    bench.step()
    bench.add("long", prompt_of(110, 1), 2, priority=1)
    bench.run()
    assert bench.finished["long"].metrics.preemptions > 0
    begun = [first for first, _ in layer_chunks(bench, "long")]
    assert begun.count(0) == 1 + bench.finished["long"].metrics.preemptions
    assert bench.tokens("long") == expected_output(prompt_of(110, 1), 2)


@given(
    requests=st.lists(st.tuples(st.integers(1, 90), st.integers(1, 6), st.integers(0, 2)), min_size=1, max_size=8),
    budget=st.integers(1, 30),
    device=st.integers(0, 10),
    num_layers=st.integers(1, 5),
    max_num_seqs=st.integers(1, 8),
    layerwise_memory=st.builds(LayerwiseMemory, st.integers(1, 30), st.integers(1, 130)),
)
@settings(max_examples=40)
def test_everybody_is_served_within_the_budget(
    requests: list[tuple[int, int, int]], device: int, **limits: Any
) -> None:
    bench = Bench(device, 40 - device, **limits)  # the executor checks every batch
    for i, (length, max_tokens, priority) in enumerate(requests):
        bench.add(str(i), prompt_of(length, i), max_tokens, priority)
    bench.run(4000)
    for i, (length, max_tokens, _) in enumerate(requests):
        assert bench.tokens(str(i)) == expected_output(prompt_of(length, i), max_tokens)
        for earlier, later in pairwise(layer_chunks(bench, str(i))):
            assert later[0] in (earlier[1], 0), "layer chunks follow each other, or a prefill begins"
    assert bench.manager.pool.num_used == 0
