"""Preemption of requests of several sequences: swapped out and back, or recomputed from the fork. No torch."""

from __future__ import annotations

from engine_helpers import Bench, crowd, prompt_of
from group_helpers import expected_group, outputs, sampled


def test_one_sequence_is_recomputed_and_several_are_swapped() -> None:
    single = Bench(6, swap=20)
    crowd(single, {"a": 7, "b": 7, "c": 7})
    single.run()
    stats = single.scheduler.preemption.stats
    assert (stats.recomputed > 0, stats.swapped) == (True, 0) and stats.tokens_lost > 0

    groups = Bench(12, swap=20)
    sampled(groups, "a", prompt_of(7), 12, n=2)
    sampled(groups, "b", prompt_of(7, 1), 12, n=2)
    groups.run()
    stats = groups.scheduler.preemption.stats
    assert (stats.recomputed, stats.tokens_lost) == (0, 0) and stats.swapped > 0


def test_swapped_requests_come_before_waiting_ones_of_their_order_and_after_more_urgent_ones() -> None:
    bench = Bench(12, swap=20)
    sampled(bench, "a", prompt_of(7), 12, n=2)
    sampled(bench, "b", prompt_of(7, 1), 12, n=2)
    while not bench.scheduler.swapped:
        bench.step()
    assert [request.request_id for request in bench.scheduler.swapped] == ["b"]
    assert "b" not in bench.chunks(), "no request is swapped in by the step that swapped one out"
    swapped_at = len(bench.executor.batches) - 1
    bench.add("later", prompt_of(1, 2), 2)
    bench.add("urgent", prompt_of(1, 3), 2, priority=-1)
    bench.step()
    assert "urgent" in bench.chunks() and "later" not in bench.chunks()
    bench.run()
    steps = [{bench.names[row.seq_id] for row in batch.sequences} for batch in bench.executor.batches]
    back = next(step for step in range(swapped_at, len(steps)) if "b" in steps[step])
    assert back <= next(step for step, names in enumerate(steps) if "later" in names)
    assert outputs(bench, "b") == expected_group(prompt_of(7, 1), 2, 12)
