"""The C++ extensions, built with address and undefined-behaviour sanitizers, through their own tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path

import pybind11
import pytest

REPOSITORY = Path(__file__).parent.parent
EXTENSIONS = {  # module -> (sources, tests that exercise it)
    "nanovllm/comm/_sgdma": (("sgdma*.cpp",), ("test_sgdma.py", "test_pinned.py")),
    "nanovllm/ops/_cpu_kernels": (
        ("cpu_*.cpp",),
        (
            "test_cpu_attention.py",
            "test_cpu_attention_kv8.py",
            "test_host_attention.py",
            "test_paged_step.py",
            "test_cpu_linear.py",
            "test_interleaved_weights.py",
            "test_cpu_rows.py",
            "test_cpu_layer.py",
            "test_delta_rule.py",
            "test_packed_linear.py",
        ),
    ),
}
FLAGS = [
    "-std=c++17",
    "-O0",  # compiles in a third of the time, and leaves out no access
    "-g1",  # lines, which is all that a report needs
    "-fPIC",
    "-shared",
    "-pthread",
    "-fvisibility=hidden",
    "-fno-omit-frame-pointer",
]
ADDRESS = ["-fsanitize=address"]
ADDRESS_AND_UNDEFINED = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
VECTOR_FILES = ("_avx2", "_avx512", "_avx512bf16", "_avx512vnni")


def sanitizers_of(file: Path) -> list[str]:
    """Undefined behaviour is looked for in all but the kernels of vector units: these are the templates of the portable
    ones with the same arithmetic of indices, and would take three times as long to compile."""
    return ADDRESS if file.stem.endswith(VECTOR_FILES) else ADDRESS_AND_UNDEFINED


def build(
    package_parent: Path,
    module: str,
    sources: Sequence[str],
    flags: Sequence[str],
    own_flags: Callable[[Path], list[str]] = lambda file: [],
) -> None:
    """Compile an extension into a copy of the package. own_flags: of each file, besides `flags` for all."""
    target = package_parent / f"{module}{sysconfig.get_config_var('EXT_SUFFIX')}"
    includes = [f"-I{sysconfig.get_paths()['include']}", f"-I{pybind11.get_include()}"]
    files = sorted(path for source in sources for path in (REPOSITORY / "csrc").glob(source))
    link = list(flags)
    for file in files:
        command = ["g++", *flags, *own_flags(file), *includes]
        compiled = target.with_name(f"{file.stem}.o")
        subprocess.run([*command, "-c", str(file), "-o", str(compiled)], check=True)
        link += [str(compiled), *(flag for flag in own_flags(file) if flag not in link)]
    subprocess.run(["g++", *link, "-o", str(target)], check=True)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++ to build with")
@pytest.mark.parametrize("module", EXTENSIONS)
def test_no_bad_access_and_no_undefined_behaviour(module: str, tmp_path: Path) -> None:
    shutil.copytree(REPOSITORY / "nanovllm", tmp_path / "nanovllm", ignore=shutil.ignore_patterns("__pycache__"))
    sources, tests = EXTENSIONS[module]
    build(tmp_path, module, sources, FLAGS, sanitizers_of)
    libraries = [
        subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": str(tmp_path),
        "LD_PRELOAD": " ".join(libraries),
        # Python itself is not built with the sanitizers: what it keeps until exit is not a leak of ours.
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    # Left out: what starts another process, which has not got the sanitizers' libraries, or does not bear them (nvcc).
    skipped = ["-k", "not test_extension_needs_neither_torch_nor_cuda_libraries and not test_nvcc"]
    files = [str(REPOSITORY / "tests" / name) for name in tests]
    # A report goes to the process's own stderr and ends it: captured, it would be lost.
    arguments = ["-q", "-x", "--capture=sys", "-p", "no:cacheprovider", *skipped, *files]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0 and " passed" in result.stdout, result.stdout[-3000:] + result.stderr[-3000:]
