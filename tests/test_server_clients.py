"""Clients that others wrote: the official package, LangChain and schemathesis. Slow."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from server_helpers import NAME, TOOL, listening, run_async

from nanovllm.apps.server.async_llm import AsyncLLM

pytestmark = pytest.mark.slow

HELLO: list[Any] = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def base(engine: AsyncLLM) -> Iterator[str]:
    with listening(engine) as (_, port):
        yield f"http://127.0.0.1:{port}"


MATRIX: list[dict[str, Any]] = [
    {},
    {"n": 3, "seed": 5, "logit_bias": {"65": 50}, "logprobs": True, "top_logprobs": 3},
    {"stop": ["a", "e"], "presence_penalty": 0.5, "temperature": 0.9, "top_p": 0.9, "seed": 5},
    {"tools": [TOOL], "seed": 5, "user": "u", "metadata": {"a": "b"}, "store": False},
    {"extra_body": {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 2}, "seed": 5},
]


@pytest.mark.parametrize("options", MATRIX, ids=lambda options: ",".join(options) or "default")
def test_chat_sync_and_async_streamed_and_not(base: str, options: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {"model": NAME, "messages": HELLO, "max_tokens": 6, **options}

    async def use() -> tuple[Any, str]:
        async with openai.AsyncOpenAI(base_url=f"{base}/v1", api_key="x", max_retries=0) as client:
            whole = await client.chat.completions.create(**arguments)
            chunks = await client.chat.completions.create(**arguments, stream=True)
            parts = [choice async for chunk in chunks for choice in chunk.choices if choice.index == 0]
            return whole, "".join(part.delta.content or "" for part in parts)

    with openai.OpenAI(base_url=f"{base}/v1", api_key="x", max_retries=0) as client:
        whole = client.chat.completions.create(**arguments)
        chunks = client.chat.completions.create(**arguments, stream=True)
        text = "".join(c.delta.content or "" for chunk in chunks for c in chunk.choices if c.index == 0)
    again, streamed = run_async(use())
    assert len(whole.choices) == options.get("n", 1)
    if "seed" in options or options.get("temperature") == 0:
        assert text == streamed == whole.choices[0].message.content == again.choices[0].message.content


def test_langchain(base: str) -> None:
    chat_models = pytest.importorskip("langchain_openai", reason="needs the extra server-test")
    model = chat_models.ChatOpenAI(model=NAME, base_url=f"{base}/v1", api_key="x", temperature=0, max_tokens=6)
    answer = model.invoke([("system", "be kind"), ("user", "hello")])
    assert answer.usage_metadata["output_tokens"] == 6
    assert (
        "".join(chunk.content for chunk in model.stream([("system", "be kind"), ("user", "hello")])) == answer.content
    )
    assert asyncio.run(model.ainvoke("hello")).content == model.batch(["hello"])[0].content
    with_tools = model.bind_tools([TOOL])
    assert with_tools.invoke("hello").response_metadata["finish_reason"] in ("length", "stop")


def test_the_published_schema_holds(base: str) -> None:
    """schemathesis finds no status that the schema does not name, and no 500."""
    schemathesis = pytest.importorskip("schemathesis", reason="needs the extra server-test")
    hypothesis = pytest.importorskip("hypothesis")
    schema = schemathesis.openapi.from_url(f"{base}/openapi.json")
    for found in schema.get_all_operations():
        operation, seen = found.ok(), Counter[int]()
        strategy = operation.as_strategy()

        @hypothesis.given(strategy)
        @hypothesis.settings(max_examples=40, database=None, suppress_health_check=list(hypothesis.HealthCheck))
        def check(case: Any) -> None:
            if isinstance(case.body, dict):
                case.body.pop("model", None)  # which would always be refused
                case.body |= {"max_tokens": 1} if case.path.endswith("completions") else {}
            response = case.call(timeout=60)
            seen[response.status_code] += 1  # noqa: B023  called in this round of the loop
            assert response.status_code < 500, (response.status_code, response.text, json.dumps(case.body)[:2000])

        check()
        print(operation.label, dict(seen))
