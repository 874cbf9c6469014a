"""Step hooks: what they are told of a request, and what they decide. No torch."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import pytest
from content_model import expected_output
from engine_helpers import BLOCK, Bench, prompt_of

from nanovllm.data.batch import Batch, Sample
from nanovllm.engine.prefix_cache import PrefixHit
from nanovllm.engine.request import Request, Sequence
from nanovllm.engine.scheduling_budget import SchedulingBudget
from nanovllm.engine.step_hook import StepHook


class Told(StepHook):
    """Notes what it is told of sequences, and how often in `ext`."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def note(self, seq: Sequence, what: str) -> None:
        seq.ext[self] = seq.ext.get(self, 0) + 1
        self.events.append(f"{what} {seq.request.request_id}")

    def admitted(self, seq: Sequence, hit: PrefixHit) -> None:
        assert seq.num_computed == hit.num_tokens <= hit.num_known and seq.block_tables
        self.note(seq, "admitted")

    def first_run(self, request: Request) -> None:
        assert request.metrics.first_scheduled_time is not None
        self.note(request.sequences[0], "first run")

    def started(self, request: Request) -> None:
        self.note(request.sequences[0], "started")

    def planned(self, budget: SchedulingBudget) -> None:
        for seq, chunk in budget.chunks:
            self.note(seq, f"planned {chunk} of")

    def built(self, batch: Batch, sequences: list[Sequence]) -> None:
        assert [scheduled.seq_id for scheduled in batch.sequences] == [seq.seq_id for seq in sequences]
        for seq in sequences:
            self.note(seq, "built")

    def executed(self, batch: Batch, seconds: float) -> None:
        self.events.append("executed")

    def computed(self, seq: Sequence, begin: int, samples: Seq[Sample]) -> None:
        assert len(seq) == seq.prompt_len + seq.num_output_tokens and seq.block_tables
        self.note(seq, f"computed {begin}-{seq.num_computed}, {len(samples)} samples of")

    def freed(self, seq: Sequence) -> None:
        assert seq.block_tables
        self.note(seq, "freed")

    def forked(self, parent: Sequence, child: Sequence) -> None:
        self.note(child, f"forked {child.index} of")


def hooked(bench: Bench, hook: StepHook) -> StepHook:
    bench.manager.hooks.append(hook)
    return hook


def test_a_hook_sees_a_request_from_its_admission_to_its_end() -> None:
    bench = Bench(budget=8)
    told = Told()
    hooked(bench, told)
    bench.add("a", prompt_of(10), 2)
    (seq,) = bench.scheduler.waiting[0].sequences
    bench.run()
    assert told.events == [
        *("admitted a", "first run a", "started a"),
        *("planned 8 of a", "built a", "executed", "computed 0-8, 0 samples of a"),
        *("planned 2 of a", "built a", "executed", "computed 8-10, 1 samples of a"),
        *("planned 1 of a", "built a", "executed", "computed 10-11, 1 samples of a", "freed a"),
    ]
    assert seq.ext == {told: len(told.events) - told.events.count("executed")}


def test_a_hook_sees_forks() -> None:
    bench = Bench()
    told = Told()
    hooked(bench, told)
    bench.add("a", prompt_of(5), 2, n=3, temperature=1.0)
    bench.run()
    assert [event for event in told.events if "forked" in event] == ["forked 1 of a", "forked 2 of a"]
    assert told.events.count("freed a") == 3


@pytest.mark.parametrize("asked", ["may_start", "is_ready"])
def test_others_overtake_a_request_that_a_hook_does_not_let_run(asked: str) -> None:
    waits = [0.0]

    class Held(StepHook):
        def wait(self, seconds: float) -> None:
            waits.append(seconds)

    def decides(request: Request) -> bool:
        return request.request_id != "held"

    bench = Bench()
    hook = hooked(bench, Held())
    setattr(hook, asked, decides)
    bench.add("held", prompt_of(6), 2)
    bench.add("other", prompt_of(7), 2)
    while "other" not in bench.finished:
        bench.step()
    assert [request.request_id for request in bench.scheduler.waiting] == ["held"] and sum(waits) == 0
    assert bench.engine.step() == [] and (sum(waits) > 0) == (asked == "is_ready"), "what is being looked for may come"
    delattr(hook, asked)
    bench.run()
    assert bench.tokens("held") == expected_output(prompt_of(6), 2)


def test_a_chunk_ends_where_a_hook_says() -> None:
    class Limit(StepHook):
        def limit(self, seq: Sequence, tokens: int) -> int:
            return min(tokens, 5 - seq.num_computed % 5)

    bench = Bench()
    hooked(bench, Limit())
    bench.add("a", prompt_of(12), 2)
    bench.run()
    assert [len(row.token_ids) for row in bench.rows("a")] == [5, 5, 2, 1]
    assert bench.tokens("a") == expected_output(prompt_of(12), 2)


@pytest.mark.parametrize("agrees", [True, False])
def test_a_request_is_recomputed_if_a_hook_keeps_it_from_being_swapped(agrees: bool) -> None:
    class Keeps(StepHook):
        def swap_out(self, sequences: Seq[Sequence]) -> bool:
            return agrees

    bench = Bench(6, swap=20, mode="swap")
    hooked(bench, Keeps())
    for name in ("a", "b"):
        bench.add(name, prompt_of(2 * BLOCK, ord(name)), 2 * BLOCK)
    bench.run()
    stats = bench.scheduler.preemption.stats
    assert (stats.swapped > 0, stats.recomputed > 0) == (agrees, not agrees)
    for name in ("a", "b"):
        assert bench.tokens(name) == expected_output(prompt_of(2 * BLOCK, ord(name)), 2 * BLOCK)


def test_a_prefix_hit_ends_where_a_hook_can_go_on() -> None:
    class Nowhere(StepHook):
        def may_go_on_after(self, content_hash: bytes) -> bool:
            return False

    for hook, cached in ((StepHook(), 2 * BLOCK), (Nowhere(), 0)):
        bench = Bench()
        hooked(bench, hook)
        for name in ("first", "second"):
            bench.add(name, prompt_of(2 * BLOCK + 1), 2)
            bench.run()
        assert bench.finished["second"].num_cached_tokens == cached
