"""`nanovllm generate` with more prompts than the engine holds at a time; results come in order."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from cli_helpers import generate, json_lines, write_jsonl

from nanovllm.apps.cli import generate as command
from nanovllm.apps.cli.boundary import Boundary
from nanovllm.apps.cli.prompts import Feed, Source


@pytest.fixture
def most(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The most prompts that were in the engine, and results that were held back for an earlier one."""
    most, put = {"running": 0, "held": 0}, command.Generation._put

    def counted(self: command.Generation, task: command.Task, line: str) -> None:
        put(self, task, line)
        most["running"] = max(most["running"], len(self._running) + 1)
        most["held"] = max(most["held"], len(self._unwritten) - len(self._running))

    monkeypatch.setattr(command.Generation, "_put", counted)
    return most


def test_a_long_file_runs_through_a_window(
    model: str, most: dict[str, int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every 100th prompt takes much longer than those behind it."""
    lines = [{"prompt": f"line {number}", "max_tokens": 40 if number % 100 == 0 else 1} for number in range(300)]
    jsonl = write_jsonl(tmp_path / "p.jsonl", *lines)
    assert generate(model, "--jsonl", jsonl, "--json", "--max-num-seqs", "4") == 0
    results = json_lines(capsys.readouterr().out)
    assert [result["index"] for result in results] == list(range(300))
    assert [len(result["outputs"][0]["token_ids"]) for result in results] == [line["max_tokens"] for line in lines]
    assert most["running"] <= command.WINDOW * 4 and 8 < most["held"] < command.WINDOW * 4


def test_long_prompts_fill_the_window_sooner(
    model: str, most: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "WINDOW_TOKENS", 250)
    (tmp_path / "lines.txt").write_text(f"{'long ' * 20}\n" * 10)
    assert generate(model, "--lines", str(tmp_path / "lines.txt"), "--max-num-seqs", "4") == 0
    assert most["running"] == 3


def test_a_pipe_that_waits_does_not_hold_up_what_is_there() -> None:
    read_end, write_end = os.pipe()
    os.write(write_end, b"one\n")
    feed = Feed([Source("lines", f"/dev/fd/{read_end}")], Boundary())
    assert feed.take(wait=True).prompt == "one"
    assert feed.take(wait=False) is None and not feed.ended
    os.write(write_end, b"two\n")
    os.close(write_end)
    assert feed.take(wait=True).prompt == "two"
    os.close(read_end)
    assert feed.take(wait=True) is None and feed.ended
