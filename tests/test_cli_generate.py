"""`nanovllm generate` as a person runs it: prompts from everywhere, one bad line of many, Ctrl-C, `| head`."""

from __future__ import annotations

import io
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_helpers import (
    GREEDY,
    SMALL_CACHE,
    TEMPLATE,
    generate,
    json_lines,
    make_model,
    set_stdin,
    write_jsonl,
)

from nanovllm import LLM, SamplingParams


@pytest.fixture(scope="module")
def expected(model: str) -> Callable[[Any], str]:
    """The greedy text that the API gives for a prompt."""
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    with LLM(model, kvcache_block_size=16, num_gpu_blocks=80) as llm:
        texts = {prompt: llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].text for prompt in PROMPTS}
    return lambda prompt: texts[prompt]


PROMPTS = ("one", "two words", "line 3", "ünïcode", "two\nlines", "<user>hi<assistant>")


# ---- prompts in, results out


def test_prompts_come_from_everywhere_in_the_order_that_they_were_named(
    model: str,
    expected: Callable[[Any], str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "all.txt").write_bytes(b"\xef\xbb\xbftwo\nlines\n")
    (tmp_path / "lines.txt").write_bytes("line 3\r\nünïcode".encode())
    jsonl = write_jsonl(
        tmp_path / "p.jsonl",
        {"prompt": "one", "id": "first", "max_tokens": 2},
        b"",
        {"prompt_token_ids": [111, 110, 101], "logprobs": 2, "prompt_logprobs": 1, "logit_bias": {"5": 1}},
        {"messages": [{"role": "user", "content": "hi"}], "id": 7},
    )
    set_stdin(monkeypatch, b"two words\n")
    files = ["--lines", str(tmp_path / "lines.txt"), "--file", str(tmp_path / "all.txt"), "--jsonl", jsonl]
    assert generate(model, "one", "-", *files, "--json") == 0
    printed = capsys.readouterr()
    results = json_lines(printed.out)
    totals, kv = printed.err.splitlines()  # progress is for terminals
    rates = r"[\d.,]+ s, [\d.,]+ tok/s in, [\d.,]+ tok/s out"
    assert re.fullmatch(rf"8 prompts, \d+ tokens computed, 44 generated in {rates}; 8 of 8 cut .*", totals)
    assert re.fullmatch(r"\d+ tokens: at most [\d.]+ MB of KV on the device", kv)
    assert [result["index"] for result in results] == list(range(8))
    texts = [result["outputs"][0]["text"] for result in results]
    wanted = ["one", "two words", "line 3", "ünïcode", "two\nlines", "one", "one", "<user>hi<assistant>"]
    assert texts[:5] + texts[6:] == [expected(prompt) for prompt in wanted[:5] + wanted[6:]]
    assert len(results[5]["outputs"][0]["token_ids"]) == 2
    assert [result.get("id") for result in results[5:]] == ["first", None, 7]
    assert [result["source"] for result in results[:2]] == ["prompt 1", "standard input"]
    assert results[6]["source"] == f"{jsonl} line 3" and results[6]["num_prompt_tokens"] == 3
    assert [len(row) for row in results[6]["outputs"][0]["logprobs"]] >= [2] * 6
    assert results[6]["prompt_logprobs"][0] is None and results[5]["prompt_logprobs"] is None
    metrics = results[0]["metrics"]
    assert metrics["e2e_latency_s"] >= metrics["ttft_s"] >= metrics["queue_time_s"] >= 0
    assert abs(time.time() - metrics["arrival_time"]) < 600 and metrics["prefill_tok_s"] > 0


def test_text_goes_to_a_file_a_line_for_each_prompt(
    model: str,
    expected: Callable[[Any], str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    output = tmp_path / "out.txt"
    output.write_text("old")
    assert generate(model, "one", "--output", str(output), "two words") == 0
    assert output.read_bytes().decode() == f"{expected('one')}\n{expected('two words')}\n"
    set_stdin(monkeypatch, b"two\nlines\n")  # which is read where no prompt is named
    assert generate(model) == 0
    assert capsys.readouterr().out == expected("two\nlines") + "\n"


class Recorder(io.StringIO):
    """Standard output that remembers its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []

    def write(self, text: str) -> int:
        self.parts.append(text)
        return super().write(text)


def test_text_is_streamed_as_it_comes(
    model: str, expected: Callable[[Any], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stdout = Recorder()
    monkeypatch.setattr("sys.stdout", stdout)
    assert generate(model, "one", "two words", "--stream", "--max-num-seqs", "4") == 0
    assert stdout.getvalue() == f"{expected('one')}\n{expected('two words')}\n"
    assert len([part for part in stdout.parts if part != "\n"]) > 4, "in parts"


# ---- what goes wrong with one prompt


LONG = "x" * 50_000
BAD_LINES: list[tuple[object, str]] = [
    (b"{", "it is not JSON"),
    (b"\xff", "it is not UTF-8: invalid start byte at position 0"),
    ({"id": 5}, "exactly one of prompt, prompt_token_ids, messages (in batches also body), and has none"),
    ({"prompt": "a", "temprature": 1}, "did you mean 'temperature'?"),
    ({"prompt": "a", "temperature": -1}, "temperature=-1: must be"),
    ({"prompt_token_ids": [1000]}, "token id 1000"),
    ({"messages": [{"role": LONG, "content": "hi"}]}, "no role xxx"),
    (b'{"prompt": "\\ud800"}', "surrogates not allowed"),
    ({"prompt": "a" * 2000}, "max_model_len is 1024"),
    (b'{"prompt": "a", "top_k": ' + b"9" * 5000 + b"}", "it is not JSON: Exceeds the limit"),
    (b'{"prompt": "a", "id": ' + b"[" * 900 + b"1e999" + b"]" * 900 + b"}", "its id holds NaN or infinity"),
]


def test_bad_lines_lose_no_good_ones(
    model: str, expected: Callable[[Any], str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [line for bad, _ in BAD_LINES for line in (bad, {"prompt": "one"})]
    assert generate(model, "--json", "--quiet", "--jsonl", write_jsonl(tmp_path / "p.jsonl", *lines)) == 1
    printed = capsys.readouterr()
    results = json_lines(printed.out)
    assert len(results) == 2 * len(BAD_LINES)
    for number, (_, told) in enumerate(BAD_LINES):
        failed, good = results[2 * number : 2 * number + 2]
        assert failed["source"] == f"{tmp_path}/p.jsonl line {2 * number + 1}" and "outputs" not in failed
        assert told in failed["error"] and len(failed["error"]) < 2100, number
        assert good["outputs"][0]["text"] == expected("one")
    assert results[4]["id"] == 5
    told = f"{len(BAD_LINES)} of {len(lines)} prompts failed; the first: {tmp_path}/p.jsonl line 1: it is not JSON"
    assert told in printed.err and printed.err.count("\n") == 1


# ---- chat templates, and what the checkpoint recommends


def test_prompts_as_messages(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rendered = ["<user>one<assistant>", "<system>be<user>one<assistant>", "<system>be<user>two<assistant>"]
    assert generate(model, *rendered, "--json") == 0
    texts = [result["outputs"][0]["text"] for result in json_lines(capsys.readouterr().out)]
    assert generate(model, "--chat", "one") == 0
    assert capsys.readouterr().out == f"{texts[0]}\n"
    hi = {"messages": [{"role": "user", "content": "two"}]}
    lines = write_jsonl(tmp_path / "requests.jsonl", {"prompt": "one"}, hi, {"prompt_token_ids": [1]})
    assert generate(model, "--chat", "--system", "be", "--jsonl", lines, "--json") == 1
    one, two, ids = json_lines(capsys.readouterr().out)
    assert [result["outputs"][0]["text"] for result in (one, two)] == texts[1:]
    assert ids["error"] == "prompt_token_ids are no message, and --chat needs one: give a prompt or messages"
    assert generate(model, "--system", "be", "one") == 2
    assert "--system is a message of a conversation: add --chat" in capsys.readouterr().err
    bare = make_model(tmp_path / "bare", template=None)
    (tmp_path / "t.jinja").write_text(TEMPLATE)
    assert generate(bare, "--chat", "one", "--chat-template", str(tmp_path / "t.jinja")) == 0
    assert capsys.readouterr().out == f"{texts[0]}\n"
    assert generate(bare, "--chat", "one") == 1
    assert "has no chat template" in capsys.readouterr().err


# ---- what it says of itself


def test_a_refusal_names_numbers_and_arguments(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    few = ["--num-gpu-blocks", "10"]
    assert generate(model, "x" * 300, *few) == 1
    sentence = capsys.readouterr().err.splitlines()[-1]
    assert "as things are, prompts of up to 160 tokens fit" in sentence and "enable_cpu_offload=True" in sentence
    assert generate(model, "x" * 300, *few, "--json") == 1
    (result,) = json_lines(capsys.readouterr().out)
    assert result["error"].endswith("prompts of up to 160 tokens fit")
    assert generate(model, "one", *few, "--max-model-len", "200") == 2
    assert "which is 160 tokens for the longest sequence; lower max_model_len to that" in capsys.readouterr().err


# ---- Ctrl-C and closed pipes


def nanovllm_process(*options: str, **settings: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "nanovllm", *options]
    return subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **settings)


def test_a_pipe_is_answered_as_it_is_written_and_ctrl_c_ends_it(model: str, expected: Callable[[Any], str]) -> None:
    options = ["generate", "--model", model, *SMALL_CACHE, *GREEDY, "--lines", "-"]
    with nanovllm_process(*options, stdin=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        for prompt in ("one", "two words"):
            process.stdin.write(f"{prompt}\n")
            process.stdin.flush()
            assert process.stdout.readline() == expected(prompt) + "\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.read() == ""
        assert process.stderr.read() == "nanovllm generate: interrupted: 2 of at least 2 prompts were finished\n"
        assert process.wait(timeout=60) == 130
