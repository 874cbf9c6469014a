"""The GPU check where there is none, and its machinery on parts that behave and parts that do not."""

from __future__ import annotations

import importlib
import importlib.util
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


@pytest.mark.slow
def test_a_part_that_fails_or_hangs_stops_no_other(check: ModuleType, tmp_path: Path) -> None:
    outcomes = run(
        check,
        [
            part(check, "measures", WRITE, figures=True),
            part(check, "fails", "print('why'); raise SystemExit(3)"),
            part(check, "hangs", "import time; print('begun', flush=True); time.sleep(60)", seconds=5),
            part(check, "dies", "import os; os.kill(os.getpid(), 9)"),
            part(check, "ends", "print('all is well')"),
        ],
        tmp_path,
    )
    found = {outcome.part: (outcome.good, outcome.note, outcome.output.split("\n")[0]) for outcome in outcomes}
    assert found == {
        "measures": (True, "", "measured"),
        "fails": (False, "exit status 3", "why"),
        "hangs": (False, "stopped after 5 s", "begun"),
        "dies": (False, "exit status -9", ""),
        "ends": (True, "", "all is well"),
    }
    assert [outcome.figures for outcome in outcomes] == [{"gb_s": 1}, None, None, None, None]
    assert not (tmp_path / "measures.json").exists(), "everything is in one file"


@pytest.mark.slow
def test_a_run_that_is_cut_short_loses_only_what_had_not_ended(tmp_path: Path) -> None:
    """Killed in its second part, as a machine that is taken away would do it."""
    code = f"""
import sys, types
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from benchmarks.gpu_check import Check, Part
first = Part("first", ("-c", {WRITE!r}), 60)
second = Part("second", ("-c", "import time; print('under way', flush=True); time.sleep(60)"), 60, figures=False)
Check(Path({str(tmp_path)!r})).run([first, second], 2)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if "under way" in line and "----" not in line:
            break
    process.kill()
    process.wait()
    (outcome,) = json.loads((tmp_path / "gpu-check.json").read_text())["parts"]
    assert outcome["part"] == "first" and outcome["status"] == 0 and outcome["figures"] == {"gb_s": 1}
    assert "under way" in (tmp_path / "gpu-check.log").read_text()
