"""Makes the environment of the emulated GPU and runs in it what needs a CUDA device: `make cuda-emulated`.

    python tests/cuda_emulation/run.py DIRECTORY TORCH_VERSION [PART ...]

Each part is a process of its own. The last line says what ran and passed. Exit status 1 if a part failed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

from environment import ROOT, Environment

# Tests marked `cuda` that do not run here, and why.
MINUTES = "its Triton kernels take minutes in the interpreter"
EXCEPTIONS = {
    "test_cuda_device.py::test_an_offloaded_engine_gives_the_tokens_of_the_cpu": MINUTES,
    "test_cuda_device.py::test_logits_do_not_depend_on_the_memory_budget": MINUTES,
    "test_cuda_device.py::test_shared_streams_give_the_same_tokens": MINUTES,
    "test_cuda_device.py::test_an_engine_sized_from_memory_fits_and_gives_it_back": "a prefill of 2,048 tokens",
}
CUDA_TESTS = ("cuda_device", "cuda_graphs", "pinned", "sgdma", "host_attention")
MEASURED = (
    "device/cuda*.py",
    "device/pinned.py",
    "comm/*",
    "features/cuda_graphs/*",
    "ops/triton_*",
    "ops/*_attention.py",
)
PYTEST = ("-m", "pytest", "-q", "--durations=10")


def parts() -> dict[str, list[str]]:
    """By name: the arguments of Python."""
    tests = [f"tests/test_{name}.py" for name in CUDA_TESTS]
    without = [f"--deselect=tests/{name}" for name in EXCEPTIONS]
    return {
        "smoke": ["-m", "benchmarks.smoke", "--device", "cuda"],
        "engines": [*PYTEST, "tests/cuda_emulation"],
        "cuda": [*PYTEST, "-m", "cuda", *tests, *without],
    }


def main() -> int:
    directory, torch_version, *wanted = sys.argv[1:]
    environment = Environment(Path(directory), torch_version)
    environment.make()
    begun, results = time.monotonic(), {}
    variables = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    variables["COVERAGE_FILE"] = str(environment.directory / "coverage/data")
    coverage = [str(environment.python), "-m", "coverage"]
    measured = [*coverage, "run", "--parallel-mode", "--include=" + ",".join(f"nanovllm/{each}" for each in MEASURED)]
    for name, arguments in parts().items():
        if not wanted or name in wanted:
            print(f"==== {name}", flush=True)
            results[name] = run_part([*measured, *arguments], variables)
    subprocess.run([*coverage, "combine", "--quiet"], cwd=ROOT, env=variables, check=False)
    subprocess.run([*coverage, "report", "--show-missing"], cwd=ROOT, env=variables, check=False)
    for name, reason in EXCEPTIONS.items():
        print(f"not run: {name}: {reason}")
    passed = all(good for good, _ in results.values())
    told = ", ".join(f"{name} {text}" for name, (_, text) in results.items())
    minutes = (time.monotonic() - begun) / 60
    outcome = "passed" if passed else "FAILED"
    print(f"cuda-emulated {outcome}: torch {torch_version} without a GPU: {told}; {minutes:.1f} minutes", flush=True)
    return 0 if passed else 1


def run_part(command: list[str], variables: dict[str, str]) -> tuple[bool, str]:
    """Whether the part passed, and its own last word: the counts of pytest or of the checks."""
    with subprocess.Popen(command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, text=True) as process:
        lines = []
        for line in process.stdout or ():
            print(line, end="", flush=True)
            lines.append(line)
    counts = re.findall(r"\d+ (?:passed|failed|errors?)", lines[-1] if lines else "")
    good = sum(bool(re.search(r"\s{2,}good\b", line)) for line in lines)
    bad = sum(line.startswith("FAILED  ") for line in lines)
    text = ", ".join(counts) if counts else f"{good} good, {bad} failed" if good else f"exit {process.returncode}"
    return process.returncode == 0, text


if __name__ == "__main__":
    sys.exit(main())
