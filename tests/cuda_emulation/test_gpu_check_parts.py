"""The parts of `make gpu-check` on the emulated GPU, with the tiny sizes of a dry run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu_check import PARTS, Part
from benchmarks.report import ROOT
from benchmarks.tiny import write_tiny_config

# Parts that do not run here, and why.
LEFT_OUT = {
    "build": "the environment has built the extension",
    "smoke": "a part of its own of `make cuda-emulated`",
    "tests": "the same",
    "ranks": "NCCL is not emulated",
}
if torch.__version__ < "2.13":
    LEFT_OUT["products"] = "this torch has the product of fp8 with scales for CUDA alone"
CHOSEN = [part for part in PARTS if part.name not in LEFT_OUT]


@pytest.mark.parametrize("part", CHOSEN, ids=lambda part: part.name)
def test_a_part_runs(part: Part, tmp_path: Path) -> None:
    arguments = part.arguments(True, write_tiny_config(tmp_path / "model"), tmp_path / "figures.json")
    on_cuda = ["cuda" if argument == "cpu" else argument for argument in arguments]
    dry = os.environ | {"NANOVLLM_DRY_RUN": "1"}
    done = subprocess.run([sys.executable, *on_cuda], cwd=ROOT, env=dry, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
