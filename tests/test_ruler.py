"""The benchmark of RULER's tasks on a tiny model: what it asks, how it scores, and that it compares tokens."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gguf", reason="the package gguf is not installed")

from checkpoints import make_checkpoint
from gguf_files import VOCAB, write_gguf

from benchmarks import ruler


@pytest.fixture
def model(tmp_path: Path) -> str:
    network = make_checkpoint(tmp_path / "model", vocab=VOCAB)
    return str(write_gguf(tmp_path / "model.gguf", network))


def samples(tokenizer: Any, length: int, count: int) -> list[dict[str, Any]]:
    text = "th " * (length // 4)
    assert len(tokenizer(text).input_ids) < length
    return [{"input": f"{text}{number}", "outputs": ["x", ""], "gen_prefix": "is"} for number in range(count)]


def test_settings_are_asked_the_same_and_compared(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ruler, "TASKS", {"ruler_vt": ruler.Task(samples, 5, "\n")})
    monkeypatch.setattr(ruler, "SLACK", 16)
    report, sizes = tmp_path / "out.json", ["--lengths", "100", "200", "--samples", "2", "--block-size", "16"]
    command = ["--model", model, "--tasks", "ruler_vt", *sizes, "--settings", *ruler.SETTINGS]
    assert ruler.main([*command, "--output-json", str(report)]) == 0
    found = json.loads(report.read_text())
    assert [(each["setting"], each["equal"], each["of"]) for each in found["equal"]] == [
        ("offloaded", 4, 4),
        ("offloaded int8", 4, 4),
    ]
    assert len(found["results"]) == 16 and {row["score"] for row in found["results"]} <= {0.5, 1.0}
    assert "4 of 4 answers offloaded have the tokens of those resident" in capsys.readouterr().out
    answers = iter(range(100))
    monkeypatch.setattr(ruler, "answers", lambda *_: [{"answer_tokens": [next(answers)]}])
    monkeypatch.setattr(ruler, "mean_score", lambda *_: 0.0)
    assert ruler.main([*command, "--lengths", "100"]) == 1, "other tokens"


def test_scores_are_the_shares_of_the_expected_texts() -> None:
    question = ruler.Question("ruler_cwe", 100, [1], ("Ab", "cd", "ef", "gh"))
    assert question.score("1. ab 2. CD 3. xx") == 0.5


@pytest.mark.skipif(find_spec("lm_eval") is not None, reason="lm-eval is installed")
def test_without_lm_eval_a_sentence_says_so(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert ruler.main(["--model", model]) == 2
    error = capsys.readouterr().err
    assert "pip install 'lm-eval[ruler]==0.4.13'" in error and error.count("\n") == 1
