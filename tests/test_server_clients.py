"""Clients that others wrote: the official package, LangChain, schemathesis, inspect-ai and guidellm. Slow."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from server_helpers import CHAT, COMPLETIONS, NAME, TOOL, in_engine, listening, run_async

from nanovllm import LLM, RequestOutput, SamplingParams
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


# ---- harnesses, each in a process of its own, since they set up logging and event loops as it suits them

INSPECT = """
import json, sys
from typing import Literal
from inspect_ai import Task, eval
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.model import GenerateConfig, ResponseSchema, get_model
from inspect_ai.scorer import choice, includes
from inspect_ai.solver import generate, multiple_choice, system_message, use_tools
from inspect_ai.tool import tool
from inspect_ai.util import JSONSchema

base, folder, no_spaces = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
questions = [Sample(input=f"question {i}", target="a") for i in range(4)]
choices = [Sample(input=f"question {i}", choices=["x", "y"], target="A") for i in range(4)]
schema = JSONSchema(type="object", properties={"sky": JSONSchema(enum=["blue", "red"])}, required=["sky"])
ends = {"logit_bias": no_spaces, "extra_body": {"stop_token_ids": [1]}, "max_tokens": 60}
everything = {"temperature": 0.7, "top_p": 0.9, "seed": 3, "num_choices": 2, "frequency_penalty": 0.1}
everything |= {"presence_penalty": 0.1, "stop_seqs": ["zz"], "logprobs": True, "top_logprobs": 2, "prompt_logprobs": 1}

@tool
def weather():
    async def execute(city: Literal["Rome", "Oslo"]) -> str:
        '''The weather of a city.

        Args:
            city: Its name.
        '''
        return "sunny"
    return execute

def ask(solver, samples=questions, scorer=None, stream=None, **config):
    model = get_model("openai-api/local/tiny", base_url=base, api_key="x", stream=stream, memoize=False)
    config = GenerateConfig(**{"max_tokens": 12, "temperature": 0.0, "max_retries": 0, **config})
    task = Task(MemoryDataset(samples), solver=solver, scorer=scorer or includes(), config=config)
    (log,) = eval(task, model=model, display="none", log_dir=folder, fail_on_error=True)
    assert log.status == "success" and log.results.completed_samples == len(samples), log.error
    return log.samples

def texts(samples):
    return [sample.output.completion for sample in samples]

called = ask([use_tools(weather(), tool_choice="any"), generate(tool_calls="single")], **ends)
found = {
    "whole": texts(ask([system_message("be kind"), generate()])),
    "stream": texts(ask([system_message("be kind"), generate()], stream=True)),
    "tokens": [sample.output.usage.output_tokens for sample in ask(generate())],
    "everything": [len(sample.output.choices) for sample in ask(generate(), **everything)],
    "choice": [sample.score.value for sample in ask(multiple_choice(), choices, choice())],
    "schema": texts(ask(generate(), response_schema=ResponseSchema(name="s", json_schema=schema, strict=True), **ends)),
    "roles": [[message.role for message in sample.messages] for sample in called],
    "too long": ask(generate(), [Sample(input="x" * 3000, target="a")])[0].output.stop_reason,
}
print("\\n" + json.dumps(found))
"""


def finished(command: list[str], folder: Path) -> str:
    """What a process prints that finds no hub."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
    return done.stdout


def test_inspect_ai(engine: AsyncLLM, base: str, tmp_path: Path) -> None:
    """Its tasks with the provider for compatible servers: generation, choices, JSON, tools, and a prompt too long."""
    if importlib.util.find_spec("inspect_ai") is None:
        pytest.skip("needs the extra server-test")
    spaces = {str(token): -100 for text in "\t\n\r " for token in engine.llm.get_tokenizer().encode(text)}
    script = tmp_path / "tasks.py"
    script.write_text(INSPECT)
    command = [sys.executable, str(script), f"{base}/v1", str(tmp_path / "logs"), json.dumps(spaces)]
    found = json.loads(finished(command, tmp_path).splitlines()[-1])
    questions = [f"question {i}" for i in range(4)]
    prompts: list[Any] = [[{"role": "system", "content": "be kind"}, {"role": "user", "content": q}] for q in questions]
    params = SamplingParams(temperature=0.0, max_tokens=12)
    alone = in_engine(engine, lambda llm: llm.chat(prompts, params, use_tqdm=False))
    assert found["whole"] == found["stream"] == [output.outputs[0].text for output in alone]
    assert len(set(found["whole"])) > 1 and found["tokens"] == [12] * 4 and found["everything"] == [2] * 4
    assert set(found["choice"]) <= {"C", "I"}
    assert all(json.loads(text)["sky"] in ("blue", "red") for text in found["schema"])
    assert all(roles[:3] == ["user", "assistant", "tool"] for roles in found["roles"]), found["roles"]
    assert found["too long"] == "model_length"


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_guidellm(engine: AsyncLLM, base: str, tmp_path: Path, path: str) -> None:
    """Its synthetic prompts, with the tokenizer of the model's directory: every answer is that of the engine alone."""
    if importlib.util.find_spec("guidellm") is None:
        pytest.skip("needs the extra server-test")
    backend = {"kind": "openai_http", "target": base, "model": NAME, "request_format": path}
    report = tmp_path / "report.json"
    options = {
        "backend": json.dumps({**backend, "extras": {"body": {"temperature": 0.0}}}),
        "profile": "kind=concurrent,streams=3",
        "constraint": "kind=max_requests,count=6",
        "tokenizer": f"kind=huggingface_auto,model={engine.llm.engine.config.model}",
        "data": "kind=synthetic_text,prompt_tokens=50,output_tokens=8",
        "output": f"kind=json,path={report}",
    }
    flags = [part for name, value in options.items() for part in (f"--{name}", value)]
    finished([sys.executable, "-m", "guidellm", "run", "--disable-console", *flags], tmp_path)
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    answers = benchmark["requests"]["successful"]
    assert len(answers) == 6 and not benchmark["requests"]["errored"]
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    for found in answers:
        body = json.loads(found["request_args"])["body"]
        prompt = body["messages"] if path == CHAT else body["prompt"]
        (output,) = in_engine(engine, lambda llm, prompt=prompt: answered(llm, prompt, params))  # type: ignore[misc]
        assert found["output"] == output.outputs[0].text
        assert (found["prompt_tokens"], found["output_tokens"]) == (len(output.prompt_token_ids), 8)


def answered(llm: LLM, prompt: Any, params: SamplingParams) -> list[RequestOutput]:
    """The engine's own answer to a prompt or a conversation."""
    return (llm.generate if isinstance(prompt, str) else llm.chat)(prompt, params, use_tqdm=False)
