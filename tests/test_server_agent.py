"""An agent with tools over HTTP, by the official client: three calls in a row, templates of four families. Slow."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_helpers import make_model
from scripted_model import Script, write_by
from server_helpers import NAME, listening
from tokenizer_files import add_special

from nanovllm.apps.server.async_llm import AsyncLLM
from nanovllm.apps.tool_calls.harmony import MARKS
from nanovllm.text.tokenizer import HuggingFaceTokenizer

pytestmark = pytest.mark.slow
TEMPLATES = Path(__file__).parent / "chat_templates"
STOP = 390  # a token without text
CITIES = ("Oslo", "São Paulo", 'say "Rome"')
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "where"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}


def as_json(city: str) -> str:
    return json.dumps({"city": city, "days": 3}, ensure_ascii=False)


def writes(template: str, city: str) -> tuple[str, str]:
    """What the model writes before a call, and the call."""
    if template == "qwen3_5":
        lines = f"<parameter=city>\n{city}\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        return "So.\n</think>\n\n", f"<tool_call>\n<function=weather>\n{lines}</function>\n</tool_call>"
    if template == "glm4_5":
        values = (("city", city), ("days", 3))
        keys = "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in values)
        return "\n<think>So.</think>\n", f"<tool_call>weather\n{keys}</tool_call>"
    if template == "llama3_2":
        return "", f'{{"name": "weather", "parameters": {as_json(city)}}}'
    thought = "<|channel|>analysis<|message|>So.<|end|><|start|>assistant"
    return thought, f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{as_json(city)}"


def shown(template: str, city: str) -> str:
    """The call as the template writes it into the next prompt."""
    if template == "gpt_oss":
        return f"assistant to=functions.weather<|channel|>commentary json<|message|>{as_json(city)}<|call|>"
    return writes(template, city)[1]


def result_shown(template: str, result: str) -> str:
    quoted = json.dumps(result, ensure_ascii=False)
    return {
        "qwen3_5": f"<tool_response>\n{result}\n</tool_response>",
        "glm4_5": f"<|observation|>\n<tool_response>\n{result}\n</tool_response>",
        "llama3_2": f"<|start_header_id|>ipython<|end_header_id|>\n\n{quoted}<|eot_id|>",
        "gpt_oss": f"functions.weather to=assistant<|channel|>commentary<|message|>{quoted}<|end|>",
    }[template]


@pytest.fixture(scope="module")
def agent_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncLLM]:
    """An engine whose tokenizer has the marks of calls as special tokens."""
    path = tmp_path_factory.mktemp("agent")
    make_model(path, vocab=400, max_positions=4096)
    add_special(path, *(mark for mark in MARKS if mark != "<|end|>"), "<tool_call>", "</tool_call>", "<|eot_id|>")
    with AsyncLLM(str(path), device="cpu", kvcache_block_size=64, num_gpu_blocks=80) as engine:
        yield engine


def answer_of(client: Any, streams: bool, **body: Any) -> tuple[dict[str, Any], str, list[int]]:
    """The assistant's message, why it ended, and the prompt's tokens."""
    if not streams:
        answer = client.chat.completions.create(**body)
        (choice,) = answer.choices
        return choice.message.model_dump(exclude_none=True), choice.finish_reason, answer.prompt_token_ids
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    reason = ""
    prompt = []
    for chunk in client.chat.completions.create(stream=True, **body):
        prompt = getattr(chunk, "prompt_token_ids", None) or prompt
        for choice in chunk.choices:
            message["content"] += choice.delta.content or ""
            if thought := getattr(choice.delta, "reasoning", None):
                message["reasoning"] = message.get("reasoning", "") + thought
            for call in choice.delta.tool_calls or ():
                calls = message.setdefault("tool_calls", [])
                if call.id is not None:
                    calls.append(
                        {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": ""}}
                    )
                calls[call.index]["function"]["arguments"] += call.function.arguments
            reason = choice.finish_reason or reason
    return message, reason, prompt


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("template", ["qwen3_5", "glm4_5", "llama3_2", "gpt_oss"])
def test_three_calls_in_a_row(
    template: str, streams: bool, agent_engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    openai = pytest.importorskip("openai", reason="needs the extra server-test")
    tokenizer = agent_engine.llm.engine.tokenizer
    assert isinstance(tokenizer, HuggingFaceTokenizer)
    script = Script(tokenizer, STOP)
    text = (TEMPLATES / f"{template}.jinja").read_text()
    write_by(script, monkeypatch)
    messages: list[dict[str, Any]] = [{"role": "user", "content": "How is the weather?"}]
    extra = {"stop_token_ids": [STOP], "ignore_eos": True, "return_token_ids": True}
    body = {"model": NAME, "tools": [TOOL], "max_tokens": 600, "extra_body": extra}
    with listening(agent_engine, chat_template=text) as (_, port):
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="x", max_retries=0)
        for city in CITIES:
            before, call = writes(template, city)
            script.text = before + call
            message, reason, _ = answer_of(client, streams, messages=messages, **body)
            (made,) = message["tool_calls"]
            assert reason == "tool_calls" and made["function"]["name"] == "weather"
            assert json.loads(made["function"]["arguments"]) == {"city": city, "days": 3}
            if template == "gpt_oss":
                assert message["reasoning"] == "So." and not message.get("content")
            else:
                assert (message.get("content") or "") == before
            messages += [message, {"role": "tool", "tool_call_id": made["id"], "content": f"rain in {city}"}]
        script.text = {"qwen3_5": "So.\n</think>\n\nRain.", "gpt_oss": "<|channel|>final<|message|>Rain."}.get(
            template, "Rain."
        )
        message, reason, prompt_ids = answer_of(client, streams, messages=messages, **body)
        assert reason == "stop" and message["content"].endswith("Rain.") and "tool_calls" not in message
        assert "<|" not in message["content"]
    prompt = tokenizer.decode(prompt_ids, skip_special_tokens=False)
    place = 0
    for city in CITIES:  # the prompt has all calls and results in order, as the template writes them
        for part in (shown(template, city), result_shown(template, f"rain in {city}")):
            place = prompt.find(part, place)
            assert place >= 0, (part, prompt)
