"""Every Triton kernel compiles for the GPUs that it is meant for, within their memory, without any of them there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SHARED_LIMIT = {80: 163 << 10, 86: 99 << 10, 90: 227 << 10}  # bytes that a program may have (CUDA C++ Guide, 16.2)
REGISTERS = 65536  # of a multiprocessor
KERNELS = {"_prefill_kernel", "_decode_kernel", "_reduce_kernel", "_merge_kernel", "_store_kernel", "_norm_kernel",
           "_heads_kernel", "_silu_kernel", "_draw_kernel"}  # fmt: skip


def compiled(arch: int, dtype: str, head_dims: tuple[int, ...], cache: Path) -> list[dict[str, object]]:
    """The table of triton_compile.py, compiled afresh by the compiler and not the interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(Path(__file__).with_name("triton_compile.py")), str(arch), dtype]
    command += map(str, head_dims)
    environment |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600, check=False)
    assert result.returncode == 0, result.stderr
    table: list[dict[str, object]] = json.loads(result.stdout)
    return table


@pytest.mark.parametrize(
    "arch, dtype, head_dims",
    [
        (90, "bfloat16", (128,)),
        pytest.param(80, "bfloat16", (64, 80, 96, 112, 128, 256), marks=pytest.mark.slow),
        pytest.param(80, "float32", (64, 128, 256), marks=pytest.mark.slow),
        pytest.param(86, "float16", (64, 128, 256), marks=pytest.mark.slow),
        pytest.param(90, "bfloat16", (64, 80, 96, 112, 256), marks=pytest.mark.slow),
        pytest.param(90, "float32", (64, 128, 256), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_kernels_compile_and_fit(arch: int, dtype: str, head_dims: tuple[int, ...], tmp_path: Path) -> None:
    """Prints the table: see it with pytest -s. fp32 is not for speed, and may spill registers."""
    table = compiled(arch, dtype, head_dims, tmp_path)
    print(f"\nsm_{arch}  {'launch':<24}{'kernel':<18}{'dtype':<10}{'head':>5}{'regs':>6}{'spilled':>9}{'shared':>9}")
    for row in table:
        print(
            f"       {row['launch']:<24}{row['kernel']:<18}{row['dtype']:<10}{row['head_dim']:>5}{row['registers']:>6}"
            f"{row['spilled']:>9}{row['shared']:>9}"
        )
    assert {row["kernel"] for row in table} == KERNELS
    assert {row["head_dim"] for row in table} == set(head_dims)
    for row in table:
        assert row["spilled"] == 0 or dtype == "float32", f"registers spill: {row}"
        assert row["shared"] <= SHARED_LIMIT[arch], f"too much shared memory: {row}"
        assert row["registers"] * row["threads"] <= REGISTERS, f"too many registers: {row}"
