"""The command line where things go wrong: an error of one request is its own, and all errors are sentences."""

from __future__ import annotations

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
from nanovllm.apps.cli.main import main


@pytest.fixture(scope="module")
def expected(model: str) -> str:
    with LLM(model, kvcache_block_size=16, num_gpu_blocks=80) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
        return llm.generate("one", params, use_tqdm=False)[0].outputs[0].text


def raising(error: BaseException) -> Callable[..., Any]:
    def raises(*_: Any, **__: Any) -> NoReturn:
        raise error

    return raises


# ---- one prompt of many


@pytest.mark.parametrize("where", ["read", "add", "result"])
def test_an_error_of_any_type_is_the_error_of_its_request(
    model: str, expected: str, where: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    owners: dict[str, tuple[Any, str]] = {
        "read": (prompts, "_read_content"),
        "add": (command.Generation, "_add"),
        "result": (command, "_text_result"),
    }
    owner, name = owners[where]
    function = getattr(owner, name)

    def fails_once(*args: Any) -> Any:
        if next(count) == 1:
            raise error
        return function(*args)

    for error in (KeyError("x"), TypeError("two\nlines"), MemoryError(), OSError(2, "no"), StopIteration()):
        verbose = ("--verbose",) * isinstance(error, KeyError)
        count = iter(range(10))
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fails_once)
            assert generate(model, "one", "one", "one", *verbose) == 1
        printed = capsys.readouterr()
        assert printed.out == f"{expected}\n\n{expected}\n"
        lead = "" if isinstance(error, OSError) else "unexpected error: "
        assert f"1 of 3 prompts failed; the first: prompt 2: {lead}" in printed.err
        assert ("Traceback" in printed.err) == bool(verbose) and (verbose or printed.err.count("\n") == 2)


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
    monkeypatch.setattr("nanovllm.engine.detokenizer.Detokenizer.step", raising(ValueError("no text")))
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
    for result in json_lines(capsys.readouterr().out):
        assert "the logits hold NaN or infinity, and so do the weights, in model.layers.1.mlp.up" in result["error"]
        assert result["outputs"][0]["finish_reason"] == "error" and result["outputs"][0]["token_ids"] == []
    for words in (["bench", "--prompt-len", "8", "--output-len", "2", "--json"], ["chat"]):
        with pytest.MonkeyPatch.context() as patch:
            set_stdin(patch, b"a question\n")
            assert main([words[0], "--model", str(tmp_path), *SMALL_CACHE, *words[1:]]) == 1
        told = capsys.readouterr()
        assert "and so do the weights" in told.err and "NaN" not in told.out


# ---- flags


def test_results_are_lines_of_json(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also of a request that bans nearly everything, whose log-probabilities are far apart."""
    bans = {str(token): -1e999 for token in range(299)}
    jsonl = write_jsonl(tmp_path / "p.jsonl", {"prompt": "a", "logit_bias": bans, "logprobs": 5})
    assert generate(model, "--json", "--jsonl", jsonl) == 0
    assert json_lines(capsys.readouterr().out)[0]["outputs"][0]["token_ids"] == [299] * 6
