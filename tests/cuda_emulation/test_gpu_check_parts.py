"""The parts of `make gpu-check` on the emulated GPU, with the tiny sizes of a dry run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu_check import PARTS, Part
from benchmarks.report import ROOT
from benchmarks.tiny import write_tiny_config

# Parts that do not run here, and why. Those without a device of their own in a dry run cannot be told another.
LEFT_OUT = {
    "smoke": "a part of its own of `make cuda-emulated`",
    "tests": "the same",
    "ranks": "NCCL is not emulated",
    "cpu-attention-32k": "the figures of offload-32k",
    "offload-32k": "its Triton kernels take minutes in the interpreter, and the engines' tests run such engines",
    "offload-128k": "the same",
    "kv-8-bits-32k": "the same",
    "features": "the same",
    "resident": "the same",
}
CHOSEN = [part for part in PARTS if "cpu" in part.dry and part.name not in LEFT_OUT]


@pytest.mark.parametrize("part", CHOSEN, ids=lambda part: part.name)
def test_a_part_runs(part: Part, tmp_path: Path) -> None:
    arguments = part.arguments(True, write_tiny_config(tmp_path / "model"), tmp_path / "figures.json")
    on_cuda = ["cuda" if each == "cpu" else each for each in arguments]
    found = subprocess.run([sys.executable, *on_cuda], cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr[-3000:]
