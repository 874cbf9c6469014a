"""Scheduler and block manager under random requests, aborts and failures, against a model of KV content. No torch."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import ClassVar

from content_model import VOCAB, ContentExecutor, expected_output
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.llm_engine import LLMEngine, ModelFacts
from nanovllm.engine.request import Request, Sequence
from nanovllm.engine.scheduler import SchedulerLimits
from nanovllm.errors import EngineError, RequestError
from nanovllm.kvcache.prefill_plan import SpanMemory
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams

# Few tokens and common starts, so that prefixes are shared often.
TOKENS = st.integers(0, 2)
PROMPTS = st.one_of(
    st.lists(TOKENS, min_size=1, max_size=40),
    st.builds(
        lambda repeats, tail: [1, 2, 0] * repeats + tail, st.integers(0, 14), st.lists(TOKENS, min_size=1, max_size=3)
    ),
)
LENGTH_DEPENDENT_ABOVE = 30


class EngineMachine(RuleBasedStateMachine):
    """Every rule leaves the books balanced, and every finished request has the tokens of a request run alone."""

    totals: ClassVar[Counter[str]] = Counter()

    @initialize(
        num_device=st.integers(0, 8),
        num_host=st.integers(0, 12),
        block_size=st.integers(1, 6),
        max_num_seqs=st.integers(1, 5),
        budget=st.integers(1, 24),
        caching=st.booleans(),
        num_layers=st.integers(1, 4),
        spans=st.builds(SpanMemory, st.integers(0, 20), st.integers(0, 60)),
    )
    def start(
        self,
        num_device: int,
        num_host: int,
        block_size: int,
        max_num_seqs: int,
        budget: int,
        caching: bool,
        num_layers: int,
        spans: SpanMemory,
    ) -> None:
        num_device = max(num_device, 2 - num_host)
        self.manager = BlockManager(num_device, num_host, block_size, caching)
        self.executor = ContentExecutor(num_device, num_host, block_size, num_layers)
        longest = self.manager.max_sequence_tokens
        limits = SchedulerLimits(max_num_seqs, budget, longest, num_layers=num_layers, spans=spans)
        self.engine = LLMEngine(limits, ModelFacts(VOCAB, LENGTH_DEPENDENT_ABOVE), self.manager, self.executor)
        self.names = (f"r{i}" for i in itertools.count())
        self.requests: dict[str, tuple[list[int], SamplingParams]] = {}

    # ---- what can happen

    @rule(
        prompt=PROMPTS,
        max_tokens=st.integers(1, 25),
        stop=st.lists(st.integers(0, VOCAB - 1), max_size=3),
        priority=st.integers(0, 2),
    )
    def add(self, prompt: list[int], max_tokens: int, stop: list[int], priority: int) -> None:
        name = next(self.names)
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, stop_token_ids=stop)
        try:
            self.engine.add_request(name, None, params, prompt, priority=priority)
        except RequestError as error:
            assert len(prompt) > self.engine.limits.max_model_len and str(len(prompt)) in str(error)
            return
        self.requests[name] = (prompt, params)

    @rule(count=st.integers(1, 12))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self._tell_histories()
            steps_before = self.executor.num_steps
            self._take(self.engine.step())
            EngineMachine.totals["steps"] += self.executor.num_steps - steps_before
            self.books_balance()

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        if not self.requests:
            return
        name = data.draw(st.sampled_from(sorted(self.requests)))
        output = self.engine.abort_request(name)
        assert output is not None and output.finished and output.outputs[0].finish_reason == "abort"
        done = output.outputs[0].token_ids
        assert done == self._expected(name)[: len(done)]
        del self.requests[name]
        assert self.engine.abort_request(name) is None

    @rule()
    def reset_cache(self) -> None:
        self.manager.reset_prefix_cache()
        assert self.manager.num_cached == 0

    @rule()
    def step_fails(self) -> None:
        running = {seq.request_id for seq in self.engine.scheduler.running}
        self.executor.fail_next = True
        try:
            self.engine.step()
        except EngineError as error:
            assert "on fire" in str(error)
            still_there = {seq.request_id for seq in self.engine.scheduler.waiting}
            for name in set(self.requests) - still_there:
                del self.requests[name]
            assert not running & set(self.requests) - still_there
        self.executor.fail_next = False

    def teardown(self) -> None:
        """Everything that is left comes to its end, and no block stays behind."""
        if not hasattr(self, "engine"):
            return
        for _ in range(20_000):
            if not self.engine.has_unfinished_requests():
                break
            self.steps(1)
        assert not self.requests, "a request never finished"
        assert self.manager.num_used == 0
        EngineMachine.totals["preemptions"] += self.engine.scheduler.num_preemptions
        EngineMachine.totals["moves"] += self.executor.num_moves
        EngineMachine.totals["spans"] += self.executor.num_spans
        EngineMachine.totals["hits"] += self.manager.stats.hit_tokens

    # ---- what must hold

    @invariant()
    def books_balance(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.manager.check()
        held = Counter(block for seq in self._live() for block in seq.block_table)
        assert self.manager.num_used == len(held)
        for block_id, count in held.items():
            assert self.manager._blocks[block_id].ref_count == count
        for request in self.engine.scheduler.waiting:
            for seq in request.sequences:
                assert not seq.block_table and seq.num_computed == 0 and seq.span is None
        assert sum(seq.span is not None for seq in self._live()) <= 1
        assert len(self.engine.scheduler.running) <= self.engine.limits.max_num_seqs

    def _live(self) -> list[Sequence]:
        requests: list[Request] = [*self.engine.scheduler.waiting, *self.engine.scheduler.running]
        return [seq for request in requests for seq in request.sequences]

    def _tell_histories(self) -> None:
        for seq in self._live():
            self.executor.histories[seq.seq_id] = seq.token_ids
            # Above the threshold K/V depend on the prompt's length, as with dynamic RoPE.
            long = seq.prompt_len > LENGTH_DEPENDENT_ABOVE
            self.executor.salts[seq.seq_id] = bytes([seq.prompt_len]) if long else b""

    def _take(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            expected, params = self._expected(output.request_id), self.requests[output.request_id][1]
            completion = output.outputs[0]
            assert completion.token_ids == expected[: len(completion.token_ids)]
            if output.finished:
                assert completion.token_ids == expected
                stopped = bool(expected) and expected[-1] in params.stop_token_ids
                assert completion.finish_reason == ("stop" if stopped else "length")
                del self.requests[output.request_id]

    def _expected(self, name: str) -> list[int]:
        prompt, params = self.requests[name]
        room = self.engine.limits.max_model_len - len(prompt)
        salt = bytes([len(prompt)]) if len(prompt) > LENGTH_DEPENDENT_ABOVE else b""
        return expected_output(prompt, min(params.max_tokens or 0, max(room, 1)), params.stop_token_ids, salt)


def test_random_runs_never_corrupt_leak_or_lose_a_block() -> None:
    EngineMachine.totals.clear()
    machine_settings = settings(
        max_examples=300,
        stateful_step_count=40,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(EngineMachine, settings=machine_settings)
    # The run must have gone where the trouble is.
    assert EngineMachine.totals["steps"] >= 5_000, EngineMachine.totals
    for what in ("preemptions", "moves", "hits", "spans"):
        assert EngineMachine.totals[what] > 0, EngineMachine.totals
