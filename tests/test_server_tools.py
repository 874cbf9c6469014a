"""Tool calls through the server: the format that a template writes, messages, deltas, and forced calls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cli_helpers import make_model
from server_helpers import CACHE, TOOL, ask, events
from tokenizer_files import CHAT_TEMPLATE, add_special, write_byte_level
from tool_call_texts import CALLS, CITY

from nanovllm.apps.server.async_llm import AsyncLLM
from nanovllm.apps.server.chat import Messages
from nanovllm.apps.server.protocol import ChatRequest
from nanovllm.apps.tool_calls.reading import Formats, Reading
from nanovllm.outputs import CompletionOutput, RequestMetrics, RequestOutput
from nanovllm.text.tokenizer import HuggingFaceTokenizer

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
PARIS = '{"name": "weather", "arguments": {"city": "Paris"}}'
CALL = f"<tool_call>{PARIS}</tool_call>"
NAMED = {"type": "function", "function": {"name": "weather"}}
FORECAST = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
}
TEMPLATES = Path(__file__).parent / "chat_templates"
WRITTEN = {
    **{"qwen3_5": "qwen3_xml", "nemotron3": "qwen3_xml", "qwen3": "hermes", "glm4_5": "glm45", "gpt_oss": "openai"},
    **{"llama3_2": "llama3_json", "llama4_pythonic": "pythonic", "mistral_small": "mistral", "gemma4": "gemma4"},
    **{"mistral_args": "mistral", "seed_oss": "seed_oss", "minimax_m2": "minimax_m2", "olmo3": "olmo3"},
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HuggingFaceTokenizer:
    """A tokenizer without a template of its own."""
    path = tmp_path_factory.mktemp("tokenizer")
    write_byte_level(path)
    return HuggingFaceTokenizer(path, "llama")


# ---- the format


@pytest.mark.parametrize("name", WRITTEN)
def test_the_format_is_what_the_template_writes(name: str, tokenizer: HuggingFaceTokenizer) -> None:
    shown = Formats(tokenizer).shown((TEMPLATES / f"{name}.jinja").read_text())
    assert shown == (True, WRITTEN[name])


@pytest.mark.parametrize(
    ("template", "shown"),
    [
        ("{{ messages[0].content }}", (False, None)),
        ("{{ tools }} answer with <tool_call>", (True, None)),  # a word is no format
        ("{{ tools }} Environment: ipython, <|python_tag|>", (True, None)),
        ("{{ tools }}{% for m in messages if m.tool_calls %}{{ m.tool_calls[0].function }}{% endfor %}", (True, None)),
        (
            "{{ tools }}{% for m in messages if m.tool_calls %}<tool_call>{{ m.tool_calls[0].function | tojson }}"
            "{% endfor %}",
            (True, "hermes"),
        ),
        (  # an answer that begins with <think> or a call, as QwQ's
            "{{ tools }}{% for m in messages if m.tool_calls %}A:<tool_call>{{ m.tool_calls[0].function | tojson }}"
            "{% endfor %}{% if add_generation_prompt %}A:<think>{% endif %}",
            (True, "hermes"),
        ),
        ("{{ tools }}{{ raise_exception('never') }}", (False, None)),
        ("{{ no jinja", (False, None)),
    ],
)
def test_a_template_without_a_known_format(template: str, shown: Any, tokenizer: HuggingFaceTokenizer) -> None:
    assert Formats(tokenizer).shown(template) == shown


def test_a_template_is_looked_at_once(tokenizer: HuggingFaceTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    formats = Formats(tokenizer)
    first = formats.shown("{{ tools }}")
    monkeypatch.setattr("nanovllm.apps.tool_calls.reading.shown_by", None)
    assert formats.shown("{{ tools }}") is first


# ---- messages


def output(text: str, finish: str | None, index: int = 0) -> RequestOutput:
    completion = CompletionOutput(index, text, [1] * len(text), finish_reason=finish)
    return RequestOutput("r", None, [1], [completion], finish is not None, RequestMetrics(0.0))


def request(**more: Any) -> ChatRequest:
    return ChatRequest.model_validate({"messages": HELLO, "tools": [TOOL], **more})


def reading(body: ChatRequest, form: str = "hermes") -> Reading:
    return Formats(None).reading(form, body.tools or (), body.tool_choice, body.parallel_tool_calls)


def message(text: str, finish: str = "stop", form: str = "hermes", **more: Any) -> dict[str, Any]:
    body = request(**more)
    (choice,) = Messages(body, reading(body, form)).complete([output(text, finish)])["choices"]
    return dict(choice)


def deltas(text: str, finish: str = "stop", form: str = "hermes", **more: Any) -> list[dict[str, Any]]:
    """The choices of the chunks, of a text that comes letter by letter."""
    body = request(stream=True, **more)
    messages = Messages(body, reading(body, form))
    parts = [(letter, None) for letter in text[:-1]] + [(text[-1], finish)]
    return [choice for part in parts for chunk in messages.chunks(0, output(*part)) for choice in chunk["choices"]]


def joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client makes of the deltas."""
    whole: dict[str, Any] = {"content": "", "reasoning": "", "tool_calls": []}
    for part in parts:
        for name in ("content", "reasoning"):
            whole[name] += part["delta"].get(name, "")
        for call in part["delta"].get("tool_calls", ()):
            if call["index"] == len(whole["tool_calls"]):
                assert call["id"] and call["type"] == "function" and call["function"]["arguments"] == ""
                whole["tool_calls"].append(dict(call["function"]))
            else:
                assert set(call) == {"index", "function"} and set(call["function"]) == {"arguments"}
                whole["tool_calls"][call["index"]]["arguments"] += call["function"]["arguments"]
    return whole


def test_calls_in_a_message() -> None:
    choice = message(f"{CALL}\n{CALL}")
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    first, second = choice["message"]["tool_calls"]
    assert first["id"] != second["id"] and first["type"] == "function" and "index" not in first
    assert json.loads(first["function"]["arguments"]) == {"city": "Paris"}
    assert len(message(f"{CALL}{CALL}", parallel_tool_calls=False)["message"]["tool_calls"]) == 1
    assert message(f"<tool_call>{PARIS}", "length")["finish_reason"] == "length"
    plain = message("no call")
    assert plain["finish_reason"] == "stop" and "tool_calls" not in plain["message"]
    assert "tool_calls" not in message(CALL, tool_choice="none")["message"]
    named = message('{"city": "Rome"}', tool_choice=NAMED)
    assert named["finish_reason"] == "stop" and named["message"]["tool_calls"][0]["function"]["name"] == "weather"
    forced = message('[{"name": "weather", "parameters": {"city": "Rome"}}]', tool_choice="required")
    assert forced["finish_reason"] == "tool_calls" and len(forced["message"]["tool_calls"]) == 1
    (call,) = message(f"[TOOL_CALLS]weather[ARGS]{CITY}", form="mistral")["message"]["tool_calls"]
    assert len(call["id"]) == 9 and call["id"].isalnum(), "templates of Mistral take no other identifiers"


@pytest.mark.parametrize("answer", ['{"name": "Ada", "age": 36}', '{"name": "weather", "city": "Paris"}', "[1, 2]"])
def test_an_answer_in_json_is_content(answer: str) -> None:
    """Also one that `response_format` forces while there are tools."""
    for form in ("llama3_json", "pythonic", "hermes", "openai"):
        whole = message(answer, form=form)
        assert whole["message"] == {"role": "assistant", "content": answer, "refusal": None}
        assert whole["finish_reason"] == "stop" and joined(deltas(answer, form=form))["content"] == answer


@pytest.mark.parametrize("form", CALLS)
def test_calls_in_deltas(form: str) -> None:
    parts = deltas(CALLS[form], form=form, tools=[FORECAST])
    assert parts[0]["delta"] == {"role": "assistant", "content": ""} and parts[-1]["finish_reason"] == "tool_calls"
    (call,) = joined(parts)["tool_calls"]
    (same,) = message(CALLS[form], form=form, tools=[FORECAST])["message"]["tool_calls"]
    assert call == same["function"] and json.loads(call["arguments"]) == json.loads(CITY)
    # Arguments come while they are written, letter by letter where the format allows.
    at_once = sum("tool_calls" in part["delta"] for part in parts)
    assert at_once > (15 if form in ("hermes", "llama3_json", "mistral", "openai") else 2)


def test_other_deltas() -> None:
    two = deltas(f"See: {CALL}{CALL}")
    assert joined(two)["content"] == "See: " and len(joined(two)["tool_calls"]) == 2
    assert len(joined(deltas(f"{CALL}{CALL}", parallel_tool_calls=False))["tool_calls"]) == 1
    # A call that breaks off is not closed: nobody runs a command that was cut. The rest of the text is content.
    broken = deltas('<tool_call>{"name": "weather", "arguments": {"city": Paris}} or so')
    assert broken[-1]["finish_reason"] == "stop" and joined(broken)["content"] == "} or so"
    assert joined(broken)["tool_calls"][0]["arguments"] == '{"city": Paris}'
    text = '<tool_call>{"name": "weather", "arguments": {"city": "Par'
    assert message(text, "length")["message"]["content"] == text
    cut = deltas(text, "length")
    assert cut[-1]["finish_reason"] == "length" and joined(cut)["tool_calls"][0]["arguments"] == '{"city": "Par'
    named = deltas('{"city": "Rome"}', tool_choice=NAMED)
    assert named[-1]["finish_reason"] == "stop" and len(named) > 10
    assert joined(named)["tool_calls"] == [{"name": "weather", "arguments": '{"city": "Rome"}'}]
    thought = deltas(
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Hi", form="openai"
    )
    assert joined(thought) == {"content": "Hi", "reasoning": "hm", "tool_calls": []}


# ---- special tokens


def test_marks_that_are_special_tokens(tmp_path: Path) -> None:
    """The parser needs them, and the client sees no others."""
    write_byte_level(tmp_path)
    add_special(tmp_path, "<tool_call>", "</tool_call>", "<|im_end|>", "<|python_tag|>")
    tokenizer = HuggingFaceTokenizer(tmp_path, "llama")
    formats = Formats(tokenizer)
    tools = request().tools or []
    assert formats.reading("hermes", tools).shows_special and not formats.reading("qwen3_xml", []).shows_special
    assert not formats.reading("hermes", tools, "none").shows_special
    assert not formats.reading("hermes", tools, skips_special=False).shows_special  # the request shows them all
    assert not formats.reading("seed_oss", tools).shows_special, "none of its marks is a special token"
    text = f"a<|im_end|>b<|python_tag|>{CALL}<|im_end|>"
    for size in (1, 3, 100):
        parser = formats.reading("hermes", tools).parser()
        pieces = [piece for i in range(0, len(text), size) for piece in parser.feed(text[i : i + size])]
        pieces += parser.finish()
        content = "".join(piece for piece in pieces if isinstance(piece, str))
        assert content == "ab" and any(not isinstance(piece, str) for piece in pieces)


# ---- through the server


def test_the_template_shows_tools_calls_and_results(engine: AsyncLLM) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    messages = [
        *HELLO,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "rain"},
    ]
    tokens = ask(engine, "/tokenize", {"messages": messages, "tools": [TOOL]}).json()["tokens"]
    shown = ask(engine, "/detokenize", {"tokens": tokens}).json()["prompt"]
    assert "<tool>weather" in shown and "weather(Oslo)" in shown and "<tool>rain<assistant>" in shown
    call["function"]["arguments"] = "not json"  # type: ignore[index]
    refused = ask(engine, CHAT, {"messages": messages, "tools": [TOOL]}, tool_call_parser="hermes").json()["error"]
    assert refused["param"] == "messages.1.tool_calls.0.function.arguments" and "JSON object" in refused["message"]


def test_a_request_with_tools_is_answered(engine: AsyncLLM) -> None:
    body = {"messages": HELLO, "tools": [TOOL], "max_tokens": 4, "ignore_eos": True}
    hermes = {"tool_call_parser": "hermes"}
    assert ask(engine, CHAT, body, **hermes).json()["choices"][0]["finish_reason"] == "length"
    assert events(ask(engine, CHAT, {**body, "stream": True}, **hermes).text)[-1] == "[DONE]"
    wanted = {**body, "return_token_ids": True}
    answers = [ask(engine, CHAT, {**wanted, "tool_choice": choice}, **hermes).json() for choice in ("none", "auto")]
    prompts = [answer["prompt_token_ids"] for answer in answers]
    assert prompts[0] == prompts[1], "a request that may not call finds the others' prompts in the prefix cache"
    unknown = {"type": "function", "function": {"name": "other"}}
    assert "not in tools" in ask(engine, CHAT, {**body, "tool_choice": unknown}).json()["error"]["message"]


@pytest.mark.parametrize("leaves_out", [(), ("type",), ("type", "properties", "required", "$defs")])
def test_a_forced_tool_is_called(leaves_out: tuple[str, ...], engine: AsyncLLM) -> None:
    """With an object, whatever its schema leaves out. The schema may refer to parts of itself."""
    schema = {"type": "object", "properties": {"x": {"$ref": "#/$defs/few"}}, "$defs": {"few": {"enum": [1, 2]}}}
    schema |= {"required": ["x"], "additionalProperties": False}
    schema = {name: value for name, value in schema.items() if name not in leaves_out}
    tool = {"type": "function", "function": {"name": "pick", "parameters": schema}}
    body = {"messages": HELLO, "tools": [tool], "max_tokens": 200, "seed": 3, "stop_token_ids": [298]}
    body["logit_bias"] = {str(space): -100 for space in b" \t\r\n"}  # random weights may write spaces for ever
    named = {"type": "function", "function": {"name": "pick"}}
    for choice, reason in (("required", "tool_calls"), (named, "stop")):
        (answer,) = ask(engine, CHAT, {**body, "tool_choice": choice, "parallel_tool_calls": False}).json()["choices"]
        assert answer["finish_reason"] == reason and answer["message"]["content"] in (None, "")
        (call,) = answer["message"]["tool_calls"]
        arguments = json.loads(call["function"]["arguments"])
        assert call["function"]["name"] == "pick" and isinstance(arguments, dict)
        assert len(leaves_out) > 1 or arguments["x"] in (1, 2)


@pytest.mark.parametrize("kind", ["array", "string", ["array", "null"], None])
def test_arguments_that_are_no_object_are_refused(kind: Any, engine: AsyncLLM) -> None:
    tool = {"type": "function", "function": {"name": "pick", "parameters": {"type": kind}}}
    refused = ask(engine, CHAT, {"messages": HELLO, "tools": [tool], "tool_choice": "required"}).json()["error"]
    assert refused["param"] == "tools" and "JSON object" in refused["message"]


def test_tools_that_the_model_would_not_see_are_refused(tmp_path: Any) -> None:
    with AsyncLLM(make_model(tmp_path, template=CHAT_TEMPLATE), **CACHE) as engine:
        body = {"messages": HELLO, "tools": [TOOL], "max_tokens": 2}
        hidden = ask(engine, CHAT, body).json()["error"]
        assert hidden["param"] == "tools" and "does not show tools" in hidden["message"]
        assert "--chat-template" in hidden["message"]
        template = "{{ tools }}" + CHAT_TEMPLATE
        unknown = ask(engine, CHAT, body, chat_template=template).json()["error"]["message"]
        assert "--tool-call-parser" in unknown and "hermes" in unknown and "glm45" in unknown
        assert ask(engine, CHAT, body, chat_template=template, tool_call_parser="none").status_code == 200
        untrusted = ask(engine, CHAT, {**body, "chat_template": template, "tool_choice": "none"}).json()["error"]
        assert untrusted["param"] == "chat_template"
