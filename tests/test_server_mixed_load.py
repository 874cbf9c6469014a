"""A hundred mixed requests at once through HTTP, under offload: each is answered as if it were alone. Slow."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest
from cli_helpers import make_model
from server_helpers import CHAT, COMPLETIONS, ask, in_engine, listening, nothing_left, run_async

from nanovllm.apps.server.async_llm import AsyncLLM

pytestmark = pytest.mark.slow

# The device holds 6 of the up to 40 blocks of a request; both tiers hold far fewer than all requests need at once.
OFFLOADED = {
    "device": "cpu",
    "enable_cpu_offload": True,
    "kvcache_block_size": 16,
    "num_gpu_blocks": 6,
    "num_cpu_blocks": 80,
    "max_num_batched_tokens": 256,
}
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "seed": 6},
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"temperature": 1.2, "min_p": 0.05, "presence_penalty": 0.7, "frequency_penalty": -0.4, "seed": 7, "n": 2},
]
ENDS: list[dict[str, Any]] = [
    {},
    {"ignore_eos": True},
    {"stop": ["a", "e", "u"]},
    {"stop": "D", "include_stop_str_in_output": True, "min_tokens": 3},
]
CLIENTS = ("whole", "stream", "whole", "stream", "leaves at the first part")
GONE = "leaves before"
Request = tuple[str, str, dict[str, Any]]


def requests() -> list[Request]:
    """All pairs of SAMPLING, ENDS and CLIENTS: the client, the path, and the body without `stream`."""
    random, made = Random(32), []
    letters = "abcdefgh "
    document = "".join(random.choice(letters) for _ in range(300))  # of which some prompts share a part
    for i, (sampling, end, client) in enumerate(product(SAMPLING, ENDS, CLIENTS)):
        length = random.choice((1, 15, 16, 17, 60, 200, 380))
        text = document[:length] if i % 3 == 0 else "".join(random.choice(letters) for _ in range(length))
        body = {"max_tokens": random.choice((1, 8, 60)), **sampling, **end}
        body["max_tokens"] = max(body["max_tokens"], body.get("min_tokens", 0))
        if is_chat := random.random() < 0.5:
            body["messages"] = [{"role": "system", "content": "be kind"}, {"role": "user", "content": text}]
        else:
            body["prompt"] = [text, "ab"] if i % 7 == 0 else text
        if random.random() < 0.5:
            body |= {"logprobs": True, "top_logprobs": 3} if is_chat else {"logprobs": 2}
        if client.startswith("leaves"):
            body["max_tokens"] = 200
            client = client if i % 2 else GONE
        made.append((client, CHAT if is_chat else COMPLETIONS, body))
    return made


def told(answers: list[dict[str, Any]]) -> tuple[Any, ...]:
    """What one answer, or the parts of a streamed one, say: the choices by their index, and the number of tokens."""
    choices: dict[int, dict[str, Any]] = {}
    counts = None
    for answer in answers:
        for choice in answer["choices"]:
            said = choices.setdefault(choice["index"], {"text": "", "reason": None, "logprobs": {}})
            said["text"] += choice["text"] if "text" in choice else _message(choice).get("content") or ""
            said["reason"] = choice["finish_reason"] or said["reason"]
            for name, values in (choice.get("logprobs") or {}).items():
                said["logprobs"].setdefault(name, []).extend(values or [])
        if (usage := answer.get("usage")) is not None:
            counts = usage["prompt_tokens"], usage["completion_tokens"]
    return dict(sorted(choices.items())), counts


def _message(choice: dict[str, Any]) -> dict[str, Any]:
    return choice.get("delta") or choice.get("message") or {}


async def parts(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """The values of a streamed answer, which has to end with [DONE]."""
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    async with client.stream("POST", path, json=streamed) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                return
            if line:
                yield json.loads(line.removeprefix("data: "))
    raise AssertionError("a stream ended without [DONE]")


async def answer(client: httpx.AsyncClient, request: Request) -> list[dict[str, Any]]:
    """The answer, or its parts, as far as this client reads them."""
    kind, path, body = request
    if kind in ("whole", GONE):
        response = await client.post(path, json=body)
        assert response.status_code == 200, response.text
        return [response.json()]
    read = []
    async for part in (stream := parts(client, path, body)):
        read.append(part)
        if kind != "stream" and _text(part):
            await stream.aclose()  # type: ignore[attr-defined]
            break
    return read


def _text(part: dict[str, Any]) -> str:
    return "".join(choice.get("text") or _message(choice).get("content") or "" for choice in part["choices"])


@asynccontextmanager
async def begun_together(engine: AsyncLLM, count: int) -> AsyncIterator[None]:
    """Requests that are sent in this context begin in one step: the engine waits until it has `count` of them."""
    may_go_on = threading.Event()
    held = asyncio.ensure_future(engine.call(lambda _: may_go_on.wait()))
    try:
        yield
        while engine._commands.qsize() < count:
            await asyncio.sleep(0.01)
    finally:
        may_go_on.set()
    await held


def test_a_hundred_requests_at_once_have_the_answers_of_each_alone(tmp_path: Path) -> None:
    model, asked = make_model(tmp_path / "model"), requests()
    assert len(asked) == 100 and {client for client, *_ in asked} == {*CLIENTS, GONE}

    async def load(engine: AsyncLLM, port: int) -> list[list[dict[str, Any]]]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=600, limits=limits) as client:
            async with begun_together(engine, len(asked)):
                jobs = [asyncio.ensure_future(answer(client, request)) for request in asked]
            for job, (kind, *_) in zip(jobs, asked, strict=True):
                if kind == GONE:
                    job.cancel()
            found = await asyncio.gather(*jobs, return_exceptions=True)
        cancelled = [isinstance(each, asyncio.CancelledError) for each in found]
        assert cancelled == [kind == GONE for kind, *_ in asked], found
        return [[] if isinstance(each, asyncio.CancelledError) else each for each in found]  # type: ignore[misc]

    with AsyncLLM(model, **OFFLOADED) as engine, listening(engine) as (_, port):
        found = run_async(load(engine, port), 600)
        assert nothing_left(engine), "also of those that left"
        metrics = in_engine(engine, lambda llm: llm.metrics())
    assert metrics.preemptions_by_recompute > 0 and metrics.prefix_cache_hit_tokens > 0
    for (kind, path, body), read in zip(asked, found, strict=True):
        if kind == GONE:
            continue
        with AsyncLLM(model, **OFFLOADED) as alone:
            response = ask(alone, path, body)
        assert response.status_code == 200, response.text
        (expected, counts), (choices, num_tokens) = told([response.json()]), told(read)
        if kind in ("whole", "stream"):
            assert (choices, num_tokens) == (expected, counts), (kind, path, body)
        else:
            for index, said in choices.items():
                assert expected[index]["text"].startswith(said["text"]), (path, body)
