"""The kernels for AVX512-bf16 on a machine with AVX-512 alone: their two instructions are put together from others."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_sanitizers import EXTENSIONS, REPOSITORY, build

from nanovllm.ops import _cpu_kernels

MODULE = "nanovllm/ops/_cpu_kernels"
FLAGS = [
    "-std=c++17", "-O0", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden", "-ffp-contract=off",
    "-DNANOVLLM_EMULATE_BF16",
]  # fmt: skip
TESTS = (
    "test_cpu_linear.py",
    "test_interleaved_weights.py",
    "test_cpu_layer.py",
    "test_cpu_attention.py",
    "test_cpu_attention_kv8.py",
    "test_batch_invariance.py",
)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++ to build with")
@pytest.mark.skipif("avx512" not in _cpu_kernels.instruction_sets(), reason="this machine has no AVX-512")
def test_bf16_kernels_without_bf16_instructions(tmp_path: Path) -> None:
    shutil.copytree(REPOSITORY / "nanovllm", tmp_path / "nanovllm", ignore=shutil.ignore_patterns("__pycache__"))
    build(tmp_path, MODULE, EXTENSIONS[MODULE][0], FLAGS)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    environment |= {"PYTHONPATH": str(tmp_path), "NANOVLLM_CPU_ISA": "avx512bf16"}
    files = [str(REPOSITORY / "tests" / name) for name in TESTS]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *files]
    result = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0 and " passed" in result.stdout, result.stdout[-3000:] + result.stderr[-3000:]
