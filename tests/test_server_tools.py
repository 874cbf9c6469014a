"""Tool calls: read from text in any pieces, shown to the template, in OpenAI's shape."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from cli_helpers import make_model
from hypothesis import example, given
from hypothesis import strategies as st
from server_helpers import CACHE, TOOL, ask, events
from tokenizer_files import CHAT_TEMPLATE

from nanovllm.apps.server.async_llm import AsyncLLM
from nanovllm.apps.server.chat import Messages
from nanovllm.apps.server.protocol import ChatRequest
from nanovllm.apps.server.tool_calls import Call, Forced, Hermes, Llama3Json, Parser, Piece, detect_format
from nanovllm.outputs import CompletionOutput, RequestMetrics, RequestOutput

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
PARIS = '{"name": "weather", "arguments": {"city": "Paris"}}'
CALL = Call("weather", '{"city": "Paris"}')

HERMES: list[tuple[str, list[Piece]]] = [
    ("", []),
    ("plain <b>text</b>", ["plain <b>text</b>"]),
    (
        f"Let me see.\n<tool_call>\n{PARIS}\n</tool_call>\n<tool_call>{PARIS}</tool_call>\n",
        ["Let me see.\n", CALL, CALL],
    ),
    (f"<tool_call>{PARIS}", [CALL]),
    (f"<tool_call>{PARIS}</tool_call> after", [CALL, " after"]),
    ("<tool_call>not json</tool_call>x", ["<tool_call>not json</tool_call>", "x"]),
    ('<tool_call>{"name": "weather", "argu', ['<tool_call>{"name": "weather", "argu']),
    ('<tool_call>{"name": "now"}</tool_call>', [Call("now", "{}")]),
    ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', [Call("f", '{"a": 1}')]),
    ("a < b <tool", ["a < b <tool"]),
    # Half of a surrogate pair, which no answer in UTF-8 can hold, stays the escape that it was.
    (
        '<tool_call>{"name": "\\ud800", "arguments": {"a": "\\udc00é"}}</tool_call>',
        [Call("\\ud800", '{"a": "\\udc00é"}')],
    ),
]
LLAMA: list[tuple[str, list[Piece]]] = [
    ("plain", ["plain"]),
    ('{"name": "weather", "parameters": {"city": "Paris"}}', [CALL]),
    (f'<|python_tag|>{PARIS}; {{"name": "now", "parameters": {{}}}}', [CALL, Call("now", "{}")]),
    (f"<|python_tag|>\n{PARIS}", [CALL]),
    ('{"a": 1}', ['{"a": 1}']),
    (f"{PARIS} and more", [f"{PARIS} and more"]),
    ("<|python", ["<|python"]),
]
CASES: list[tuple[Callable[[], Parser], str, list[Piece]]] = [
    *((Hermes, text, pieces) for text, pieces in HERMES),
    *((Llama3Json, text, pieces) for text, pieces in LLAMA),
    (Forced, '[{"name": "weather", "parameters": {"city": "Paris"}}]', [CALL]),
    (Forced, "[3]", ["[3]"]),
]


def joined(pieces: list[Piece]) -> list[Piece]:
    """Neighbouring texts as one."""
    whole: list[Piece] = []
    for piece in pieces:
        if isinstance(piece, str) and whole and isinstance(whole[-1], str):
            whole[-1] += piece
        else:
            whole.append(piece)
    return whole


@given(st.lists(st.integers(0, 200), max_size=30))
@example([])
def test_calls_are_read_from_any_pieces(cuts: list[int]) -> None:
    for make, text, pieces in CASES:
        parser, found = make(), []
        ends = [*sorted(min(cut, len(text)) for cut in cuts), len(text)]
        for begin, end in zip([0, *ends], ends, strict=False):
            found += parser.feed(text[begin:end])
        assert joined([*found, *parser.finish()]) == joined(pieces)


def test_the_format_is_read_off_the_template() -> None:
    assert detect_format("x <tool_call> y") == "hermes"
    assert detect_format("{{ '<|python_tag|>' }}") == "llama3_json" and detect_format("Environment: ipython")
    assert detect_format("tools") is None


# ---- messages


def output(text: str, finish: str | None, index: int = 0) -> RequestOutput:
    completion = CompletionOutput(index, text, [1] * len(text), finish_reason=finish)
    return RequestOutput("r", None, [1], [completion], finish is not None, RequestMetrics(0.0))


def request(**more: Any) -> ChatRequest:
    return ChatRequest.model_validate({"messages": HELLO, "tools": [TOOL], **more})


def message(text: str, finish: str = "stop", **more: Any) -> dict[str, Any]:
    (choice,) = Messages(request(**more), "hermes").complete([output(text, finish)])["choices"]
    return dict(choice)


def test_calls_in_a_message() -> None:
    choice = message(f"<tool_call>{PARIS}</tool_call>\n<tool_call>{PARIS}</tool_call>")
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    first, second = choice["message"]["tool_calls"]
    assert first["id"] != second["id"] and first["type"] == "function" and "index" not in first
    assert json.loads(first["function"]["arguments"]) == {"city": "Paris"}
    assert len(message(f"<tool_call>{PARIS}</tool_call>" * 2, parallel_tool_calls=False)["message"]["tool_calls"]) == 1
    assert message(f"<tool_call>{PARIS}", "length")["finish_reason"] == "length"
    plain = message("no call")
    assert plain["finish_reason"] == "stop" and "tool_calls" not in plain["message"]
    assert "tool_calls" not in message(f"<tool_call>{PARIS}</tool_call>", tool_choice="none")["message"]
    named = message('{"city": "Rome"}', tool_choice={"type": "function", "function": {"name": "weather"}})
    assert named["finish_reason"] == "stop" and named["message"]["tool_calls"][0]["function"]["name"] == "weather"
    forced = message('[{"name": "weather", "parameters": {"city": "Rome"}}]', tool_choice="required")
    assert forced["finish_reason"] == "tool_calls" and len(forced["message"]["tool_calls"]) == 1


def test_calls_in_deltas() -> None:
    messages = Messages(request(stream=True), "hermes")
    text = f"See: <tool_call>{PARIS}</tool_call><tool_call>{PARIS}</tool_call>"
    parts = [
        choice
        for i, character in enumerate(text)
        for chunk in messages.chunks(0, output(character, None if i < len(text) - 1 else "stop"))
        for choice in chunk["choices"]
    ]
    assert parts[0]["delta"] == {"role": "assistant", "content": ""} and parts[-1]["finish_reason"] == "tool_calls"
    assert "".join(part["delta"].get("content", "") for part in parts) == "See: "
    calls = [call for part in parts for call in part["delta"].get("tool_calls", ())]
    assert [call["index"] for call in calls] == [0, 1] and all(call["function"]["name"] == "weather" for call in calls)


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
    refused = ask(engine, CHAT, {"messages": messages, "tools": [TOOL]}).json()["error"]
    assert refused["param"] == "messages.1.tool_calls.0.function.arguments" and "JSON object" in refused["message"]


def test_a_request_with_tools_is_answered(engine: AsyncLLM) -> None:
    body = {"messages": HELLO, "tools": [TOOL], "max_tokens": 4, "ignore_eos": True}
    assert ask(engine, CHAT, body).json()["choices"][0]["finish_reason"] == "length"
    assert events(ask(engine, CHAT, {**body, "stream": True}).text)[-1] == "[DONE]"
    without = ask(engine, CHAT, {**body, "tool_choice": "none"}).json()["usage"]["prompt_tokens"]
    assert without < ask(engine, CHAT, body).json()["usage"]["prompt_tokens"], "no tool is shown"
    unknown = {"type": "function", "function": {"name": "other"}}
    assert "not in tools" in ask(engine, CHAT, {**body, "tool_choice": unknown}).json()["error"]["message"]


def test_a_forced_tool_is_called(engine: AsyncLLM) -> None:
    """Its schema may refer to parts of itself."""
    schema = {"type": "object", "properties": {"x": {"$ref": "#/$defs/few"}}, "$defs": {"few": {"enum": [1, 2]}}}
    schema |= {"required": ["x"], "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "pick", "parameters": schema}}
    body = {"messages": HELLO, "tools": [tool], "max_tokens": 200, "seed": 3, "stop_token_ids": [298]}
    body["logit_bias"] = {str(space): -100 for space in b" \t\r\n"}  # random weights may write spaces for ever
    named = {"type": "function", "function": {"name": "pick"}}
    for choice, reason in (("required", "tool_calls"), (named, "stop")):
        (answer,) = ask(engine, CHAT, {**body, "tool_choice": choice, "parallel_tool_calls": False}).json()["choices"]
        assert answer["finish_reason"] == reason and answer["message"]["content"] in (None, "")
        (call,) = answer["message"]["tool_calls"]
        assert call["function"]["name"] == "pick" and json.loads(call["function"]["arguments"])["x"] in (1, 2)


def test_tools_that_the_model_would_not_see_are_refused(tmp_path: Any) -> None:
    with AsyncLLM(make_model(tmp_path, template=CHAT_TEMPLATE), **CACHE) as engine:
        body = {"messages": HELLO, "tools": [TOOL], "max_tokens": 2}
        assert "--tool-call-parser" in ask(engine, CHAT, body).json()["error"]["message"]
        assert ask(engine, CHAT, body, tool_call_parser="none").status_code == 200
        hidden = ask(engine, CHAT, body, chat_template="{{ messages[0].content }}").json()["error"]
        assert hidden["param"] == "tools" and "does not show tools" in hidden["message"]
