"""The suites about bits once more, on processors that this one can imitate, by what the libraries and kernels may use;
with two threads, while the other tests have one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nanovllm.ops import _cpu_kernels

PROCESSORS = {
    "avx512": {
        "NANOVLLM_CPU_ISA": "avx512",
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI",
        "MKL_ENABLE_INSTRUCTIONS": "AVX512",
        "ATEN_CPU_CAPABILITY": "avx512",
    },
    "avx2": {
        "NANOVLLM_CPU_ISA": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "MKL_CBWR": "AVX2",
        "ATEN_CPU_CAPABILITY": "avx2",
    },
}
SUITES = (
    "test_batch_invariance.py",
    "test_memory_budget.py",
    "test_seeded_requests.py",
    "test_generate.py",
    "test_cpu_linear.py",
    "test_interleaved_weights.py",
    "test_cpu_rows.py",
    "test_streamed_weights.py",
)


@pytest.mark.slow
@pytest.mark.parametrize("processor", PROCESSORS)
def test_bits_and_parity_hold_on(processor: str) -> None:
    if processor not in _cpu_kernels.instruction_sets():
        pytest.skip(f"this machine cannot imitate a processor with {processor}")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    environment |= {**PROCESSORS[processor], "OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2"}
    environment["OMP_WAIT_POLICY"] = "passive"  # other tests run on the same cores
    files = [str(Path(__file__).parent / name) for name in SUITES]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *files]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0 and " passed" in result.stdout, result.stdout[-3000:] + result.stderr[-3000:]
