"""`nanovllm generate` with more prompts than the engine holds at a time; results come in order."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_helpers import generate, json_lines, write_jsonl

from nanovllm.apps.cli import generate as command


@pytest.fixture
def most(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The most prompts that were in the engine, and results that were held back for an earlier one."""
    most = {"running": 0, "held": 0}
    put = command.Generation._put

    def counted(self: command.Generation, task: command.Task, line: str) -> None:
        put(self, task, line)
        most["running"] = max(most["running"], len(self._running) + 1)
        most["held"] = max(most["held"], len(self._unwritten) - len(self._running))

    monkeypatch.setattr(command.Generation, "_put", counted)
    return most


def test_a_long_file_runs_through_a_window(
    model: str, most: dict[str, int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every 50th prompt takes much longer than those behind it."""
    lines = [{"prompt": f"line {number}", "max_tokens": 40 if number % 50 == 0 else 1} for number in range(100)]
    jsonl = write_jsonl(tmp_path / "p.jsonl", *lines)
    assert generate(model, "--jsonl", jsonl, "--json", "--max-num-seqs", "4") == 0
    results = json_lines(capsys.readouterr().out)
    assert [result["index"] for result in results] == list(range(100))
    assert [len(result["outputs"][0]["token_ids"]) for result in results] == [line["max_tokens"] for line in lines]
    assert most["running"] <= command.WINDOW * 4 and 8 < most["held"] < command.WINDOW * 4
