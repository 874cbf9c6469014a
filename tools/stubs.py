"""Write the type stubs of the C++ extensions: `python -m tools.stubs [DIR]`.

pybind11-stubgen reads the built extensions; ruff formats what it writes. DIR is the folder that holds `nanovllm`, by
default this tree. tests/test_stubs.py holds the committed stubs to it.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MODULES = ("nanovllm.ops._cpu_kernels", "nanovllm.comm._sgdma")
# pybind11 takes whatever converts to a number. Callers pass numbers, and mypy should hold them to it.
NUMBERS = (
    (re.compile(r"typing\.SupportsInt( \| typing\.SupportsIndex)?"), "int"),
    (re.compile(r"typing\.SupportsFloat( \| typing\.SupportsIndex)?"), "float"),
)


def write_stubs(directory: Path) -> list[Path]:
    """Write the stub of each extension below `directory`. Returns their paths."""
    command = [sys.executable, "-m", "pybind11_stubgen", *MODULES, "--exit-code", "--output-dir", str(directory)]
    subprocess.run(command, cwd=ROOT, check=True)
    stubs = [directory / f"{name.replace('.', '/')}.pyi" for name in MODULES]
    for stub in stubs:
        text = stub.read_text()
        for pattern, number in NUMBERS:
            text = pattern.sub(number, text)
        stub.write_text(text)
    settings = ("--quiet", "--config", str(ROOT / "pyproject.toml"), *map(str, stubs))
    for step in (("format",), ("check", "--fix"), ("format",)):
        subprocess.run([sys.executable, "-m", "ruff", *step, *settings], check=True)
    return stubs


if __name__ == "__main__":
    for path in write_stubs(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT):
        print(path)
