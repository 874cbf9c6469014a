"""The benchmark scripts from end to end on a tiny network: what they report is there.

Those that are parts of the GPU check run in its dry run (`make gpu-check DRY=1`).
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
from checkpoints import make_checkpoint

ROOT = Path(__file__).resolve().parent.parent
MACHINE_FIELDS = {"date", "device", "cpu", "threads", "python", "torch", "nanovllm", "commit"}
TINY = ["--prompt-len", "20", "--output-len", "3"]
SCRIPTS: dict[str, tuple[str, list[str]]] = {  # the key of its results, and options
    "benchmarks.two_trees": ("results", [str(ROOT), *TINY, "--rounds", "2"]),
    "benchmarks.streamed_weights": ("results", [*TINY, "--dtype", "float32", "--device", "cpu", "--weights", "1%"]),
    "benchmarks.ranks": ("one_rank_step_s", [*TINY, "--dtype", "float32", "--device", "cpu"]),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_runs_and_writes_figures(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's peaks, which are not what is tested and take a second each, are quick."""
    monkeypatch.syspath_prepend(ROOT)
    peaks = importlib.import_module("benchmarks.peaks")
    for name, value in (("MATRIX", 64), ("BUFFER_BYTES", 4096), ("ROUNDS", 1)):
        monkeypatch.setattr(peaks, name, value)

    make_checkpoint(tmp_path, vocab=101, layers=3, hidden=64, max_positions=512)
    key, options = SCRIPTS[script]
    output = tmp_path / "report.json"
    main = importlib.import_module(script).main
    assert main([*options, "--model", str(tmp_path), "--output-json", str(output)]) == 0
    report = json.loads(output.read_text())
    assert report[key] and set(report.get("machine", report.get("facts"))) >= MACHINE_FIELDS
