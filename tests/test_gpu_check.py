"""The GPU check where there is none, and its machinery on parts that behave and parts that do not."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
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
    return check.Part(name, ("-c", code), seconds, figures=figures)


def run(check: ModuleType, parts: list[Any], directory: Path, minutes: float = 2) -> list[Any]:
    outcomes: list[Any] = check.Check(directory).run(parts, minutes)
    return outcomes


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_so_in_a_sentence(
    check: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check.main(["--output-dir", str(tmp_path / "results")]) == 2
    assert capsys.readouterr().err == "gpu-check: torch sees no CUDA device, and this check is of nothing else.\n"
    assert not (tmp_path / "results").exists()


def test_a_part_finds_packages_that_this_process_finds(
    check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "carried.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "packages"))
    outcomes = run(check, [part(check, "imports", "import carried, nanovllm")], tmp_path)
    assert [outcome.status for outcome in outcomes] == [0]


@pytest.mark.slow
def test_a_part_that_fails_or_hangs_stops_no_other(check: ModuleType, tmp_path: Path) -> None:
    outcomes = run(
        check,
        [
            part(check, "measures", WRITE, figures=True),
            part(check, "fails", "print('why'); raise SystemExit(3)"),
            part(check, "hangs", "import time; print('begun', flush=True); time.sleep(600)", seconds=20),
            part(check, "dies", "import os; os.kill(os.getpid(), 9)"),
            part(check, "ends", "print('all is well')"),
        ],
        tmp_path,
    )
    found = {outcome.part: (outcome.good, outcome.note, outcome.output.split("\n")[0]) for outcome in outcomes}
    assert found == {
        "measures": (True, "", "measured"),
        "fails": (False, "exit status 3", "why"),
        "hangs": (False, "stopped after 20 s", "begun"),
        "dies": (False, "exit status -9", ""),
        "ends": (True, "", "all is well"),
    }
    assert [outcome.figures for outcome in outcomes] == [{"gb_s": 1}, None, None, None, None]
    assert not (tmp_path / "measures.json").exists(), "everything is in one file"


def test_the_facts_are_written_before_torch_is_imported(tmp_path: Path) -> None:
    """A machine whose torch does not even import still says what it is."""
    (tmp_path / "torch.py").write_text("raise ImportError('broken')")
    path = tmp_path / "facts.json"
    code = "import sys; sys.path.insert(0, sys.argv[1]); from benchmarks.gpu_facts import main; main(sys.argv[2:])"
    command = [sys.executable, "-c", code, str(tmp_path), "--output-json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert "broken" in done.stderr
    facts = json.loads(path.read_text())
    assert set(facts) == {"host", "memory", "tools", "packages"}
    assert facts["memory"]["MemTotal"] > 0 and facts["packages"]["pytest"]


def test_the_second_run_begins_with_what_failed_in_the_first(check: ModuleType, tmp_path: Path) -> None:
    """Every part of both runs is a part, and the first fits its minutes if all goes as expected."""
    parts = {part.name: part for part in check.PARTS}
    assert len(parts) == len(check.PARTS)
    assert set(check.FIRST) <= set(parts) and set(check.SECOND) <= set(parts)
    assert sum(parts[name].likely for name in check.FIRST) <= 60 * check.FIRST_MINUTES
    report = tmp_path / "gpu-check.json"
    good = [{"part": name, "status": 0} for name in check.FIRST if name not in ("features", "products", "tests")]
    report.write_text(
        json.dumps({"parts": [*good, {"part": "features", "status": 1}, {"part": "tests", "status": None}]})
    )
    args = check.parser().parse_args(["--output-dir", str(tmp_path), "--second"])
    names = [part.name for part in check.chosen(args)]
    assert names == ["build", "features", "products", *check.SECOND, "tests"], "products never began"
    args = check.parser().parse_args(["--output-dir", str(tmp_path), "--second", "--earlier", str(tmp_path / "none")])
    assert [part.name for part in check.chosen(args)] == ["build", *check.SECOND]
