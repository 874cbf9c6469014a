"""Rows of a batch job become requests, or an error that says what is wrong with them."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.apps.batch.inputs import Inputs, open_inputs
from nanovllm.apps.batch.rows import USED_COLUMNS, Row, RowFormat, RowRequest
from nanovllm.apps.tool_choice import forced_schema
from nanovllm.errors import RequestError

HELLO = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "pick", "parameters": {"type": "object", "required": ["x"]}}}
NAMED = {"type": "function", "function": {"name": "pick"}}
OTHER = {"type": "function", "function": {"name": "other"}}


def request(columns: dict[str, Any], **options: Any) -> RowRequest:
    return RowFormat(**options).request(Row(3, "data.jsonl line 4", columns, columns))


def test_prompts_and_parameters() -> None:
    row = {"prompt": "hi", "temperature": 0.5, "title": "data", "sampling_params": {"top_k": 3, "seed": None}}
    found = request(row)
    assert (found.index, found.prompt, found.params) == (3, "hi", {"temperature": 0.5, "top_k": 3})
    assert request({"prompt_token_ids": [1, 2], "prompt": None}).prompt_token_ids == [1, 2]
    assert request({"messages": HELLO, "tools": []}).template_options == {"tools": []}
    assert request({"question": "why?", "prompt": "data"}, prompt_column="question").prompt == "why?"


BAD_ROWS: dict[str, tuple[dict[str, Any], str]] = {
    "no prompt": (
        {"text": "hi"},
        r"exactly one of prompt, prompt_token_ids, messages \(in batches also body\), and has none",
    ),
    "no conversation": ({"messages": []}, r"messages must be a list of objects with role and content, got \[\]"),
    "parameters": ({"prompt": "a", "sampling_params": 5}, "sampling_params must be an object, got 5"),
    "a misspelling": ({"prompt": "a", "sampling_params": {"temprature": 1}}, "did you mean 'temperature'"),
    "tools": ({"prompt": "a", "tools": []}, "tools is for a chat template: give messages"),
}


@pytest.mark.parametrize("case", BAD_ROWS)
def test_bad_rows(case: str) -> None:
    columns, sentence = BAD_ROWS[case]
    with pytest.raises(RequestError, match=sentence):
        request(columns)


def row_sources(inputs: Inputs, most_rows: int, done: Collection[int] = ()) -> list[tuple[int, str]]:
    """Of all rows that are not done, read in slices."""
    slices = [replace(part, done=frozenset(done)) for part in inputs.slices(most_rows)]
    return [(row.index, row.source) for part in slices for row in inputs.rows(part, USED_COLUMNS)]


def test_every_row_of_json_lines_is_in_one_slice(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'\n{"prompt": "a"}\n \nnull\n{}')
    (tmp_path / "b.jsonl").write_bytes(b"{}\n")
    inputs = open_inputs([str(tmp_path)])
    expected = [(0, "a.jsonl line 2"), (1, "a.jsonl line 4"), (2, "a.jsonl line 5"), (3, "b.jsonl line 1")]
    for most_rows in (1, 2, 3, 100):
        assert row_sources(inputs, most_rows) == expected
        assert row_sources(inputs, most_rows, [1, 2]) == [expected[0], expected[3]]


def test_every_row_of_tables_is_in_one_slice(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    table = pa.table({"prompt": [str(i) for i in range(150)]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=70)
    pq.write_table(table.slice(0, 1), tmp_path / "b.parquet")
    inputs = open_inputs([str(tmp_path)])
    expected = [(i, f"a.parquet row {i + 1}") for i in range(150)] + [(150, "b.parquet row 1")]
    done = [i for i in range(151) if i % 3 == 1]
    for most_rows in (7, 64, 1000):
        assert row_sources(inputs, most_rows) == expected
        assert row_sources(inputs, most_rows, done) == [row for row in expected if row[0] % 3 != 1]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
MESSAGES = st.lists(st.dictionaries(st.sampled_from(["role", "content"]), VALUES), max_size=3)
NAMES = st.sampled_from(sorted(USED_COLUMNS))


@settings(max_examples=25)
@given(columns=st.dictionaries(NAMES, VALUES, max_size=3), messages=MESSAGES | VALUES)
def test_any_row_makes_a_request_or_an_error(columns: dict[str, Any], messages: Any) -> None:
    with suppress(RequestError):
        assert request(columns if "prompt" in columns else {**columns, "messages": messages}).index == 3


# ---- OpenAI's batch files


def body(fields: dict[str, Any], has_max_tokens: bool = False, **row: Any) -> RowRequest:
    return request({"body": fields, **row}, model_names=("tiny",), has_max_tokens=has_max_tokens)


def test_chat_bodies() -> None:
    fields = {"model": "tiny", "messages": HELLO, "max_completion_tokens": 9, "logprobs": True, "top_logprobs": 2}
    found = body({**fields, "user": "u", "temperature": 0}, method="POST", url="/v1/chat/completions")
    assert found.messages == HELLO
    assert found.params == {"max_tokens": 9, "logprobs": 2, "temperature": 0}
    assert body({"messages": HELLO}).params == {"max_tokens": None}  # as OpenAI's: no limit
    assert body({"messages": HELLO}, has_max_tokens=True).params == {}
    assert body({"messages": HELLO, "top_logprobs": 0}, has_max_tokens=True).params == {}
    structured = body({"messages": HELLO, "response_format": {"type": "json_object"}})
    assert structured.params["structured_outputs"] == {"json_object": True}


def test_the_fields_of_chats_mean_what_they_mean_to_the_server() -> None:
    tools = {"messages": HELLO, "tools": [TOOL]}
    assert body({**tools, "tool_choice": "auto", "parallel_tool_calls": True}).template_options == {"tools": [TOOL]}
    assert body({**tools, "tool_choice": "none"}).template_options == {"tools": [TOOL]}, "the prompt begins alike"
    for choice, parallel in (("required", None), ("required", False), (NAMED, None), ("auto", None)):
        fields = {**tools, "tool_choice": choice, "parallel_tool_calls": parallel}
        forced = forced_schema([TOOL], choice, parallel)
        given = body({**fields, "response_format": {"type": "json_object"}}).params["structured_outputs"]
        assert given == ({"json_object": True} if forced is None else {"json": forced}), "a forced call is stronger"
    found = body(
        {"messages": HELLO, "documents": [{"text": "a"}], "continue_final_message": True, "modalities": ["text"]}
    )
    options = {"documents": [{"text": "a"}], "continue_final_message": True, "add_generation_prompt": False}
    assert found.template_options == options
    assert body({"messages": HELLO, "add_special_tokens": True, "store": True}).add_special_tokens is True


BAD_BODIES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "stream": ({"prompt": "a", "stream": True}, {}, "stream=True is not supported in a batch"),
    "template": ({"messages": HELLO, "chat_template": "x"}, {}, "chat_template='x' is not supported in a batch"),
    "model": ({"prompt": "a", "model": "gpt"}, {}, "asks for model 'gpt', and this job runs 'tiny'"),
    "field": ({"prompt": "a", "tool_chioce": "auto"}, {}, "body.tool_chioce: Extra inputs are not permitted"),
    "of chats": ({"prompt": "a", "tool_choice": "auto"}, {}, "body.tool_choice: .*, for /v1/completions"),
    "type": ({"messages": HELLO, "logprobs": 5}, {}, "body.logprobs: Input should be a valid boolean"),
    "several": ({"prompt": ["a", "b"]}, {}, "body.prompt has several prompts"),
    "choice": ({"messages": HELLO, "tool_choice": "required"}, {}, "tool_choice needs tools"),
    "unknown tool": ({"messages": HELLO, "tools": [TOOL], "tool_choice": OTHER}, {}, "names the function 'other'"),
    "url": ({"prompt": "a"}, {"url": "/v1/embeddings"}, "url must be"),
    "format": ({"messages": HELLO, "response_format": {"type": "json_schema"}}, {}, "json_schema needs its schema"),
    "beside it": ({"prompt": "a"}, {"temperature": 0.5}, "temperature beside a body has no effect"),
    "top_logprobs": ({"messages": HELLO, "top_logprobs": 2}, {}, "top_logprobs needs logprobs=true"),
}


@pytest.mark.parametrize("case", BAD_BODIES)
def test_bad_bodies(case: str) -> None:
    fields, row, sentence = BAD_BODIES[case]
    with pytest.raises(RequestError, match=sentence):
        body(fields, **row)
