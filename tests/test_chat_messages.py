"""Messages become the prompt that Transformers makes of them, for the templates of many families and on every path."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from checkpoints import refusal
from cli_helpers import GREEDY, SMALL_CACHE, make_model, write_jsonl
from conversations import ANSWER, CALLING, CASES, RESULT, SYSTEM, TEMPLATES, TOOLS, USER, Case, call, expected, text
from server_helpers import CACHE, CHAT, NAME, ask, ok
from tokenizer_files import byte_level_tokenizer

from nanovllm import LLM, SamplingParams
from nanovllm.apps.cli.main import main
from nanovllm.apps.server.async_llm import AsyncLLM
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.errors import RequestError
from nanovllm.text.chat_template import ChatTemplate
from nanovllm.text.prompts import PromptParts
from nanovllm.text.tokenizer import HuggingFaceTokenizer

CONTENT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
NAMES = sorted(path.stem for path in TEMPLATES.glob("*.jinja"))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HuggingFaceTokenizer:
    return byte_level_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def template_text(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")


def prompt(tokenizer: HuggingFaceTokenizer, template: str, messages: list[Any], **options: Any) -> str | None:
    """The prompt, or None where the template refuses the messages."""
    try:
        return ChatTemplate(tokenizer, template, **options).prompts(messages)[0].text
    except RequestError as error:
        assert "the chat template cannot take the messages" in str(error)
        return None


def differences(tokenizer: HuggingFaceTokenizer, template: str, cases: list[str]) -> list[str]:
    return [
        name
        for name in cases
        if prompt(tokenizer, template, CASES[name].messages, **CASES[name].options)
        != expected(tokenizer.tokenizer, template, CASES[name])
    ]


# ---- the prompts


@pytest.mark.parametrize("name", NAMES)
def test_prompts_are_those_of_transformers(name: str, tokenizer: HuggingFaceTokenizer) -> None:
    assert differences(tokenizer, template_text(name), list(CASES)) == []


# Of image-and-text models that this engine does not have; they show parts alone, and no tools.
PARTS_ALONE = ("idefics3", "llava_next", "smolvlm")


@pytest.mark.slow
@pytest.mark.skipif(find_spec("trl") is None, reason="the package trl has these templates: pip install --no-deps trl")
def test_prompts_of_published_templates_are_those_of_transformers(tokenizer: HuggingFaceTokenizer) -> None:
    spec = find_spec("trl")
    assert spec is not None and spec.origin is not None
    found = [
        path
        for path in (Path(spec.origin).parent / "chat_templates").glob("*.jinja")
        if not path.stem.startswith(PARTS_ALONE)
    ]
    assert len(found) >= 20
    for path in found:
        assert differences(tokenizer, path.read_text(encoding="utf-8"), list(CASES)) == [], path.name


TURN = "<start_of_turn>"
TOLD: list[tuple[str, list[Any], str]] = [
    ("qwen3_vl", CASES["two parts"].messages, "user\nDocument: abc  Question?<|im_end|>"),
    ("gemma3", CASES["two parts"].messages, f"{TURN}user\nDocument: abcQuestion?<end_of_turn>"),
    ("gemma3", CASES["parts of the system"].messages, f"{TURN}user\nBe brief. \nBe kind.\n\nWeather"),
    ("qwen2_5", CASES["two parts"].messages, "user\nDocument: abc \n Question?<|im_end|>"),
    ("qwen2_5", CASES["developer"].messages, "<|im_start|>system\nAnswer in French.<|im_end|>\n<|im_start|>user"),
    ("llama3_1", CASES["developer"].messages, "26 Jul 2024\n\nAnswer in French.<|eot_id|><|start_header_id|>user<"),
    ("smollm2", CASES["developer"].messages, "<|im_start|>system\nAnswer in French.<|im_end|>\n<|im_start|>user"),
    (
        "qwen2_5",
        CASES["a call"].messages,
        '{"name": "get_weather", "arguments": {"city": "Zürich", "days": 2}}\n</tool',
    ),
    ("qwen2_5", CASES["a call without arguments"].messages, '"arguments": {}}'),
    ("qwen2_5", [USER, {**CALLING, "tool_calls": [call("null")]}, RESULT], '"arguments": {}}'),
    ("deepseek_r1_distill", CASES["a call without arguments"].messages, "get_weather\n```json\n{}\n```"),
    ("deepseek_r1_distill", CASES["a call"].messages, '```json\n{"city": "Z\\u00fcrich", "days": 2}\n```'),
    ("qwen2_5", [USER, {"role": "assistant"}, USER], "<|im_start|>assistant\n<|im_end|>"),
    ("qwen2_5", [USER, CALLING, {**RESULT, "content": None}], "<tool_response>\n\n</tool_response>"),
]


@pytest.mark.parametrize(("name", "messages", "has"), TOLD)
def test_what_prompts_have(name: str, messages: list[Any], has: str, tokenizer: HuggingFaceTokenizer) -> None:
    found = prompt(tokenizer, template_text(name), messages)
    assert found is not None and has in found and "None" not in found, found


def test_the_role_developer_reaches_templates_that_know_it(tokenizer: HuggingFaceTokenizer) -> None:
    developer = {"role": "developer", "content": "Be kind."}
    copies = "{% for m in messages %}[{{ m.role | capitalize }}: {{ m.content }}]{% endfor %}"
    knows = f"{{% if messages[0].role == 'developer' %}}# Instructions: {{% endif %}}{CONTENT}"
    assert prompt(tokenizer, copies, [developer, USER]) == "[System: Be kind.][User: Weather in Zürich?]"
    found = prompt(tokenizer, knows, [developer, USER])
    assert found == "# Instructions: <developer>Be kind.<user>Weather in Zürich?"


def test_reasoning_is_under_the_name_that_the_template_reads(tokenizer: HuggingFaceTokenizer) -> None:
    for reads in ("reasoning", "reasoning_content", "thinking"):
        template = f"{{% for m in messages %}}{{{{ m.{reads} }}}}|{{{{ m.content }}}}{{% endfor %}}"
        for given in ("reasoning", "reasoning_content", "thinking"):
            assert prompt(tokenizer, template, [{**ANSWER, given: "Summer."}]) == "Summer.|Le soleil."


def test_parts_of_other_types_are_text(tokenizer: HuggingFaceTokenizer) -> None:
    parts = [
        "a",
        {"type": "input_text", "text": "b"},
        {"type": "output_text", "text": "c"},
        {"type": "refusal", "refusal": "d"},
        {"type": "thinking", "thinking": "e"},
        {"text": "f"},
    ]
    said = [USER, {"role": "assistant", "content": parts}]
    lists = "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
    native = (
        "{% for m in messages %}{% for p in m.content %}{{ p.text or '(' ~ p.thinking ~ ')' }}{% endfor %}{% endfor %}"
    )
    assert (prompt(tokenizer, CONTENT, said) or "").endswith("<assistant>a\nb\nc\nd\ne\nf")
    assert prompt(tokenizer, lists, said) == "Weather in Zürich?abcdef", "a template that shows parts alone gets them"
    assert prompt(tokenizer, native, said) == "Weather in Zürich?abcd(e)f"


def test_the_content_format_does_what_it_says(tokenizer: HuggingFaceTokenizer) -> None:
    shows = "{% for m in messages %}{{ m.content | tojson }}{% endfor %}"
    messages = [{"role": "user", "content": text("a", "b")}, {"role": "assistant", "content": "c"}]
    lists = [json.dumps(text("a", "b")), json.dumps(text("c"))]
    assert prompt(tokenizer, shows, messages, content_format="string") == '"a\\nb""c"'
    assert prompt(tokenizer, shows, messages, content_format="openai") == "".join(lists)
    assert prompt(tokenizer, shows, messages, content_format=None) == '"a\\nb""c"', "JSON is no way to show parts"
    assert prompt(tokenizer, template_text("qwen2_5"), messages, content_format="openai") is None
    with pytest.raises(RequestError, match="chat_template_content_format='list': must be one of 'auto', 'string', 'op"):
        ChatTemplate(tokenizer, shows, content_format="list")


BAD: list[tuple[list[Any], str]] = [
    (["Hi"], "a conversation must be a list of at least one message, got 'Hi'"),
    ([USER, "Hi"], "messages.1 must be an object with a role and a content, got 'Hi'"),
    ([{"content": "x"}], "messages.0.role is missing: give who speaks"),
    ([{"role": 5, "content": "x"}], "messages.0.role must be text such as 'user', got 5"),
    ([USER, {"role": "user", "content": None}], "messages.1.content is missing"),
    ([USER, {"role": "tool", "content": {"a": 1}}], r"messages.1.content must be text or a list of text parts, got \{"),
    ([{"role": "user", "content": [{"type": "image_url"}]}], "messages.0.content.0 must be a part of text.*image_url"),
    ([{"role": "user", "content": [{"type": "text", "text": 5}]}], "messages.0.content.0 must be a part of text"),
    ([USER, {**CALLING, "tool_calls": "f()"}], r"messages.1.tool_calls must be a list of calls, got 'f\(\)'"),
    ([USER, {**CALLING, "tool_calls": [5]}], "messages.1.tool_calls.0.function must be an object with name and arg"),
    ([USER, {**CALLING, "tool_calls": [call("[1]")]}], r"tool_calls.0.function.arguments must be a JSON object.*\[1\]"),
    (
        [USER, {**CALLING, "tool_calls": [call("{")]}],
        "messages.1.tool_calls.0.function.arguments must be a JSON object",
    ),
    ([USER, {**CALLING, "tool_calls": [call({}, name=None)]}], "tool_calls.0.function.name must be the name"),  # type: ignore[arg-type]
    ([[USER], [USER, 5]], "messages.1.1 must be an object"),
]


def test_messages_that_are_refused(tokenizer: HuggingFaceTokenizer) -> None:
    for messages, sentence in BAD:
        with pytest.raises(RequestError, match=sentence):
            ChatTemplate(tokenizer, CONTENT).prompts(messages)
    for name in ("messages", "tools"):
        with pytest.raises(RequestError, match=f"chat_template_kwargs='{name}': must hold variables of the template"):
            ChatTemplate(tokenizer, CONTENT, template_kwargs={name: []})
    assert "documents=5: must be a list" in refusal(lambda: ChatTemplate(tokenizer, CONTENT, documents=5), RequestError)  # type: ignore[arg-type]


def test_tools_reach_the_template_as_they_are(tokenizer: HuggingFaceTokenizer) -> None:
    """In their own order of keys, with the nulls of their schemas, and without fields of no value."""
    schema = {"required": [], "properties": {"a": {"default": None, "enum": ["x", None]}}, "type": "object"}
    function = {"parameters": schema, "name": "f", "description": None, "strict": None}
    found = prompt(tokenizer, "{{ tools | tojson }}", [USER], tools=[{"function": function, "type": "function"}])
    shown = {"function": {"parameters": schema, "name": "f"}, "type": "function"}
    assert found == json.dumps([shown])


def test_a_message_may_be_an_object_of_the_client(tokenizer: HuggingFaceTokenizer) -> None:
    class Answer:  # as the classes of OpenAI's client
        def model_dump(self) -> dict[str, Any]:
            return {**CALLING, "refusal": None}

    answer = Answer()
    template = template_text("qwen2_5")
    assert prompt(tokenizer, template, [USER, answer, RESULT]) == prompt(tokenizer, template, [USER, CALLING, RESULT])


def test_facts_of_few_templates_are_kept(tokenizer: HuggingFaceTokenizer) -> None:
    first = tokenizer.template_facts("own")
    for number in range(50):
        tokenizer.template_facts(f"of a request {number}")
        assert tokenizer.template_facts("own") is first
    assert len(tokenizer._facts) < 20


# ---- every path


SENT = [
    {"role": "developer", "content": "Be kind."},
    {"role": "user", "content": text("Document: abc ", "Weather?")},
    {**CALLING, "content": None},
    {**RESULT, "content": text("sun", "rain")},
]


def test_all_paths_lead_to_one_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LLM.chat, the server, rows and bodies of batches, and `generate --jsonl`."""
    model = make_model(tmp_path, template=template_text("qwen3_vl"))
    wanted = HuggingFaceTokenizer(model)
    shown = expected(wanted.tokenizer, template_text("qwen3_vl"), Case(SENT))
    assert shown is not None and "Document: abc Weather?" in shown
    ids = wanted.encode(shown, add_special_tokens=False)
    taken: list[list[int]] = []
    make_request = LLMEngine.make_request

    def spy(self: LLMEngine, request_id: str, parts: PromptParts, *others: Any, **more: Any) -> Any:
        request = make_request(self, request_id, parts, *others, **more)
        taken.append(list(request.prompt_token_ids))
        return request

    with AsyncLLM(model, **CACHE) as engine:
        answer = ok(engine, CHAT, messages=SENT, max_tokens=1, return_token_ids=True)
        assert answer["prompt_token_ids"] == ids
        assert ask(engine, "/tokenize", {"messages": SENT}).json()["tokens"] == ids
        with_tools = ask(engine, "/tokenize", {"messages": SENT, "tools": TOOLS}).json()["tokens"]
        assert json.dumps(TOOLS[0], ensure_ascii=False) in wanted.decode(with_tools), "in the order of the request"
        as_text = ask(engine, "/tokenize", {"messages": SENT}, chat_template_content_format="string").json()["tokens"]
        assert wanted.decode(as_text) == wanted.decode(ids).replace("abc Weather?", "abc \nWeather?").replace(
            "sunrain", "sun\nrain"
        )
    with LLM(model, **CACHE) as llm:
        (output,) = llm.chat(SENT, SamplingParams(max_tokens=1), use_tqdm=False)
        assert output.prompt_token_ids == ids
    monkeypatch.setattr(LLMEngine, "make_request", spy)
    body = {"model": NAME, "messages": SENT, "max_tokens": 1}
    line = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": body}
    rows = write_jsonl(tmp_path / "rows.jsonl", {"messages": SENT, "max_tokens": 1}, line)
    flags = ["--model", model, "--served-model-name", NAME, *SMALL_CACHE, *GREEDY]
    assert main(["batch", *flags, "--input", rows, "--output", str(tmp_path / "results")]) == 0
    prompts = write_jsonl(tmp_path / "prompts.jsonl", {"messages": SENT})
    assert main(["generate", *flags, "--jsonl", prompts, "--output", str(tmp_path / "texts")]) == 0
    assert taken == [ids] * 3
    system = [{**SYSTEM, "content": "Be kind."}, *SENT[1:]]
    assert shown == expected(wanted.tokenizer, template_text("qwen3_vl"), Case(system))
