"""The output directory of a batch job: whatever is killed when, each row is written once."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.apps.batch import results as results_module
from nanovllm.apps.batch.results import ResultDirectory
from nanovllm.apps.batch.rows import Row, RowResult, failed_result
from nanovllm.errors import ConfigError

JOB = {"--model": "a", "--input": [1]}


def row(index: int, **columns: Any) -> Row:
    return Row(index, f"data.jsonl line {index + 1}", {}, {"id": index, **columns})


def result(index: int, text: str = "answer") -> RowResult:
    return RowResult(index, failed_result(index, "").columns | {"generated_text": text, "error": None})


def opened(path: Path, job: dict[str, Any] | None = None, **options: Any) -> ResultDirectory:
    directory = ResultDirectory(str(path), "jsonl", None, **options)
    directory.open(JOB if job is None else job, resume=True)
    return directory


def written(path: Path) -> list[dict[str, Any]]:
    parts = sorted(path.glob("part-*.jsonl"))
    return [json.loads(line) for part in parts for line in part.read_text().splitlines()]


class KilledError(BaseException):
    """The process ends here, as far as its files are concerned."""


class Killer:
    """Stands for the functions of the system that write, and kills before one of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, calls_left: int) -> None:
        self.calls_left = calls_left
        replace = Path.replace
        fsync = os.fsync

        def killed_replace(path: Path, target: Path) -> Path:
            self.count()
            return replace(path, target)

        def killed_fsync(descriptor: int) -> None:
            self.count()
            fsync(descriptor)

        monkeypatch.setattr(Path, "replace", killed_replace)
        monkeypatch.setattr(results_module.os, "fsync", killed_fsync)

    def count(self) -> None:
        self.calls_left -= 1
        if self.calls_left < 0:
            raise KilledError


def run_until_killed(path: Path, num_rows: int, part_rows: int, calls: int) -> bool:
    """Whether the job came to its end before the process was killed."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        Killer(monkeypatch, calls)
        directory = ResultDirectory(str(path), "jsonl", None, part_rows=part_rows)
        try:
            directory.open(JOB, resume=True)
            for index in range(num_rows):
                if index not in directory.done:
                    directory.add(row(index), result(index))
                    directory.flush_if_due()
            directory.finish()
        except KilledError:
            return False
        finally:
            directory.close()  # as the system does
        return True


@settings(max_examples=30)
@given(
    num_rows=st.integers(0, 25),
    part_rows=st.lists(st.integers(1, 8), min_size=1),
    kills=st.lists(st.integers(0, 12), max_size=8),
)
def test_every_row_is_written_once_whenever_the_process_is_killed(
    tmp_path_factory: pytest.TempPathFactory, num_rows: int, part_rows: list[int], kills: list[int]
) -> None:
    path = tmp_path_factory.mktemp("job") / "out"
    for number, calls in enumerate([*kills, 10_000]):
        ended = run_until_killed(path, num_rows, part_rows[number % len(part_rows)], calls)
        indices = [line["row_index"] for line in written(path)] if path.exists() else []
        assert len(indices) == len(set(indices))  # and every line is complete
        assert not ended or (path / "_SUCCESS").exists()
    assert sorted(indices) == list(range(num_rows))


def test_no_part_replaces_another(tmp_path: Path) -> None:
    opened(tmp_path).close()
    for index, number in enumerate((999_999, 1_000_000)):
        (tmp_path / f"part-{number}.jsonl").write_text(f'{{"row_index": {index}, "error": null}}\n')
    with opened(tmp_path) as directory:
        directory.add(row(2), result(2))
    assert sorted(line["row_index"] for line in written(tmp_path)) == [0, 1, 2]


def test_results_wait_for_their_part_no_longer_than_said(tmp_path: Path) -> None:
    now = [100.0]
    with opened(tmp_path, clock=lambda: now[0]) as directory:
        for index, waited, parts in ((0, 9.9, 0), (1, 0.2, 1), (2, 9.9, 1), (3, 0.2, 2)):
            directory.add(row(index), result(index))
            now[0] += waited
            directory.flush_if_due()
            assert len(list(tmp_path.glob("part-*.jsonl"))) == parts
    assert [line["row_index"] for line in written(tmp_path)] == list(range(4))


def refused(path: Path, sentence: str, job: dict[str, Any] = JOB, resume: bool = True) -> None:
    with pytest.raises(ConfigError, match=sentence):
        ResultDirectory(str(path), "jsonl", None).open(job, resume)


def test_refusals(tmp_path: Path) -> None:
    with opened(tmp_path / "out"):
        refused(tmp_path / "out", "is being written by another process")
    refused(tmp_path / "out", "has results of an earlier run: --resume", resume=False)
    refused(tmp_path / "out", "was begun with other values of --model", {**JOB, "--model": "b"})
    (tmp_path / "out" / "part-000000.jsonl").write_text('{"row_index": 1}\n')
    refused(tmp_path / "out", "is damaged")
    (tmp_path / "out" / "_job.json").write_text("{")
    refused(tmp_path / "out", "is damaged: name a new directory")
    (tmp_path / "file").write_text("")
    refused(tmp_path / "file", "cannot be used: File exists")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("")
    refused(tmp_path / "other", "has other files: name a new or empty directory")
    (tmp_path / "other" / "notes.txt").unlink()
    opened(tmp_path / "other").close()  # a refusal left no lock
