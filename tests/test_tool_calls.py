"""Tool calls in the text of models: every format, in any pieces, with types, broken and hostile."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizer_files import add_special, write_byte_level
from tool_call_texts import ALONE, CALLS, CITY, FILE, TOOLS, called, read

from nanovllm.apps.tool_calls.formats import FORMATS
from nanovllm.apps.tool_calls.json_formats import ForcedCall, ForcedList
from nanovllm.apps.tool_calls.pieces import Arguments, Broken, Call, Ended, Piece, Reasoning, assembled, merged
from nanovllm.apps.tool_calls.reading import Formats
from nanovllm.apps.tool_calls.response_template import ResponseTemplateParser
from nanovllm.apps.tool_calls.values import property_types, typed
from nanovllm.text.tokenizer import HuggingFaceTokenizer

QWEN = "qwen3_xml"
HERMES = "hermes"


def qwen(**values: str) -> str:
    parameters = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in values.items())
    return f"<tool_call>\n<function=write>\n{parameters}</function>\n</tool_call>"


@pytest.mark.parametrize("form", CALLS)
def test_calls_and_the_text_around_them(form: str) -> None:
    text = CALLS[form]
    assert read(form, text) == called()
    assert read(form, f"  {text}\n")[-3:] == called()
    # What calls no tool of the request is content, unchanged but for the marks of harmony's headers.
    other = text.replace("weather", "weather2")
    answer = assembled(read(form, other))
    assert not answer.calls and (answer.content == other or form == "openai")
    for end in range(1, len(text)):  # cut off anywhere: nothing is lost, and what is complete is a call
        answer = assembled(read(form, text[:end]))
        assert len(answer.calls) + bool(answer.content) == 1 or form == "openai"
        assert all(json.loads(call.arguments) == json.loads(CITY) for call in answer.calls)
    if form not in ALONE and form != "openai":
        assert read(form, f"See:\n{text}\n{text} so") == ["See:\n", *called(), *called(), " so"]
        assert read(form, f"{other}{text}") == [other, *called()]


@given(st.data())
def test_pieces_do_not_depend_on_how_the_text_comes(data: Any) -> None:
    """Of calls, of other text, and of both damaged."""
    form = data.draw(st.sampled_from(sorted(FORMATS)))
    chance = random.Random(data.draw(st.integers(0, 1 << 30)))
    texts = [CALLS.get(form, CALLS[HERMES]), qwen(text="a\n</parameter> b", count="x"), "plain < [", '{"name": "', "\n"]
    text = "".join(chance.choice(texts) for _ in range(chance.randint(1, 4)))
    for _ in range(chance.randint(0, 2)):  # damage
        place = chance.randrange(len(text) + 1)
        text = text[:place] + chance.choice(["", "<", '"', "}", "weather", "\n", "é"]) + text[place + 1 :]
    whole = read(form, text)
    parser = FORMATS[form].make(TOOLS)
    parts = []
    place = 0
    while place < len(text):
        size = chance.choice((1, 1, 2, 3, 7, 50))
        parts += parser.feed(text[place : place + size])
        place += size
    assert merged([*parts, *parser.finish()]) == whole
    for call in assembled(whole).calls:
        assert call.name in TOOLS and isinstance(json.loads(call.arguments), dict)


VALUES: list[tuple[str, str, Any]] = [
    ("text", "3", "3"),
    ("text", '{"a": 1}', '{"a": 1}'),
    ("text", " two\nlines ", " two\nlines "),
    ("text", "null", "null"),
    ("text", 'a "quote" \\ é', 'a "quote" \\ é'),
    ("text", "</parameter> within", "</parameter> within"),
    ("count", "12345678901234567890123", 12345678901234567890123),
    ("count", "3.0", 3),
    ("count", "many", "many"),
    ("share", "1e3", 1000.0),
    ("share", "7", 7),
    ("share", "NaN", "NaN"),
    ("deep", "True", True),
    ("deep", "false", False),
    ("tags", '["a", "b"]', ["a", "b"]),
    ("tags", "['a', True, None]", ["a", True, None]),
    ("tags", "a, b", "a, b"),
    ("more", '{"x": {"y": 1}}', {"x": {"y": 1}}),
    ("maybe", "None", None),
    ("maybe", "5", 5),
    ("kind", "1", 1),
    ("kind", "a", "a"),
    ("unknown", "5", "5"),
]


@pytest.mark.parametrize(("name", "written", "value"), VALUES)
def test_values_have_the_types_of_the_schema(name: str, written: str, value: Any) -> None:
    for size in (1 << 20, 1):
        call, arguments, end = read(QWEN, qwen(**{name: written}), size)
        assert (call, end) == (Call("write"), Ended()) and isinstance(arguments, Arguments)
        assert json.loads(arguments.text) == {name: value}


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"properties": {"x": {"type": ["integer", "null"]}}}, {"integer", "null"}),
        (
            {"properties": {"x": {"allOf": [{"$ref": "#/definitions/a"}]}}, "definitions": {"a": {"const": 1}}},
            {"integer"},
        ),
        ({"properties": {"x": {"oneOf": [{"enum": [None]}, {"properties": {}}]}}}, {"null", "object"}),
        ({"additionalProperties": {"type": "boolean"}}, {"boolean"}),
        ({"properties": {"x": {"type": "integer", "nullable": True}}}, {"integer", "null"}),
        ({"properties": {"x": {"items": {}}}}, {"array"}),
        ({"properties": 3}, {"string"}),
    ],
)
def test_types_of_a_property(schema: Any, types: set[str]) -> None:
    assert property_types(schema, "x") == types


def test_references_that_go_round_end() -> None:
    branches = [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}] * 20
    schema = {"properties": {"x": {"$ref": "#/$defs/a"}}, "$defs": {name: {"anyOf": branches} for name in "ab"}}
    assert "object" in property_types(schema, "x")  # nothing is known: anything
    assert typed("[" * 100_000, frozenset({"array"})) == json.dumps("[" * 100_000)


OTHERS: list[tuple[str, str, list[Piece]]] = [
    (HERMES, f'<tool_call>{{"name": "weather", "arguments": {CITY}', [Call("weather"), Arguments(CITY)]),
    (HERMES, '<tool_call>{"arguments": {"city": "Paris", "days": 3}, "name": "weather"}', called()),
    (HERMES, '<tool_call>{"name": "now"}</tool_call>', called("{}", "now")),
    (HERMES, '<tool_call>{"name": "now", "arguments": "{\\"a\\": 1}"}</tool_call>', called('{"a": 1}', "now")),
    (HERMES, '<tool_call>{"name": "now", "arguments": null}</tool_call>', called("{}", "now")),
    (HERMES, '<tool_call>{"name": "now", "arguments": ""}</tool_call>', called("{}", "now")),
    (
        HERMES,
        '<tool_call>{"name": "now", "arguments": "{\\"a\\": \\"\\ud800\\"}"},{"name": "now"}</tool_call>',
        [*called('{"a": "\\ud800"}', "now"), *called("{}", "now")],
    ),
    (HERMES, '<tool_call>{"name": "now", "arguments": 3}</tool_call>', None),  # type: ignore[list-item]
    (HERMES, "<tool_call>not json</tool_call>x", None),  # type: ignore[list-item]
    (
        HERMES,
        '<tool_call>{"name": "now", "arguments": {"a": "</tool_call>\n"}}',
        called('{"a": "</tool_call>\\n"}', "now"),
    ),
    (HERMES, '<tool_call>{"name": "now", "arguments": {"a": "\\udc00é"}}', called('{"a": "\\udc00é"}', "now")),
    ("mistral", f'[TOOL_CALLS] [{{"name": "weather", "arguments": {CITY}, "id": "abcdefghi"}}]', called()),
    (
        "mistral",
        "[TOOL_CALLS]now[CALL_ID]abcdefghi[ARGS]{}[TOOL_CALLS]now{}",
        [*called("{}", "now"), *called("{}", "now")],
    ),
    ("llama3_json", f"<|python_tag|>{CALLS['llama3_json']}; {CALLS['llama3_json']}", [*called(), *called()]),
    ("llama3_json", f" [{CALLS['llama3_json']}, {CALLS['llama3_json']}]", [*called(), *called()]),
    ("llama3_json", f"{CALLS['llama3_json']}, {CALLS['llama3_json']}", [*called(), *called()]),
    ("llama3_json", "[a link](https://x.y)", None),  # type: ignore[list-item]
    ("llama3_json", '{"name": "weather", "age": 36}', None),  # type: ignore[list-item]
    ("llama3_json", '{"name": "weather"}', None),  # type: ignore[list-item]
    ("llama3_json", '{"name": "Ada", "parameters": {"x": 1}}', None),  # type: ignore[list-item]
    ("llama3_json", f"{CALLS['llama3_json']} and more", [*called(), " and more"]),
    ("pythonic", "[weather(city='Paris', days=3), weather(city='Paris', days=\"3\")]", [*called(), *called()]),
    ("pythonic", "[weather](https://x.y) is a link", None),  # type: ignore[list-item]
    (
        "pythonic",
        "[now(a=[1, {'b': (true, None)}], c='it\\'s\n')]",
        called('{"a": [1, {"b": [true, null]}], "c": "it\'s\\n"}', "now"),
    ),
    ("olmo3", "<function_calls>now()\nnow()</function_calls>", [*called("{}", "now"), *called("{}", "now")]),
    (
        "gemma4",
        '<|tool_call>call:now{o:{k:<|"|>a}b<|"|>,n:[1,{x:true}]}}<tool_call|>',
        called('{"o": {"k":"a}b","n":[1,{"x":true}]}}', "now"),
    ),
    (QWEN, "<function=now>\n</function>\n</tool_call>", called("{}", "now")),
    (QWEN, "<tool_call><function=now></tool_call>", called("{}", "now")),
    (  # tags that models leave out
        QWEN,
        f"{qwen(city='Paris').replace('</parameter>', '<parameter=days>3</parameter>').replace('write', 'weather')} ",
        called(),
    ),
    (
        QWEN,
        qwen(text="a\n</function>\n</tool_call>\n<parameter=x>"),
        called('{"text": "a\\n</function>\\n</tool_call>\\n<parameter=x>"}', "write"),
    ),
]


@pytest.mark.parametrize(("form", "text", "pieces"), OTHERS, ids=range(len(OTHERS)))
def test_other_ways_to_write_calls(form: str, text: str, pieces: list[Piece] | None) -> None:
    found = read(form, text)
    if pieces is not None and pieces[-1:] != [Ended()] and isinstance(pieces[-1], Arguments):
        assert found[:-1] == pieces and isinstance(found[-1], Broken)
    else:
        assert found == ([text] if pieces is None else pieces)


def test_what_breaks_off_is_content_and_nothing_is_sent_twice() -> None:
    text = '<tool_call>{"name": "now", "arguments": {"a": Paris}} and so on'
    assert assembled(read(HERMES, text)).content == text
    call, arguments, broken, rest = read(HERMES, text)
    assert isinstance(broken, Broken) and (call, rest) == (Call("now"), "} and so on")
    assert isinstance(arguments, Arguments) and broken.raw.endswith(arguments.text + broken.unsent)
    started = "<tool_call><function=write><parameter=count>12"
    *_, broken = read(QWEN, started)
    assert broken == Broken(started, "<parameter=count>12")


def test_channels_of_harmony() -> None:
    begin = "<|start|>assistant"
    final = "<|channel|>final<|message|>"
    text = f"<|channel|>analysis<|message|>a<|end|>{begin}<|channel|>analysis<|message|>b<|end|>{begin}"
    assert read("openai", f"{text}{final}Yes.<|return|>") == [Reasoning("a\nb"), "Yes."]
    preamble = f"<|channel|>commentary<|message|>Let me see.<|end|>{begin}{CALLS['openai']}"
    assert read("openai", preamble) == ["Let me see.", *called()]
    other_order = f" to=functions.weather<|channel|>commentary json<|message|>{CITY}"
    assert read("openai", other_order) == called()
    assert read("openai", f"<|channel|>analysis to=functions.weather code<|message|>{CITY}<|call|>") == called()
    assert read("openai", "<|channel|>analysis to=python code<|message|>1 + 1<|call|>") == [Reasoning("1 + 1")]
    assert read("openai", "plain, as where the prompt has the header") == ["plain, as where the prompt has the header"]
    assert read("openai", "<|channel|>final") == ["final"]
    builtin = "<|channel|>commentary to=python code<|message|>1 + 1<|call|>"
    assert assembled(read("openai", builtin)).content == "commentary to=python code1 + 1"


def test_forced_answers() -> None:
    for size in (1 << 20, 1):
        for parser, text, pieces in (
            (ForcedList(TOOLS), f'[{{"name": "weather", "parameters": {CITY}}}]', called()),
            (ForcedList(TOOLS), "[3]", ["[3]"]),
            (ForcedCall(TOOLS, "weather"), CITY, called()),
        ):
            found = [piece for i in range(0, len(text), size) for piece in parser.feed(text[i : i + size])]
            assert merged([*found, *parser.finish()]) == pieces
    cut = ForcedList(TOOLS)
    pieces = [*cut.feed('[{"name": "weather", "parameters": {"ci'), *cut.finish()]
    assert [call.arguments for call in assembled(pieces, keeps_broken=True).calls] == ['{"ci']


def test_hostile_texts_take_no_time_and_lose_nothing() -> None:
    deep = "[" * 20_000
    for form in CALLS:
        for text in (f'<tool_call>{{"name": "now", "arguments": {{"a": {deep}', f"[now(a={deep}", "<tool_call>" * 2000):
            assert assembled(read(form, text)).content == text
    assert FILE["properties"]


# ---- Transformers' parser

QWEN3_RESPONSE: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "thinking": {"open": "<think>", "close_pattern": r"</think>\s*"},
        "tool_calls": {
            **{"open": "<tool_call>", "close_pattern": r"</tool_call>\s*", "repeats": True, "content": "json"},
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"<\|im_end\|>\s*"},
    },
}
OTHER = '<tool_call>{"name": "other", "arguments": {}}</tool_call>'


@pytest.mark.parametrize("size", [1 << 20, 1, 5])
@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        (f"hm</think>\n\nSee:\n{CALLS['hermes']}\n{OTHER} x", [Reasoning("hm"), "See:\n", *called(), f"{OTHER} x"]),
        ("hm</think><tool_call>not json</tool_call> y", [Reasoning("hm"), "<tool_call>not json</tool_call> y"]),
        ('</think><tool_call>{"name": "now", "arguments": null}</tool_call>', called("{}", "now")),
        ("<think>hm</think>a", [Reasoning("<think>hm"), "a"]),
    ],
)
def test_answers_by_a_response_template(text: str, pieces: list[Piece], size: int) -> None:
    tools = [{"type": "function", "function": {"name": name, "parameters": TOOLS[name]}} for name in TOOLS]
    parser = ResponseTemplateParser(QWEN3_RESPONSE, tools, "<|im_start|>assistant\n<think>\n")
    found = [piece for i in range(0, len(text), size) for piece in parser.feed(text[i : i + size])]
    assert merged([*found, *parser.finish()]) == pieces


def test_a_tokenizer_with_a_response_template(tmp_path: Path) -> None:
    write_byte_level(tmp_path, chat_template="{{ tools }}")
    add_special(tmp_path, "<|im_end|>", "<tool_call>")
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"response_template": QWEN3_RESPONSE}))
    tokenizer = HuggingFaceTokenizer(tmp_path, "llama")
    formats = Formats(tokenizer)
    tools = [{"type": "function", "function": {"name": "now"}}]
    assert formats.shown(None).form == "response_template" and formats.shown("{{ tools }}").form is None
    reading = formats.reading("response_template", tools)
    parser = reading.parser(tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False))
    text = 'a<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    assert reading.shows_special and [*parser.feed(text), *parser.finish()] == ["a", *called("{}", "now")]
