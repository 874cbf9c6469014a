"""The GPU check where there is none, and its machinery on parts that behave and parts that do not."""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
WRITE = "import json, sys; json.dump({'gb_s': 1}, open(sys.argv[-1], 'w')); print('measured')"


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT)
    return importlib.import_module("benchmarks.gpu_check")


def part(check: ModuleType, name: str, code: str, seconds: int = 60, figures: bool = False) -> Any:
    return check.Part(name, ("-c", code), seconds, figures)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_so_in_a_sentence(
    check: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check.main(["--output-dir", str(tmp_path / "results")]) == 2
    assert capsys.readouterr().err == "gpu-check: torch sees no CUDA device, and this check is of nothing else.\n"
    assert not (tmp_path / "results").exists()


def test_every_part_can_be_started(check: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts and modules are there, and take the options that they are given."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for each in check.PARTS:
        if each.command[0] == "-m":
            assert importlib.util.find_spec(each.command[1]) is not None
        else:
            assert (ROOT / each.command[0]).is_file()
    for each in check.PARTS:
        if each.command[0] == "bench_offload.py":
            importlib.import_module("bench_offload").parse_args(each.command[1:])
        if each.command[0] == "bench.py":
            importlib.import_module("bench").parse_args(each.command[1:])
    assert len(check.PARTS) < 10 and len({each.name for each in check.PARTS}) == len(check.PARTS)


def test_a_part_that_fails_or_hangs_stops_no_other(check: ModuleType, tmp_path: Path) -> None:
    outcomes = check.run_all(
        [
            part(check, "measures", WRITE, figures=True),
            part(check, "fails", "print('why'); raise SystemExit(3)"),
            part(check, "hangs", "import time; print('begun', flush=True); time.sleep(60)", seconds=2),
            part(check, "dies", "import os; os.kill(os.getpid(), 9)"),
            part(check, "ends", "print('all is well')"),
        ],
        tmp_path,
        minutes=2,
    )
    found = {outcome.part: (outcome.good, outcome.note, outcome.output.strip()) for outcome in outcomes}
    assert found == {
        "measures": (True, "", "measured"),
        "fails": (False, "exit status 3", "why"),
        "hangs": (False, "stopped after 2 s", "begun"),
        "dies": (False, "exit status -9", ""),
        "ends": (True, "", "all is well"),
    }
    assert [outcome.figures for outcome in outcomes] == ["measures.json", None, None, None, None]
    assert json.loads((tmp_path / "measures.json").read_text()) == {"gb_s": 1}


def test_what_a_stopped_part_has_started_is_stopped_too(check: ModuleType, tmp_path: Path) -> None:
    code = (
        "import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']);"
        "print(child.pid, flush=True); child.wait()"
    )
    (outcome,) = check.run_all([part(check, "hangs", code, seconds=2)], tmp_path, minutes=1)
    process = Path(f"/proc/{int(outcome.output)}/stat")
    end = time.monotonic() + 10
    while process.exists() and process.read_text().rsplit(")", 1)[1].split()[0] != "Z" and time.monotonic() < end:
        time.sleep(0.05)
    assert not process.exists() or process.read_text().rsplit(")", 1)[1].split()[0] == "Z"


def test_figures_of_an_earlier_run_are_not_taken_for_new_ones(check: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "fails.json").write_text("{}")
    (outcome,) = check.run_all([part(check, "fails", "raise SystemExit(1)", figures=True)], tmp_path, minutes=1)
    assert outcome.figures is None and not (tmp_path / "fails.json").exists()


def test_parts_share_the_time_there_is(check: ModuleType, tmp_path: Path) -> None:
    sleeper = part(check, "sleeps", "import time; time.sleep(60)")
    first, second = check.run_all([sleeper, sleeper], tmp_path, minutes=2 / 60)
    assert first.note == "stopped after 2 s" and second.note == "no time was left for it"
    assert second.output == "" and second.seconds == 0


def test_the_report_holds_every_part(
    check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = (part(check, "build", "print('built')"), part(check, "tests", "raise SystemExit(1)"))
    monkeypatch.setattr(check, "PARTS", parts)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    machine = {"gpu": "a GPU", "torch": "2", "python": "3", "commit": "abc"}
    monkeypatch.setattr(check, "machine_facts", lambda device: {"device": device, **machine})
    monkeypatch.setattr(check, "PACKAGES", ("sys", "no_such_package"))
    directory = tmp_path / "new" / "results"
    assert check.main(["--output-dir", str(directory)]) == 1
    report = json.loads((directory / "gpu-check.json").read_text())
    assert report["machine"]["device"] == "cuda" and report["missing_packages"] == ["no_such_package"]
    assert [(p["part"], p["status"]) for p in report["parts"]] == [("build", 0), ("tests", 1)]
    assert str(tmp_path) not in (directory / "gpu-check.json").read_text()
    table = capsys.readouterr().out
    assert "missing packages: no_such_package" in table
    assert [line.split()[:2] for line in table.splitlines()[-2:]] == [["build", "good"], ["tests", "NOT"]]
    assert check.main(["--output-dir", str(directory), "--skip", "tests"]) == 0
    assert check.main(["--output-dir", str(directory), "--only", "tests"]) == 1


def test_a_part_that_does_not_exist_is_refused(check: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as stopped:
        check.main(["--output-dir", str(tmp_path), "--only", "everything"])
    assert stopped.value.code == 2


def test_parts_run_in_the_repository_with_its_package(check: ModuleType, tmp_path: Path) -> None:
    code = "import nanovllm, os; print(os.path.dirname(nanovllm.__file__))"
    (outcome,) = check.run_all([part(check, "where", code)], tmp_path, minutes=1)
    assert outcome.output.strip() == str(ROOT / "nanovllm")
    assert Path(sys.executable).exists() and os.environ.get("NANOVLLM_CUDA") != "1"
