"""The command line where things go wrong: an error of one request is its own, and all errors are sentences."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest
from cli_helpers import SMALL_CACHE, generate, json_lines, make_model, set_stdin, write_jsonl
from safetensors.torch import load_file, save_file

from nanovllm import LLM, SamplingParams
from nanovllm.apps.cli import generate as command
from nanovllm.apps.cli import prompts
from nanovllm.apps.cli.boundary import LONGEST, Boundary
from nanovllm.apps.cli.generate import Requests
from nanovllm.apps.cli.main import main
from nanovllm.errors import one_line


@pytest.fixture(scope="module")
def expected(model: str) -> str:
    with LLM(model, kvcache_block_size=16, num_gpu_blocks=80) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
        return llm.generate("one", params, use_tqdm=False)[0].outputs[0].text


def strict(constant: str) -> NoReturn:
    raise AssertionError(f"{constant} is no JSON")


def raising(error: BaseException) -> Callable[..., Any]:
    def raises(*_: Any, **__: Any) -> NoReturn:
        raise error

    return raises


# ---- one line of many


BAD_LINES: list[tuple[object, str]] = [
    ({"prompt": "a", "logit_bias": {"9" * 5000: 1}}, "logit_bias='9999"),
    ({"prompt": "a", "logit_bias": {"٣" * 5000: 1}}, "logit_bias="),
    (b'{"prompt": "a", "top_k": ' + b"9" * 5000 + b"}", "it is not JSON: Exceeds the limit"),
    ({"prompt": "a", "stop": ["x" * 50_000, 5]}, "stop=['xxx"),
    ({"prompt": "a", "x" * 50_000: 5}, "unknown key 'xxx"),
    ({"prompt": ["x" * 50_000]}, "prompt must be text, got ['xxx"),
    (b'{"prompt": "a", "id": NaN}', "its id holds NaN"),
    (b'{"prompt": "a", "id": ' + b"[" * 900 + b"1e999" + b"]" * 900 + b"}", "its id holds NaN or infinity"),
    (b'{"prompt": "a", "temperature": NaN}', "temperature=nan: must be a number"),
    ({"prompt": "a", "cache_salt": {"a": 1}}, "cache_salt={'a': 1}: must be None or a string"),
    ({"prompt": "a", "n": [1]}, "n=[1]: must be a whole number"),
    ({"messages": [{"role": "user", "content": [[[[["deep"]]]]]}]}, "a part of a message must be"),
    ({"messages": [{"role": "x" * 50_000, "content": ""}]}, "no role xxx"),
]


def test_no_line_loses_another(model: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [line for bad, _ in BAD_LINES for line in (bad, {"prompt": "one"})]
    assert generate(model, "--json", "--jsonl", write_jsonl(tmp_path / "p.jsonl", *lines)) == 1
    printed = capsys.readouterr()
    results = [json.loads(line, parse_constant=strict) for line in printed.out.splitlines()]
    assert len(results) == 2 * len(BAD_LINES)
    for (_, told), failed, good in zip(BAD_LINES, results[::2], results[1::2], strict=True):
        assert told in failed["error"] and len(failed["error"]) < 2100 and "outputs" not in failed
        assert good["outputs"][0]["text"] == expected
    assert printed.err.count("\n") == 1 and "Traceback" not in printed.err
    assert f"{len(BAD_LINES)} of {len(lines)} prompts failed" in printed.err


ERRORS = (KeyError("x"), TypeError("two\nlines"), MemoryError(), OSError("no"), StopIteration())


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("where", ["read", "add", "result"])
def test_an_error_of_any_type_is_the_error_of_its_request(
    model: str,
    expected: str,
    error: Exception,
    where: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    owners: dict[str, tuple[Any, str]] = {
        "read": (prompts, "_parsed"),
        "add": (Requests, "add"),
        "result": (command, "text_result"),
    }
    owner, name = owners[where]
    function = getattr(owner, name)

    def fails_once(*args: Any) -> Any:
        if next(count) == 1:
            raise error
        return function(*args)

    for verbose in ((), ("--verbose",)):
        count = iter(range(10))
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fails_once)
            assert generate(model, "one", "one", "one", *verbose) == 1
        printed = capsys.readouterr()
        assert printed.out == f"{expected}\n\n{expected}\n"
        lead = "" if type(error) is OSError else "unexpected error: "
        assert f"1 of 3 prompts failed; the first: prompt 2: {lead}" in printed.err
        assert ("Traceback" in printed.err) == bool(verbose)
        assert verbose or printed.err.count("\n") == 2


@pytest.mark.parametrize("verbose", [(), ("--verbose",)], ids=["plain", "verbose"])
def test_an_error_of_the_command_is_a_sentence(
    model: str, verbose: Sequence[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nanovllm.llm.LLM", raising(ZeroDivisionError("two\nlines")))
    assert generate(model, "one", *verbose) == 1
    told = capsys.readouterr().err
    assert "nanovllm generate: error: unexpected error: two lines (ZeroDivisionError)" in told
    assert ("Traceback" in told) == bool(verbose)
    assert verbose or told.count("\n") == 1


def test_the_engine_logs_tracebacks_only_if_asked(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # pytest's
    monkeypatch.setattr("nanovllm.engine.detokenizer.StreamDetokenizer.step", raising(ValueError("no text")))
    for verbose in ((), ("--verbose",)):
        assert generate(model, "one", *verbose) == 1
        told = capsys.readouterr().err
        assert "the text of request '0' cannot be made\n" in told
        assert "the text cannot be made: no text (ValueError)" in told
        assert ("Traceback" in told) == bool(verbose)
    assert logging.getLogger("nanovllm").handlers == []


def test_nan_in_the_weights_is_no_nan_in_the_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_model(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][5] = float("nan")
    save_file(weights, tmp_path / "model.safetensors")
    capsys.readouterr()
    jsonl = write_jsonl(tmp_path / "p.jsonl", {"prompt": "one", "logprobs": 2, "prompt_logprobs": 2})
    assert generate(str(tmp_path), "--json", "--jsonl", jsonl, "two") == 1
    for line in capsys.readouterr().out.splitlines():
        result = json.loads(line, parse_constant=strict)
        assert "the logits hold NaN or infinity, and so do the weights, in model.layers.1.mlp.up" in result["error"]
        assert result["outputs"][0]["finish_reason"] == "error" and result["outputs"][0]["token_ids"] == []
    for words in (["bench", "--prompt-len", "8", "--output-len", "2", "--json"], ["chat"]):
        with pytest.MonkeyPatch.context() as patch:
            set_stdin(patch, b"a question\n")
            assert main([words[0], "--model", str(tmp_path), *SMALL_CACHE, *words[1:]]) == 1
        told = capsys.readouterr()
        assert "and so do the weights" in told.err and "NaN" not in told.out


def test_a_sentence_is_one_line_of_text() -> None:
    assert one_line("a\n  b\tc", LONGEST) == "a b c" and len(one_line("x" * 10**6, LONGEST)) == 2000
    assert one_line("\ud800", LONGEST) == "\\ud800"
    assert Boundary().sentence(FileNotFoundError(2, "No such file", "a\udcff")) == "'a\\udcff': No such file"


# ---- flags


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--swap-space", "1e300"], "swap_space=1e+300: must be None or a number of GiB"),
        (["--max-num-batched-tokens", "1" + "0" * 24], "max_num_batched_tokens=1000000000000000000000000: must be at"),
        (["--max-num-batched-tokens", "9" * 5000], "is not a whole number"),
        (["--max-model-len", "1" + "0" * 24], "must be at most 2,147,483,647"),
        (["--stop", "x" * 60_000, "--n", "0"], "n=0"),
        (["--dtype", "x" * 60_000], "dtype='xxx"),
        (["--" + "x" * 60_000], "unknown argument '--xxx"),
        (["--logit-bias", "9" * 5000 + "=1"], "is not a token id and a number"),
        (["--logit-bias", "9" * 4000 + "=1"], "logit_bias="),
    ],
)
def test_flags_beyond_any_machine(
    model: str, options: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: object = main(["generate", "--model", model, "one", *SMALL_CACHE, *options])
    except SystemExit as stopped:
        code = stopped.code
    printed = capsys.readouterr()
    if told != "logit_bias=":  # that is refused with the prompt
        assert code == 2
    assert printed.out in ("", "\n") and printed.err.count("\n") == 1
    assert told in printed.err and len(printed.err) < 2200


@pytest.mark.parametrize("value", ["1" + "0" * 24, "9" * 5000, "0", "-1", "x"])
def test_counts_of_plan_and_bench(model: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    for word in ("plan", "bench"):
        with pytest.raises(SystemExit) as stopped:
            main([word, "--model", model, "--prompt-len", value])
        told = capsys.readouterr().err
        assert stopped.value.code == 2 and "--prompt-len: " in told and "is not a number of tokens" in told
        assert len(told) < 600


# ---- a conversation


def test_an_error_of_a_question_ends_no_conversation(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from nanovllm.apps.cli.chat import Conversation

    prompt = Conversation.prompt

    def fails(self: Conversation, question: str) -> list[int]:
        if question == "bad":
            raise KeyError("in the question")
        return prompt(self, question)

    monkeypatch.setattr(Conversation, "prompt", fails)
    set_stdin(monkeypatch, b"one\nbad\n\xff\nthree\n")
    assert main(["chat", "--model", model, *SMALL_CACHE, "--max-tokens", "4", "--ignore-eos"]) == 1
    told = capsys.readouterr().err
    assert told.count("4 generated") == 2 and "Traceback" not in told
    assert "nanovllm chat: error: unexpected error: 'in the question' (KeyError)" in told
    assert "nanovllm chat: error: the question is not UTF-8" in told


def test_results_are_lines_of_json(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also of a request that bans nearly everything, whose log-probabilities are far apart."""
    bans = {str(token): -1e999 for token in range(299)}
    jsonl = write_jsonl(tmp_path / "p.jsonl", {"prompt": "a", "logit_bias": bans, "logprobs": 5})
    assert generate(model, "--json", "--jsonl", jsonl) == 0
    out = capsys.readouterr().out
    json.loads(out, parse_constant=strict)
    assert json_lines(out)[0]["outputs"][0]["token_ids"] == [299] * 6
