"""What `nanovllm generate` refuses at once, in one sentence and before a model is loaded; and help, as quickly."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint
from cli_helpers import exit_status, generate, json_lines, set_stdin, write_jsonl

from nanovllm.apps.cli import generate as command
from nanovllm.apps.cli import prompts
from nanovllm.engine.model_runner import ModelRunner


def test_refusals_cost_one_sentence_and_no_model(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("text")
    monkeypatch.setattr(ModelRunner, "execute", None)
    for words, told in (
        ([], "no model is given: name it first, as in nanovllm generate DIR, or with --model DIR"),
        (["x"], "there is no prompt for the model 'x'"),
        ([model], "there is no prompt"),
        ([model, "--model", "other", "x"], f"the model is given twice, as '{model}' and --model 'other': give one"),
        ([model, "--temprature", "1", "x"], "'--temprature': did you mean '--temperature'?"),
        ([model, "x", "--kv-cache-tipe", "auto"], "'--kv-cache-tipe': did you mean '--kv-cache-dtype'?"),
        ([model, "--zzzz"], "see nanovllm generate --help"),
        ([model, "x", "--cpu-offload-gb", "4"], "cpu_offload_gb=4 is not supported: it must be 0"),
        ([model, "x", "--no-enable-cpu-offload", "--kv-offloading-size", "1"], "--kv-offloading-size is the memory"),
        ([model, "x", "--block-size", "7"], "kvcache_block_size=7"),
        ([model, "x", "--num-cpu-blocks", "8"], "num_cpu_blocks=8"),
        ([model, "x", "--temperature", "-1"], "temperature=-1.0"),
        ([model, "x", "--stop", "\udcff"], "is not valid UTF-8"),
        ([f"{tmp_path}/nothing", "x"], "is not a directory: give the path"),
        ([str(tmp_path), "x"], "config.json does not exist"),
        ([model, "--file", f"{tmp_path}/nothing"], "nothing' cannot be read: No such file or directory"),
        ([model, "--lines", str(tmp_path)], "cannot be read: Is a directory"),
        (["--model", model, "--file", "-", "-"], "standard input can be read once only"),
        ([model, "x", "--output", f"{tmp_path}/no/where"], "cannot be written: No such file or directory"),
        ([model, "--file", f"{tmp_path}/file", "--output", f"{tmp_path}/file"], "is also read"),
        ([model, "x", "--chat-template", f"{tmp_path}/nothing"], "--chat-template"),
        ([model, "x", "--stream", "--json"], "leave one of them out"),
        ([model, "x", "--stream", "--n", "2"], "n=2: --stream shows one sequence"),
    ):
        set_stdin(monkeypatch, b"", is_terminal=True)
        assert exit_status(["generate", *words]) == 2
        printed = capsys.readouterr()
        assert printed.out == "" and printed.err.count("\n") == 1 and told in printed.err
        assert printed.err.startswith("nanovllm generate: error: ")
    assert (tmp_path / "file").read_text() == "text"


def test_a_model_without_a_tokenizer_takes_and_gives_token_ids(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_checkpoint(tmp_path, vocab=97)
    capsys.readouterr()
    jsonl = write_jsonl(tmp_path / "p.jsonl", {"prompt_token_ids": [1, 2]})
    assert generate(str(tmp_path), "text") == 2
    assert generate(str(tmp_path), "--jsonl", jsonl) == 2
    told = capsys.readouterr().err
    assert told.count("has no tokenizer files") == told.count("\n") == 2
    assert generate(str(tmp_path), "--jsonl", jsonl, "--json", "--dtype", "float32") == 0
    (result,) = json_lines(capsys.readouterr().out)
    assert len(result["outputs"][0]["token_ids"]) == 6


def test_help_needs_no_torch() -> None:
    code = (
        "import sys; from nanovllm.apps.cli.main import main\n"
        "for words in (['--help'], ['generate', '--help'], ['chat', '--help']):\n"
        "    try: main(words)\n"
        "    except SystemExit as stopped: assert stopped.code == 0\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    for command_name in ("generate", "chat", "plan"):
        assert command_name in done.stdout


@pytest.mark.parametrize(
    ("owner", "name"), [(prompts, "_read_content"), (command.Generation, "_add"), (command, "_text_result")]
)
def test_an_error_of_any_type_is_the_error_of_its_request(
    model: str, owner: Any, name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a prompt is read, added, and its result is written."""
    function = getattr(owner, name)
    calls = iter(range(10))

    def fails_once(*args: Any) -> Any:
        if next(calls) == 1:
            raise MemoryError
        return function(*args)

    monkeypatch.setattr(owner, name, fails_once)
    assert generate(model, "--quiet", "one", "one", "one") == 1
    printed = capsys.readouterr()
    first, failed, third, end = printed.out.split("\n")
    assert first == third != failed == end == ""
    assert "1 of 3 prompts failed; the first: prompt 2: unexpected error: " in printed.err
    assert printed.err.count("\n") == 2


@pytest.mark.parametrize("verbose", [(), ("--verbose",)], ids=["plain", "verbose"])
def test_an_error_of_the_command_is_a_sentence(
    model: str, verbose: Sequence[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise ZeroDivisionError("two\nlines")

    monkeypatch.setattr("nanovllm.llm.LLM", fails)
    assert generate(model, "one", *verbose) == 1
    told = capsys.readouterr().err
    assert "nanovllm generate: error: unexpected error: two lines (ZeroDivisionError)" in told
    assert ("Traceback" in told) == bool(verbose)
    assert verbose or told.count("\n") == 1
