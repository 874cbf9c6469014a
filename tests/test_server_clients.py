"""Clients that others wrote: the official package, LangChain and schemathesis. Slow."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from server_helpers import NAME, TOOL, listening

from nanovllm.apps.server.async_llm import AsyncLLM

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def base(engine: AsyncLLM) -> Iterator[str]:
    with listening(engine) as (_, port):
        yield f"http://127.0.0.1:{port}"


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
        operation = found.ok()
        seen = Counter[int]()
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
