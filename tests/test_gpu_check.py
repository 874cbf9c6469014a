"""The GPU check where there is none, and its machinery on parts that behave and parts that do not."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
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


@pytest.mark.parametrize("dry", [False, True])
def test_every_part_can_be_started(
    check: ModuleType, dry: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scripts and modules are there, and take the options that they are given."""
    if not dry:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for each in check.PARTS:
        arguments = each.arguments(dry, check.write_tiny_config(tmp_path / "model"), tmp_path / "figures.json")
        if arguments[0] == "-m":
            assert importlib.util.find_spec(arguments[1]) is not None
        else:
            assert (ROOT / arguments[0]).is_file()
        if arguments[0] in ("bench_offload.py", "bench.py"):
            importlib.import_module(arguments[0].removesuffix(".py")).parse_args(arguments[1:])
    names = [each.name for each in check.PARTS]
    assert len(names) == len(set(names))
    assert names[:2] == ["facts", "build"], "what the machine is comes first"


def test_the_guide_names_every_part_and_the_time_after_which_it_is_ended(check: ModuleType) -> None:
    guide = (ROOT / "benchmarks" / "GPU.md").read_text()
    rows = [line.strip("|").split("|") for line in guide.splitlines() if line.startswith("|")]
    told = {cells[0].strip(): cells[-1].strip() for cells in rows if len(cells) == 4}
    for each in check.PARTS:
        assert told[each.name] == f"{each.seconds} s"
    commands = [cells[1] for cells in rows if cells[0].strip() in ("first", "second", "third", "fourth")]
    named = [name for command in commands for name in command.split('PART="')[1].split('"')[0].split()]
    assert set(named) == {each.name for each in check.PARTS}


def test_a_part_that_fails_or_hangs_stops_no_other(check: ModuleType, tmp_path: Path) -> None:
    outcomes = run(
        check,
        [
            part(check, "measures", WRITE, figures=True),
            part(check, "fails", "print('why'); raise SystemExit(3)"),
            part(check, "hangs", "import time; print('begun', flush=True); time.sleep(60)", seconds=3),
            part(check, "dies", "import os; os.kill(os.getpid(), 9)"),
            part(check, "ends", "print('all is well')"),
        ],
        tmp_path,
    )
    found = {outcome.part: (outcome.good, outcome.note, outcome.output.split("\n")[0]) for outcome in outcomes}
    assert found == {
        "measures": (True, "", "measured"),
        "fails": (False, "exit status 3", "why"),
        "hangs": (False, "stopped after 3 s", "begun"),
        "dies": (False, "exit status -9", ""),
        "ends": (True, "", "all is well"),
    }
    assert [outcome.figures for outcome in outcomes] == [{"gb_s": 1}, None, None, None, None]
    assert not (tmp_path / "measures.json").exists(), "everything is in one file"


@pytest.mark.slow
def test_a_part_that_hangs_says_where(check: ModuleType, tmp_path: Path) -> None:
    """All threads, also one that holds the interpreter's lock."""
    code = "import threading\nevent = threading.Event()\ndef waits(): event.wait()\n"
    code += "threading.Thread(target=waits).start()\nsum(range(10**12))"
    (outcome,) = run(check, [part(check, "hangs", code, seconds=3)], tmp_path)
    assert "in waits" in outcome.output and "line 5 in <module>" in outcome.output


@pytest.mark.slow
def test_what_a_stopped_part_has_started_is_stopped_too(check: ModuleType, tmp_path: Path) -> None:
    code = (
        "import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']);"
        "print(child.pid, flush=True); child.wait()"
    )
    (outcome,) = run(check, [part(check, "hangs", code, seconds=3)], tmp_path)
    process = Path(f"/proc/{int(outcome.output.split()[0])}/stat")
    end = time.monotonic() + 10
    while process.exists() and process.read_text().rsplit(")", 1)[1].split()[0] != "Z" and time.monotonic() < end:
        time.sleep(0.05)
    assert not process.exists() or process.read_text().rsplit(")", 1)[1].split()[0] == "Z"


def test_figures_of_an_earlier_run_are_not_taken_for_new_ones(check: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "fails.json").write_text("{}")
    (outcome,) = run(check, [part(check, "fails", "raise SystemExit(1)", figures=True)], tmp_path)
    assert outcome.figures is None and not (tmp_path / "fails.json").exists()


@pytest.mark.slow
def test_figures_written_before_a_part_was_stopped_are_kept(check: ModuleType, tmp_path: Path) -> None:
    code = f"{WRITE}; import time; sys.stdout.flush(); time.sleep(60)"
    (outcome,) = run(check, [part(check, "hangs", code, seconds=3, figures=True)], tmp_path)
    assert outcome.figures == {"gb_s": 1} and outcome.status is None


def test_a_part_is_not_begun_with_less_time_than_it_takes(check: ModuleType, tmp_path: Path) -> None:
    long = check.Part("long", ("-c", "raise SystemExit(1)"), 600, likely=100, figures=False)
    outcomes = run(check, [long, part(check, "short", "print('ran')")], tmp_path, minutes=1)
    assert outcomes[0].note.startswith("not run:") and outcomes[0].status is None and not outcomes[0].date
    assert outcomes[1].good
    report = json.loads((tmp_path / "gpu-check.json").read_text())
    assert [p["part"] for p in report["parts"]] == ["short"], "an earlier run's outcome of the other would stay"


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


def test_the_report_holds_every_part_of_earlier_runs_too(
    check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = (part(check, "build", "print('built')"), part(check, "tests", "raise SystemExit(1)"))
    monkeypatch.setattr(check, "PARTS", parts)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    machine = {"gpu": "a GPU", "torch": "2", "python": "3", "commit": "abc"}
    monkeypatch.setattr(check, "machine_facts", lambda device: {"device": device, **machine})
    directory = tmp_path / "new" / "results"
    assert check.main(["--output-dir", str(directory)]) == 1
    report = json.loads((directory / "gpu-check.json").read_text())
    assert report["machine"]["device"] == "cuda" and len(report["bars"]) == 10
    assert [(p["part"], p["status"], p["commit"]) for p in report["parts"]] == [
        ("build", 0, "abc"),
        ("tests", 1, "abc"),
    ]
    assert str(tmp_path) not in (directory / "gpu-check.json").read_text()
    table = capsys.readouterr().out
    assert [line.split()[:2] for line in table.splitlines()[-2:]] == [["build", "good"], ["tests", "NOT"]]
    assert check.main(["--output-dir", str(directory), "--skip", "tests"]) == 0
    assert [p["part"] for p in json.loads((directory / "gpu-check.json").read_text())["parts"]] == ["build", "tests"]
    assert check.main(["--output-dir", str(directory), "--only", "tests"]) == 1


def test_a_part_that_does_not_exist_is_refused(check: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as stopped:
        check.main(["--output-dir", str(tmp_path), "--only", "everything"])
    assert stopped.value.code == 2


def test_parts_run_in_the_repository_with_its_package(check: ModuleType, tmp_path: Path) -> None:
    code = "import nanovllm, os; print(os.path.dirname(nanovllm.__file__))"
    (outcome,) = run(check, [part(check, "where", code)], tmp_path)
    assert outcome.output.strip() == str(ROOT / "nanovllm")
    assert Path(sys.executable).exists() and os.environ.get("NANOVLLM_CUDA") != "1"


def test_a_copy_without_git_is_told_its_commit(check: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    report = importlib.import_module("benchmarks.report")
    monkeypatch.setenv("NANOVLLM_COMMIT", "abc1234")
    assert report.machine_facts("cpu")["commit"] == "abc1234"
    monkeypatch.delenv("NANOVLLM_COMMIT")
    monkeypatch.setattr(report, "ROOT", Path("/"))
    assert report.machine_facts("cpu")["commit"] is None


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


def test_bars_are_read_from_the_figures(check: ModuleType) -> None:
    found = {bar.name: (round(bar.value, 3), bar.met) for bar in check.gpu_bars.bars(good_parts())}
    assert list(found.values()) == [
        (0.975, True), (5.0, True), (0.98, True), (0.99, True), (0.6, True), (0.9, True), (1.35, True), (1.8, True),
        (0.04, True), (1.0, True),
    ]  # fmt: skip


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
