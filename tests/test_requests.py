"""Requests in the engine: refused, aborted, failed, finished, and their metrics. No torch."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Any

import pytest
from block_helpers import one_group, request
from content_model import VOCAB, expected_output
from engine_helpers import BLOCK, Bench, prompt_of

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.scheduling_budget import SchedulerLimits
from nanovllm.engine.step_hook import StepHook
from nanovllm.errors import EngineError, RequestError
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams, derived_seed

# ---- refusals


def test_a_request_that_never_fits_is_refused_at_once_and_others_go_on() -> None:
    manager = BlockManager(200, 50, one_group(BLOCK))  # the watermark keeps 2 blocks
    scheduler = Scheduler(SchedulerLimits(8, 24, manager.capacity.max_sequence_tokens), manager)
    fits = request(prompt_of(248 * BLOCK), "fits")
    scheduler.add(fits)
    with pytest.raises(RequestError) as refusal:
        scheduler.add(request(prompt_of(248 * BLOCK + 1), "huge"))
    for number in ("'huge'", "993 tokens", "249 KV blocks", "of 4 tokens", "250", "keeps 2 free", "992 tokens"):
        assert number in str(refusal.value), number
    assert scheduler.waiting == [fits]


REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({}, "needs a prompt"),
    ({"prompt": "text"}, "no tokenizer"),
    ({"prompt_token_ids": []}, "empty"),
    ({"prompt_token_ids": "12"}, "'12'"),
    ({"prompt_token_ids": [1, VOCAB]}, f"{VOCAB} in the prompt is not one of the model's.* 0 to {VOCAB - 1}"),
    ({"prompt_token_ids": [1, -1]}, "-1 in the prompt"),
    ({"prompt_token_ids": [True]}, "True in the prompt"),
    ({"prompt_token_ids": [1], "sampling_params": {"temperature": 0}}, "SamplingParams.*temperature"),
    ({"prompt_token_ids": [1], "sampling_params": SamplingParams(), "params": SamplingParams()}, "give only one"),
    ({"prompt_token_ids": [1], "priority": "high"}, "priority.*'high'"),
    ({"prompt_token_ids": [1], "arrival_time": float("nan")}, "arrival_time.*nan"),
    ({"prompt_token_ids": [1], "request_id": 5}, "request_id=5: must be a string"),
]


@pytest.mark.parametrize("arguments, says", REFUSALS, ids=[str(arguments) for arguments, _ in REFUSALS])
def test_bad_requests_are_refused_with_a_sentence(arguments: dict[str, Any], says: str) -> None:
    bench = Bench()
    bench.add("other", prompt_of(3), 2)
    with pytest.raises(RequestError) as refusal:
        bench.engine.add_request(**{"request_id": "bad", **arguments})
    assert re.search(says, str(refusal.value))
    assert bench.engine.abort_request("bad") is None
    assert list(bench.run()) == ["other"]


# ---- aborts and failures


def test_abort_in_the_middle_of_a_chunked_prefill() -> None:
    bench = Bench(3, 20, budget=10)
    bench.add("a", prompt_of(30))
    bench.step()
    assert bench.manager.pool.num_used == 8
    output = bench.engine.abort_request("a")
    assert output is not None and output.finished and output.outputs[0].finish_reason == "abort"
    assert output.outputs[0].token_ids == [] and output.metrics.prefill_tokens == 10
    assert bench.manager.pool.num_used == 0
    assert bench.manager.pool.num_cached == 2, "the two full blocks are cached, the partly filled one is not"
    assert not bench.engine.has_unfinished_requests() and bench.step() == []
    bench.add("a", prompt_of(30))
    assert bench.run()["a"].num_cached_tokens == 8
    assert bench.tokens("a") == expected_output(prompt_of(30), 8)


def test_a_failed_step_ends_what_ran_and_nothing_else() -> None:
    bench = Bench(max_num_seqs=2)
    for i, name in enumerate("abc"):
        bench.add(name, prompt_of(9, i))
    bench.step()
    assert bench.manager.stats.queried_tokens == 18
    bench.executor.error = ValueError("the device is on fire")
    with pytest.raises(EngineError, match=r"ended 2 running requests: the device is on fire") as failure:
        bench.step()
    for output, name in zip(failure.value.outputs, "ab", strict=True):
        assert isinstance(output, RequestOutput) and output.finished and output.request_id == name
        assert output.outputs[0].finish_reason == "error"
        assert output.outputs[0].token_ids == expected_output(output.prompt_token_ids, 1), "the tokens generated so far"
    assert bench.manager.pool.num_free == bench.manager.pool.num_blocks, "blocks of a failed step are not cached"
    assert bench.engine.abort_request("a") is None, "it has ended"
    bench.add("a", prompt_of(9))
    bench.run()
    assert set(bench.finished) == {"a", "c"}
    assert bench.finished["a"].num_cached_tokens == 0
    assert bench.tokens("a") == expected_output(prompt_of(9), 8)
    assert bench.tokens("c") == expected_output(prompt_of(9, 2), 8)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)])
def test_interrupts_pass_through_and_the_engine_goes_on(error: BaseException) -> None:
    bench = Bench(max_num_seqs=1)
    bench.add("a", prompt_of(9))
    bench.add("b", prompt_of(9, 1))
    bench.step()
    bench.executor.error = error
    with pytest.raises(type(error)) as raised:
        bench.step()
    assert raised.value is error
    bench.run()
    assert set(bench.finished) == {"b"} and bench.tokens("b") == expected_output(prompt_of(9, 1), 8)


def test_what_cannot_be_closed_leaves_nothing_else_open(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    closed = list[str]()

    def fail() -> None:
        raise OSError("the disk is full")

    bench.manager.hooks.append(hook := StepHook())
    monkeypatch.setattr(hook, "close", fail)
    monkeypatch.setattr(bench.executor, "close", lambda: closed.append("executor"))
    with pytest.raises(OSError, match="the disk is full"):
        bench.engine.close()
    assert closed == ["executor"]


# ---- ends


def test_other_seeds_have_other_children() -> None:
    """Python's hash of numbers, which is for dictionaries, takes them modulo 2^61 - 1, and -1 for -2."""
    seeds = [0, 1, -1, -2, 2**61 - 1, 2**61, 2**63 - 1, -(2**63)]
    children = {
        derived_seed(seed, part, index) for seed in seeds for part in ("prompt", "sequence") for index in (1, 2)
    }
    assert len(children) == 4 * len(seeds) and all(SamplingParams(seed=seed).seed == seed for seed in children)
    assert derived_seed(0, "sequence", 1) == -2216786999742972836  # in every process and on every machine
    for seed in seeds:
        first, second = request([1], params=SamplingParams(n=2, temperature=1.0), seed=seed).sequences
        assert first.seed == seed and second.seed == derived_seed(seed, "sequence", 1)


def test_ignore_eos_goes_past_end_tokens_and_not_past_stop_tokens() -> None:
    prompt = prompt_of(5)
    free = expected_output(prompt, 20)
    eos = free[2]
    stop = next(token for token in free if token != free[2])
    bench = Bench(eos=[eos])
    bench.add("runs", prompt, 20, ignore_eos=True)
    bench.add("stops", prompt, 20, ignore_eos=True, stop_token_ids=[stop])
    bench.run()
    assert bench.tokens("runs") == free and bench.reason("runs") == ("length", None)
    assert bench.tokens("stops") == free[: free.index(stop) + 1] and bench.reason("stops") == ("stop", stop)


@pytest.mark.parametrize("length, generated", [(15, 5), (19, 1), (20, 1)])
@pytest.mark.parametrize("max_tokens", [None, 100])
def test_max_model_len_ends_a_request_with_length(length: int, generated: int, max_tokens: int | None) -> None:
    bench = Bench(max_model_len=20)
    bench.add("a", prompt_of(length), max_tokens)
    bench.run()
    assert bench.reason("a") == ("length", None)
    assert bench.tokens("a") == expected_output(prompt_of(length), generated)
    assert max(row.context_len + len(row.token_ids) for row in bench.rows("a")) <= 20


class SpelledOut:
    """Token 7 is " 7"; the end token has no text."""

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(f" {token}" for token in token_ids)


# ---- metrics


def test_metrics_of_a_plain_request() -> None:
    bench = Bench(budget=8)
    bench.add("a", prompt_of(20), 5)
    metrics = bench.run()["a"].metrics
    assert (metrics.prefill_tokens, metrics.decode_tokens) == (20, 4)
    assert (metrics.cached_tokens, metrics.preemptions) == (0, 0)
    assert (metrics.h2d_bytes, metrics.d2h_bytes) == (10 * 24, 20 * 24)
    times = [metrics.arrival_time, metrics.first_scheduled_time, metrics.first_token_time, metrics.finished_time]
    assert None not in times and times == sorted(times, key=lambda t: t or 0.0)
    assert metrics.queue_time is not None and metrics.ttft is not None and metrics.tpot is not None
    assert 0 <= metrics.queue_time <= metrics.ttft
    assert metrics.tpot == ((metrics.finished_time or 0) - (metrics.first_token_time or 0)) / 4
    assert metrics.e2e_latency is not None and metrics.e2e_latency >= metrics.ttft
    assert metrics.decode_rate == 1 / metrics.tpot and (metrics.prefill_rate or 0) > 0
    assert abs(time.time() - metrics.arrival_time) < 60, "the clock is that of time.time()"


def test_metrics_have_units_and_durations_survive_a_change_of_the_systems_clock(monkeypatch: Any) -> None:
    bench = Bench(budget=8)
    bench.add("a", prompt_of(20), 5)
    monkeypatch.setattr("time.time", lambda: 0.0)  # the clock is set back to 1970 while the request runs
    metrics = bench.run()["a"].metrics
    assert 0 <= (metrics.queue_time or 0) <= (metrics.e2e_latency or -1) < 60
    named = metrics.as_dict()
    values = metrics.e2e_latency, metrics.queue_time, metrics.prefill_rate, metrics.decode_tokens
    assert (named["e2e_latency_s"], named["queue_time_s"], named["prefill_tok_s"], named["decode_tokens"]) == values
    bench.add("b", prompt_of(3), 1)
    assert bench.run()["b"].metrics.arrival_time < 60, "an idle engine follows the clock"


class Unspeakable(SpelledOut):
    """Has no text for one token."""

    def __init__(self, token: int) -> None:
        self.token = token

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        if self.token in token_ids:
            raise ValueError("no such piece")
        return super().decode(token_ids, skip_special_tokens=skip_special_tokens)


def test_a_request_whose_text_cannot_be_made_ends_and_the_others_go_on() -> None:
    tokens = expected_output(prompt_of(6), 8)
    others = expected_output(prompt_of(6, 1), 8)
    bad = next(i for i, token in enumerate(tokens) if token not in others)
    bench = Bench(tokenizer=Unspeakable(tokens[bad]))
    bench.add("bad", prompt_of(6))
    bench.add("good", prompt_of(6, 1))
    bench.run()
    assert bench.reason("bad") == ("error", None) and bench.tokens("bad") == tokens[: bad + 1]
    assert bench.reason("good") == ("length", None) and bench.tokens("good") == others
    assert bench.finished["good"].outputs[0].text == "".join(f" {token}" for token in others)
    assert bench.manager.pool.num_used == 0
