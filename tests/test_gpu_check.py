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


# ---- bars


def offload_figures(ratio: float, decode: float = 10.0) -> dict[str, Any]:
    """What bench_offload.py writes, as far as the bars read it."""
    result = {
        "ratios": {
            "on device": {"prefill": {"median": ratio}},
            "offload, KV in the model's dtype": {"decode": {"median": 1.8}},
        },
        "prefill_gflop_s": 480_000.0,
        "traffic": {"offload": {"decode_h2d_gb_s": 45.0}},
        "rates": {"offload": {"decode_tok_s": {"median": decode}}},
        "kernel_gaps": {"prefill": {"idle_s": 0.04, "span_s": 1.0}},
    }
    return {"ceilings": {"matmul_gflop_s": 800_000.0, "copy_gb_s": {"h2d": 50.0}}, "results": [result]}


def good_parts() -> dict[str, Any]:
    copies = [{"way": "strided", "of_contiguous": {"median": m}} for m in (0.99, 0.975)]
    merge = [{"tokens": 16384, "times": 5.0}, {"tokens": 1024, "times": 9.0}]
    figures = {
        "copies": {"results": [*copies, {"way": "torch, strided", "of_contiguous": {"median": 0.1}}]},
        "kernels": {"kernels": {"merge": merge}},
        "offload-32k": offload_figures(0.98),
        "offload-128k": offload_figures(0.99),
        "cpu-attention-32k": offload_figures(0.98, decode=13.5),
        "kv-8-bits-32k": offload_figures(0.98),
    }
    parts = {name: {"part": name, "figures": found, "output": ""} for name, found in figures.items()}
    return parts | {"recall-128k": {"part": "recall-128k", "figures": None, "output": "32 of 32 answers are right\n"}}


def test_a_bar_that_is_missed_or_was_not_measured_is_not_met(check: ModuleType, tmp_path: Path) -> None:
    parts = good_parts()
    parts["recall-128k"]["output"] = "31 of 32 answers are right\n"
    parts["offload-128k"]["figures"] = None
    del parts["copies"]
    missed = [bar.name for bar in check.gpu_bars.bars(parts) if not bar.met]
    assert missed == ["strided copy / contiguous", "prefill at 128K, offloaded / resident", "recall at 128K"]
    path = tmp_path / "report.json"
    path.write_text(json.dumps({"parts": list(parts.values())}))
    assert check.gpu_bars.main([str(path)]) == 1
    path.write_text(json.dumps({"parts": list(good_parts().values())}))
    assert check.gpu_bars.main([str(path)]) == 0
