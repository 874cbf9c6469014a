"""The scheduler: what is in a step, in which order, and which request is preempted. No torch."""

from __future__ import annotations

import pickle

import pytest
from content_model import expected_output
from content_store import ContentStore
from engine_helpers import BLOCK, Bench, crowd, prompt_of

from nanovllm.engine.request import Sequence
from nanovllm.features.kv_disk.stored_blocks import StoredBlocks
from nanovllm.memory.layerwise import LayerwiseMemory
from nanovllm.sampling_params import SamplingParams

# ---- what a step holds


def test_several_prompts_share_a_step_and_the_last_is_cut() -> None:
    bench = Bench(budget=24)
    for i, name in enumerate("abc"):
        bench.add(name, prompt_of(10, i))
    bench.step()
    assert bench.chunks() == {"a": 10, "b": 10, "c": 4}
    bench.step()
    assert bench.chunks() == {"a": 1, "b": 1, "c": 6}, "decodes come first, and the prefill goes on in the same step"
    bench.step()
    assert bench.chunks() == {"a": 1, "b": 1, "c": 1}
    bench.run()
    for i, name in enumerate("abc"):
        assert bench.tokens(name) == expected_output(prompt_of(10, i), 8)
    assert [row.context_len for row in bench.rows("c")][:3] == [0, 4, 10]


def test_prompts_are_cut_at_edges() -> None:
    """A prompt of which a step cannot compute anything up to an edge waits for the next step."""
    bench = Bench(budget=24, edge=8)
    for name, tokens in (("a", 10), ("b", 50), ("c", 12)):
        bench.add(name, prompt_of(tokens, ord(name)))
    bench.run()
    rows = {name: [(row.context_len, len(row.token_ids)) for row in bench.rows(name)] for name in "abc"}
    cuts = [
        begin + count
        for name in "abc"
        for begin, count in rows[name]
        if begin + count < {"a": 10, "b": 50, "c": 12}[name]
    ]
    assert len(cuts) > 1 and all(cut % 8 == 0 for cut in cuts)
    assert all(
        bench.tokens(name) == expected_output(prompt_of(tokens, ord(name)), 8)
        for name, tokens in (("a", 10), ("b", 50), ("c", 12))
    )


@pytest.mark.parametrize("priority", [0, -1])
def test_a_long_prefill_never_stalls_a_decode(priority: int) -> None:
    bench = Bench(budget=8)
    bench.add("talker", prompt_of(4), max_tokens=20)
    bench.step()
    bench.add("long", prompt_of(100, 1), max_tokens=2, priority=priority)
    for step in range(2, 15):
        outputs = {output.request_id: output for output in bench.step()}
        assert bench.chunks() == {"talker": 1, "long": 7}
        assert len(outputs["talker"].outputs[0].token_ids) == step
    bench.run()
    assert bench.tokens("long") == expected_output(prompt_of(100, 1), 2)


def test_one_prompt_goes_layer_by_layer_whatever_the_store_says() -> None:
    """What it has of the second prompt is gone between two questions: another process has deleted it."""
    answers = [True]

    class Emptied(ContentStore):
        def reach(self, seq: Sequence, begin: int) -> int:
            return seq.num_cacheable // self.unit * self.unit if answers and answers.pop() else begin

    bench = Bench(4, 60, budget=8, num_layers=3, layerwise_memory=LayerwiseMemory(40, 200))
    bench.add("first", prompt_of(80), 2)
    bench.step()
    assert bench.executor.batches[-1].layerwise is not None
    bench.manager.hooks.append(StoredBlocks(bench.manager, Emptied(bench.executor, BLOCK), None))
    bench.add("second", prompt_of(80, 1), 2)
    bench.run()
    assert not answers
    for index, name in enumerate(("first", "second")):
        assert bench.tokens(name) == expected_output(prompt_of(80, index), 2)


def test_batches_are_plain_data() -> None:
    bench = Bench(3, 20)
    for i in range(4):
        bench.add(str(i), prompt_of(9, i))
    bench.run()
    assert any(batch.moves for batch in bench.executor.batches)
    for batch in bench.executor.batches:
        assert pickle.loads(pickle.dumps(batch)) == batch


# ---- order and preemption


def test_a_request_that_does_not_fit_yet_is_not_overtaken() -> None:
    bench = Bench(10, caching=False)
    bench.add("runs", prompt_of(20), 4)
    bench.step()
    bench.add("large", prompt_of(24, 1), 1)
    bench.add("small", prompt_of(4, 2), 1)
    bench.step()
    assert set(bench.chunks()) == {"runs"}
    bench.run()
    assert bench.order == ["runs", "large", "small"]


def test_priority_then_arrival_decides_who_runs_first() -> None:
    bench = Bench(max_num_seqs=1)
    arrivals = {"late": (1, 3.0), "early": (1, 2.0), "urgent": (0, 9.0), "last": (5, 1.0), "tied": (1, 2.0)}
    for name, (priority, arrival) in arrivals.items():
        params = SamplingParams(temperature=0.0, max_tokens=2)
        bench.engine.add_request(name, None, params, prompt_of(3), arrival_time=arrival, priority=priority)
    bench.run()
    assert bench.order == ["urgent", "early", "tied", "late", "last"]


def test_the_lowest_priority_is_preempted_first() -> None:
    bench = Bench(6)
    crowd(bench, {"a": 7, "b": 7, "c": 7})  # two full blocks each; the next block needs a preemption
    bench.step()
    bench.add("new", prompt_of(2, 9), 2, priority=2)
    bench.step()
    bench.step()
    assert list(bench.chunks()) == ["a", "b"]
    assert [seq.request_id for seq in bench.scheduler.waiting] == ["c", "new"], "what was preempted waits in front"
    finished = bench.run()
    preemptions = [finished[name].metrics.preemptions for name in "abc"]
    assert preemptions[0] == 0 and preemptions[1] <= preemptions[2] and preemptions[2] >= 1
    assert sum(preemptions) == bench.scheduler.preemption.stats.total
    again = finished["c"].metrics
    assert again.prefill_tokens > 7 == again.first_prefill_tokens, "prefill_rate is of what came before the first token"


def test_what_the_prefix_cache_still_holds_is_not_recomputed() -> None:
    bench = Bench(8, caching=True)
    bench.add("a", prompt_of(9), 20)
    bench.add("b", prompt_of(9, 1), 20, priority=1)
    bench.step()
    first_scheduled = bench.scheduler.running[1].metrics.first_scheduled_time
    metrics = bench.run()["b"].metrics
    assert metrics.preemptions == 1
    assert metrics.first_scheduled_time == first_scheduled and metrics.cached_tokens == 0, (
        "metrics keep the first admission"
    )
    resumed = next(row for row in bench.rows("b")[1:] if len(row.token_ids) > 1)
    assert resumed.context_len > 0 and resumed.context_len % BLOCK == 0
