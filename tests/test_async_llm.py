"""The engine for asyncio: the same answers as `LLM.generate`, and nothing that waits for it or for which it waits."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from server_helpers import CACHE, held_steps, nothing_left, run_async
from waiting import PATIENCE, eventually

from nanovllm import LLM, SamplingParams
from nanovllm.apps.server.async_llm import MOST_FAILED_STEPS, AsyncLLM, merged
from nanovllm.errors import EngineError, RequestError
from nanovllm.outputs import RequestOutput, RequestOutputKind

DELTA = RequestOutputKind.DELTA


@pytest.fixture(scope="module")
def shared(model: str) -> Iterator[AsyncLLM]:
    with AsyncLLM(model, **CACHE) as engine:
        yield engine


@pytest.fixture
def engine(model: str) -> Iterator[AsyncLLM]:
    """An engine that the test may break."""
    with AsyncLLM(model, **CACHE) as engine:
        yield engine


def params(max_tokens: int = 8, **others: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": max_tokens, "ignore_eos": True, "seed": 1, "logprobs": 2, **others})


async def collect(engine: AsyncLLM, prompt: Any, sampling: SamplingParams) -> list[RequestOutput]:
    return [output async for output in engine.generate(prompt, sampling)]


def failing_steps(engine: AsyncLLM, count: int) -> None:
    """The next steps fail."""
    executor = engine.llm.engine.executor
    execute = executor.execute
    left = [count]

    def fail(batch: Any) -> Any:
        left[0] -= 1
        if left[0] >= 0:
            raise RuntimeError("the device is lost")
        return execute(batch)

    executor.execute = fail  # type: ignore[method-assign]


@pytest.mark.parametrize("kind", list(RequestOutputKind), ids=lambda kind: kind.name)
def test_answers_are_those_of_generate_alone_and_together(
    model: str, shared: AsyncLLM, kind: RequestOutputKind
) -> None:
    prompts: list[Any] = ["once upon", [5, 6, 7] * 9, {"prompt": "a", "cache_salt": "s"}, "once upon a time"]
    sampling = params(output_kind=kind)

    async def together() -> list[list[RequestOutput]]:
        return await asyncio.gather(*(collect(shared, prompt, sampling) for prompt in prompts))

    with LLM(model, **CACHE) as llm:
        expected = [output.outputs[0] for output in llm.generate(prompts, params(), use_tqdm=False)]
    alone = [run_async(collect(shared, prompt, sampling)) for prompt in prompts]
    for outputs, again, offline in zip(alone, run_async(together()), expected, strict=True):
        for found in (outputs, again):
            assert [output.finished for output in found] == [False] * (len(found) - 1) + [True]
            whole = found[0]
            for output in found[1:]:
                whole = merged(whole, output) if kind is DELTA else output
            (completion,) = whole.outputs
            assert (completion.text, completion.token_ids) == (offline.text, offline.token_ids)
            assert completion.logprobs == offline.logprobs, "to the bit"
            assert completion.finish_reason == "length"
    assert nothing_left(shared)


def test_the_event_loop_never_waits_for_a_step(engine: AsyncLLM) -> None:
    """Each step takes until the loop has gone round ten times."""
    executor = engine.llm.engine.executor
    rounds = [0]
    execute = executor.execute

    def waiting(batch: Any) -> Any:
        enough = rounds[0] + 10
        assert eventually(lambda: rounds[0] >= enough), "the event loop waits for the step"
        return execute(batch)

    executor.execute = waiting  # type: ignore[method-assign]

    async def go_round() -> list[RequestOutput]:
        answer = asyncio.ensure_future(collect(engine, "a", params(3)))
        while not answer.done():
            await asyncio.sleep(0.001)
            rounds[0] += 1
        return await answer

    assert run_async(go_round())[-1].outputs[0].finish_reason == "length"
    assert rounds[0] >= 30


def test_no_request_waits_for_the_grammar_of_another(shared: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A grammar of a large schema takes seconds to compile. Its client may also go away meanwhile."""
    grammars = shared.llm.engine._inputs.sampling.grammars
    assert grammars is not None
    # type: ignore[attr-defined]
    compiling = threading.Event()
    go_on = threading.Event()
    compiled = grammars._compiled

    def slow(*arguments: Any) -> Any:
        compiling.set()
        assert go_on.wait(PATIENCE)
        return compiled(*arguments)

    monkeypatch.setattr(grammars, "_compiled", slow)
    structured = params(20, ignore_eos=False, stop_token_ids=[298], structured_outputs={"regex": "[ab]{3}"})

    async def ask() -> None:
        waiting, leaving = (asyncio.ensure_future(collect(shared, "a", structured)) for _ in range(2))
        assert await asyncio.to_thread(compiling.wait, PATIENCE)
        assert (await collect(shared, "b", params(3)))[-1].finished and not waiting.done()
        leaving.cancel()
        go_on.set()
        assert len((await waiting)[-1].outputs[0].text) == 3

    run_async(ask())
    assert nothing_left(shared)


def test_abort_ends_a_request_with_what_there_is(shared: AsyncLLM) -> None:
    async def aborted() -> RequestOutput:
        with held_steps(shared):
            stream = await shared.add("abort me", params(900), "r")
            await anext(stream)
            await shared.abort("r")
            await shared.abort("unknown")
        return [output async for output in stream][-1]

    output = run_async(aborted())
    assert output.finished and output.outputs[0].finish_reason == "abort" and output.outputs[0].token_ids


@pytest.mark.parametrize("fails", [False, True], ids=["served", "failed"])
def test_a_call_that_generates_loses_no_output_of_other_requests(engine: AsyncLLM, fails: bool) -> None:
    def generate(llm: LLM) -> list[RequestOutput]:
        if fails:
            failing_steps(engine, 1)  # here, or the step that fails may be one before
        return llm.generate("b", params(60), use_tqdm=False)

    async def beside() -> tuple[list[RequestOutput], list[RequestOutput]]:
        alone = await collect(engine, "a", params(30))
        with held_steps(engine):
            other = await engine.add("a", params(30))
            first = await anext(other)
            if fails:
                with pytest.raises(EngineError, match="the device is lost"):
                    await engine.call(generate)
            else:
                (generated,) = await engine.call(generate)
                assert len(generated.outputs[0].token_ids) == 60
        return alone, [first, *[output async for output in other]]

    alone, found = run_async(beside())
    last = found[-1].outputs[0]
    assert last.finish_reason == ("error" if fails else "length")
    assert fails or last == alone[-1].outputs[0]
    assert nothing_left(engine)


def test_refusals_raise_and_the_engine_goes_on(shared: AsyncLLM) -> None:
    async def refusals() -> None:
        with pytest.raises(RequestError, match="max_model_len"):
            await shared.add([1] * 2000, params())
        with pytest.raises(RequestError, match="token id 5000"):
            await shared.add([5000], params())
        with pytest.raises(RequestError, match="sampling_params must be"):
            await shared.add("a", {"max_tokens": 3})  # type: ignore[arg-type]
        with pytest.raises(RequestError, match="Cannot request more than 20"):
            await shared.add("a", params(logprobs=21))
        with held_steps(shared):
            first = await shared.add("a", params(300), "same")
            with pytest.raises(RequestError, match="in use"):
                await shared.add("b", params(), "same")
            assert not (await anext(first)).finished
            first.close()

    run_async(refusals())
    assert nothing_left(shared)


def test_a_failed_step_ends_its_requests_and_several_in_a_row_the_engine(engine: AsyncLLM) -> None:
    failing_steps(engine, 1)

    async def requests() -> None:
        failed = (await collect(engine, "a", params()))[-1]
        assert failed.outputs[0].finish_reason == "error" and failed.error is not None
        assert (await collect(engine, "a", params()))[-1].outputs[0].finish_reason == "length"
        await engine.check_health()
        failing_steps(engine, 100)
        for _ in range(MOST_FAILED_STEPS):
            assert (await collect(engine, "a", params()))[-1].outputs[0].finish_reason == "error"
        with pytest.raises(EngineError, match="the device is lost"):
            await collect(engine, "a", params())

    run_async(requests())


def test_closing_ends_what_runs_and_refuses_what_comes(model: str) -> None:
    engine = AsyncLLM(model, **CACHE)
    begun = threading.Event()
    go_on = threading.Event()

    def read() -> bool:
        begun.set()
        return go_on.wait(PATIENCE)

    async def pending() -> None:
        reading, waiting = (asyncio.ensure_future(engine.in_text_thread(read)) for _ in range(2))
        assert await asyncio.to_thread(begun.wait, PATIENCE)
        with held_steps(engine):
            running = [asyncio.ensure_future(collect(engine, [1], params(900))) for _ in range(3)]
            assert await asyncio.to_thread(eventually, lambda: len(engine._streams) == 3)
            await asyncio.to_thread(engine.close)
        go_on.set()
        assert await reading
        for result in await asyncio.gather(waiting, *running, return_exceptions=True):
            assert isinstance(result, EngineError) and "closed" in str(result)
        for prompt in ([1], "text"):
            with pytest.raises(EngineError, match="closed"):
                await engine.add(prompt, params())

    run_async(pending())
    engine.close()
