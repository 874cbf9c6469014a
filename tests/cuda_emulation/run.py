"""Makes the environment of the emulated GPU and runs in it what needs a CUDA device: `make cuda-emulated`.

    python tests/cuda_emulation/run.py DIRECTORY TORCH_VERSION [PART ...]

Each part is a process of its own. The last line says what ran and passed. Exit status 1 if a part failed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from environment import ROOT, Environment

# Tests marked `cuda` that do not run here, and why.
EXCEPTIONS: dict[str, str] = {}
SLOW = "tests marked `slow` as well: more launches of the same kernels"
MARKED = re.compile(r"pytest\.mark\.cuda|TRITON_MARKS")
MEASURED = (
    "device/cuda*.py",
    "device/pinned.py",
    "comm/*",
    "features/cuda_graphs/*",
    "ops/triton_*",
    "ops/flash_attention.py",
    "ops/backends.py",
)
COVERAGE = """
[run]
parallel = true
patch = subprocess
include = {include}
[report]
exclude_also = @triton.jit
show_missing = true
"""
AT_ONCE = 2  # parts: each mostly keeps one core busy
PYTEST = ("-m", "pytest", "-q", "--durations=10")


def parts() -> dict[str, list[str]]:
    """By name, the longest first: the arguments of Python."""
    files = [path for path in sorted(ROOT.glob("tests/test_*.py")) if MARKED.search(path.read_text())]
    without = [f"--deselect=tests/{name}" for name in EXCEPTIONS]
    return {
        "engines": [*PYTEST, "tests/cuda_emulation"],
        "cuda": [*PYTEST, "-m", "cuda", *(str(path.relative_to(ROOT)) for path in files), *without],
        "smoke": ["-m", "benchmarks.smoke", "--device", "cuda"],
    }


def main() -> int:
    directory, torch_version, *wanted = sys.argv[1:]
    environment = Environment(Path(directory), torch_version)
    environment.make()
    begun = time.monotonic()
    used_before = sum(os.times()[:4])
    variables = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    coverage = coverage_of(environment, variables)
    chosen = {name: part for name, part in parts().items() if not wanted or name in wanted}
    with ThreadPoolExecutor(AT_ONCE) as pool:
        running = [pool.submit(run_part, name, [*coverage, "run", *part], variables) for name, part in chosen.items()]
    results = {name: part.result() for name, part in zip(chosen, running, strict=True)}
    print("==== coverage, without the bodies of Triton's kernels", flush=True)
    subprocess.run([*coverage, "combine", "--quiet"], cwd=ROOT, env=variables, check=False)
    subprocess.run([*coverage, "report"], cwd=ROOT, env=variables, check=False)
    for name, reason in EXCEPTIONS.items():
        print(f"not run: {name}: {reason}")
    print(f"not run: {SLOW}")
    passed = all(good for good, _ in results.values())
    told = ", ".join(f"{name} {text}" for name, (_, text) in results.items())
    used = (sum(os.times()[:4]) - used_before) / 60
    minutes = f"{(time.monotonic() - begun) / 60:.1f} minutes, {used:.1f} of a processor"
    outcome = "passed" if passed else "FAILED"
    print(f"cuda-emulated {outcome}: torch {torch_version} without a GPU: {told}; {minutes}", flush=True)
    return 0 if passed else 1


def coverage_of(environment: Environment, variables: dict[str, str]) -> list[str]:
    """The command of coverage with its settings, of which the variables tell it; measured before are forgotten."""
    folder = environment.directory / "coverage"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    settings = folder / "settings"
    settings.write_text(COVERAGE.format(include=",".join(f"nanovllm/{each}" for each in MEASURED)))
    variables |= {"COVERAGE_FILE": str(folder / "data"), "COVERAGE_RCFILE": str(settings)}
    return [str(environment.python), "-m", "coverage"]


def run_part(name: str, command: list[str], variables: dict[str, str]) -> tuple[bool, str]:
    """Whether the part passed, and its own last word: the counts of pytest or of the checks.

    Prints its lines as they come, each behind its name.
    """
    with subprocess.Popen(command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, text=True) as process:
        lines = []
        for line in process.stdout or ():
            print(f"{name:8}{line}", end="", flush=True)
            lines.append(line)
    counts = re.findall(r"\d+ (?:passed|failed|errors?)", lines[-1] if lines else "")
    good = sum(bool(re.search(r"\s{2,}good\b", line)) for line in lines)
    bad = sum(line.startswith("FAILED  ") for line in lines)
    text = ", ".join(counts) if counts else f"{good} good, {bad} failed" if good else f"exit {process.returncode}"
    return process.returncode == 0, text


if __name__ == "__main__":
    sys.exit(main())
