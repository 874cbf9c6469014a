"""One thread at a time uses an engine, and no callback does: what is refused is told why, what runs goes on."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoints import checkpoint_fixture
from engines import greedy, offloaded, random_prompt, token_ids

from nanovllm import LLM
from nanovllm.errors import EngineError

VOCAB = 97
PROMPTS = [random_prompt(length, VOCAB, length) for length in (40, 90, 7)]


model_dir = checkpoint_fixture(vocab=VOCAB, max_positions=256)


@pytest.fixture
def llm(model_dir: Path) -> Iterator[LLM]:
    with LLM(model_dir, dtype="float32", **offloaded(16, 4, 40, max_num_batched_tokens=32)) as llm:
        yield llm


def in_thread(work: Callable[[], object], name: str = "second") -> list[Exception]:
    """Run `work` in another thread to its end; what it raised."""
    raised: list[Exception] = []

    def run() -> None:
        try:
            work()
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=run, name=name)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    return raised


def during_step(llm: LLM, monkeypatch: pytest.MonkeyPatch, number: int, work: Callable[[], object]) -> None:
    """Have `work` done in the middle of a later step."""
    execute = llm.engine.executor.execute
    calls = iter(range(10**6))

    def watched(batch: Any) -> Any:
        if next(calls) == number:
            work()
        return execute(batch)

    monkeypatch.setattr(llm.engine.executor, "execute", watched)


def uses(llm: LLM) -> dict[str, Callable[[], object]]:
    return {
        "generate": lambda: llm.generate(PROMPTS[0], greedy(2), use_tqdm=False),
        "stream": lambda: list(llm.stream(PROMPTS[0], greedy(2))),
        "add_request": lambda: llm.engine.add_request("x", None, greedy(2), PROMPTS[0]),
        "step": lambda: llm.engine.step(),
        "abort_request": lambda: llm.engine.abort_request("request-0"),
        "reset_prefix_cache": lambda: llm.reset_prefix_cache(),
        "close": lambda: llm.close(),
    }


def test_another_thread_is_refused_and_the_call_goes_on(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = token_ids(llm, PROMPTS, greedy(6))
    raised: dict[str, list[Exception]] = {}

    def intrude() -> None:
        raised.update({name: in_thread(use) for name, use in uses(llm).items()})

    with monkeypatch.context() as patch:
        during_step(llm, patch, 3, intrude)
        assert token_ids(llm, PROMPTS, greedy(6)) == expected
    assert len(raised) == 7
    for name, (error,) in raised.items():
        assert isinstance(error, EngineError), (name, error)
        assert f"{name}() was refused, because generate() is using the engine" in str(error)
    assert in_thread(lambda: token_ids(llm, PROMPTS, greedy(6))) == [], "the engine is free again"
    assert token_ids(llm, PROMPTS, greedy(6)) == expected


@pytest.mark.parametrize("use", ["step", "close"])
def test_a_callback_is_refused_and_the_call_goes_on(llm: LLM, use: str, caplog: pytest.LogCaptureFixture) -> None:
    """Also where the callback lets the error pass: it is logged then, and not called again."""
    expected = token_ids(llm, PROMPTS, greedy(6))
    told: list[str] = []

    def watch(share: float) -> None:
        llm.metrics()  # may be asked for
        try:
            uses(llm)[use]()
        except EngineError as error:
            told.append(str(error))
            raise

    llm.watch_steps(watch)
    assert token_ids(llm, PROMPTS, greedy(6)) == expected
    (sentence,) = told
    assert f"{use}() was refused, because step() is using the engine" in sentence
    assert "the function that watches the steps has failed" in caplog.text
    assert token_ids(llm, PROMPTS, greedy(6)) == expected


def test_other_calls_and_threads_may_come_between_two_outputs_of_a_stream(llm: LLM) -> None:
    expected = token_ids(llm, PROMPTS, greedy(6))
    stream = llm.stream(PROMPTS, greedy(6))
    outputs = [next(stream)]
    assert token_ids(llm, PROMPTS, greedy(6)) == expected
    assert in_thread(uses(llm)["generate"]) == []
    outputs += stream
    final = {output.request_id: output.outputs[0].token_ids for output in outputs if output.finished}
    assert list(map(final.get, sorted(final))) == expected


def test_what_is_let_go_during_a_step_is_aborted_after_it(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that garbage collection finds in the middle of a step must not change the engine under it."""
    expected = token_ids(llm, PROMPTS[1:], greedy(6))
    streams = [llm.stream(PROMPTS[0], greedy(60))]
    next(streams[0])

    def let_go() -> None:
        streams.clear()
        gc.collect()
        assert len(llm.engine.scheduler.running) == 3

    with monkeypatch.context() as patch:
        during_step(llm, patch, 4, let_go)
        assert token_ids(llm, PROMPTS[1:], greedy(6)) == expected
    assert not llm.engine.has_unfinished_requests() and llm.engine.scheduler.block_manager.pool.num_used == 0


def test_an_interrupt_ends_what_runs_and_leaves_a_usable_engine(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = token_ids(llm, PROMPTS, greedy(6))
    first = llm.stream(PROMPTS[0], greedy(60))
    next(first)

    def interrupt() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        during_step(llm, patch, 2, interrupt)
        with pytest.raises(KeyboardInterrupt):
            token_ids(llm, PROMPTS, greedy(6))
    assert not llm.engine.has_unfinished_requests() and llm.engine.scheduler.block_manager.pool.num_used == 0
    with pytest.raises(EngineError, match="were ended by another"):
        list(first)
    assert token_ids(llm, PROMPTS, greedy(6)) == expected
    assert in_thread(uses(llm)["generate"]) == []


def in_fork(work: Callable[[], object]) -> str:
    """What `work` raises in a fork of this process, or its result."""
    reading, writing = os.pipe()
    if not (pid := os.fork()):
        signal.alarm(60)  # ends a fork that hangs
        try:
            said = repr(work())
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writing, said.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        said = pipe.read()
    os.waitpid(pid, 0)
    return said


def test_a_fork_is_refused_and_may_close_and_read(llm: LLM) -> None:
    """Without the refusal it would wait for threads that it does not have. The first process goes on."""
    before = token_ids(llm, PROMPTS[:1], greedy(3))
    for name, use in uses(llm).items():
        said = in_fork(use)
        if name == "close":
            assert said == "None"
        else:
            assert said.startswith(f"EngineError: {name}() was called in process "), said
            assert "make an LLM in the fork" in said
    assert in_fork(lambda: llm.max_model_len) == str(llm.max_model_len)
    assert token_ids(llm, PROMPTS[:1], greedy(3)) == before
