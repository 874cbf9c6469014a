"""Calls of tools in the results of batches: as the server reads them."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from cli_helpers import make_model
from scripted_model import Script, write_by
from server_helpers import TOOL
from tokenizer_files import add_special
from tool_call_texts import CALLS

from nanovllm.apps.batch.replica import Replica, ReplicaSettings
from nanovllm.apps.batch.rows import Row, RowFormat, RowResult
from nanovllm.errors import ConfigError
from nanovllm.text.tokenizer import HuggingFaceTokenizer

STOP = 390
QWEN3 = Path(__file__).parent / "chat_templates" / "qwen3.jinja"


def run(replica: Replica, **columns: Any) -> RowResult:
    sampling = {"stop_token_ids": [STOP], "ignore_eos": True, "max_tokens": 200}
    if "body" in columns:
        columns["body"] |= sampling
    else:
        columns["sampling_params"] = sampling
    ((_, result),) = chain.from_iterable(replica.answers([Row(0, "row", columns, columns)], RowFormat()))
    return result


def test_results_have_the_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(tmp_path, vocab=400, max_positions=2048, template=QWEN3.read_text())
    add_special(tmp_path, "<tool_call>", "</tool_call>", "<|im_end|>")
    arguments = {"device": "cpu", "kvcache_block_size": 64, "num_gpu_blocks": 40}
    replica = Replica(ReplicaSettings(model, arguments))
    tokenizer = replica.llm.engine.tokenizer
    assert isinstance(tokenizer, HuggingFaceTokenizer)
    script = Script(tokenizer, STOP, f"See:<|im_end|>\n{CALLS['hermes']}")
    write_by(script, monkeypatch)
    messages = [{"role": "user", "content": "hello"}]
    for columns in ({"body": {"messages": messages, "tools": [TOOL]}}, {"messages": messages, "tools": [TOOL]}):
        result = run(replica, **columns)
        assert result.error is None
        (output,) = result.columns["outputs"]
        (call,) = output["message"]["tool_calls"]
        assert call["function"]["name"] == "weather" and json.loads(call["function"]["arguments"])["city"] == "Paris"
        assert output["message"]["content"] == "See:\n" and result.columns["finish_reason"] == "tool_calls"
        assert result.columns["generated_text"] == f"See:\n{CALLS['hermes']}"
    script.text = "plain"
    (output,) = run(replica, body={"messages": messages}).columns["outputs"]
    assert output["message"] is None and output["text"] == "plain" and output["finish_reason"] == "stop"
    replica.close()


def test_calls_that_cannot_be_read_are_refused_or_left_in_the_text(tmp_path: Path) -> None:
    shown = "{% for tool in tools or () %}{{ tool.function.name }}{% endfor %}"
    strange = shown + "{% for m in messages %}{{ m.content }}{% endfor %}"
    model = make_model(tmp_path, vocab=400, max_positions=2048, template=strange)
    arguments = {"device": "cpu", "kvcache_block_size": 64, "num_gpu_blocks": 40}
    columns = {"body": {"messages": [{"role": "user", "content": "hello"}], "tools": [TOOL]}}
    for parser, refused in (("auto", True), ("hermes", False), ("none", False)):
        replica = Replica(ReplicaSettings(model, arguments, {"max_tokens": 2}, tool_call_parser=parser))
        error = run(replica, **columns).error
        assert ("--tool-call-parser" in str(error)) is refused, error
        replica.close()
    with pytest.raises(ConfigError, match="tool_call_parser='x': must be one of"):
        ReplicaSettings(model, tool_call_parser="x")
