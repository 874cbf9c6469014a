"""Everything that only a GPU can show, in one command: build, tests, benchmarks, and what came of each.

    python -m benchmarks.gpu_check --output-dir DIR [--only PART ...] [--skip PART ...] [--minutes 8]

Needs no network and installs nothing: it says which packages are missing. Each part runs in a process of its own, with
a time limit; what one does to itself, or how it fails, does not stop the others. DIR gets `gpu-check.json` with all
outcomes and the end of every part's output, and the benchmarks' own JSON files. Exit status: 0 when every part that ran
is good, 1 when one is not, 2 without a GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.options import Parser, positive
from benchmarks.presets import PROMPT_32K, PROMPT_128K
from benchmarks.report import ROOT, machine_facts, write_json

PACKAGES = ("pybind11", "setuptools", "pytest", "hypothesis", "transformers", "safetensors", "tokenizers", "xxhash")
PACKAGES += ("numpy", "tqdm", "triton")
KEPT_OUTPUT = 6000  # characters of a part's output that are kept, from its end
PRESET = ("--preset", "h200")  # what a part does not say is as in the full table


@dataclass(frozen=True, slots=True)
class Part:
    """One process: what it is asked, for how long, and whether it writes figures."""

    name: str
    command: tuple[str, ...]  # arguments of Python
    seconds: int
    figures: bool = True


def offload(name: str, prompt_len: int, seconds: int, *options: str) -> Part:
    """A prompt on the device and offloaded, in turns."""
    runs = ("--prompt-len", str(prompt_len), "--output-len", "17", "--repeats", "1")
    return Part(name, ("bench_offload.py", *PRESET, *runs, *options), seconds)


PARTS = (
    Part("build", ("setup.py", "build_ext", "--inplace"), 150, figures=False),
    Part("tests", ("-m", "pytest", "-q", "-m", "cuda", "-p", "no:cacheprovider", "tests"), 240, figures=False),
    Part("copies", ("-m", "benchmarks.copy_bandwidth", "--device", "cuda"), 60),
    Part("streams", ("-m", "benchmarks.transfer_streams", "--device", "cuda"), 60),
    Part("kernels", ("-m", "benchmarks.kernels"), 90),
    Part(
        "recall",
        ("-m", "nanovllm.demo", "--device", "cuda", "--prompt-tokens", "131072", "--num-gpu-blocks", "12"),
        90,
        figures=False,
    ),
    offload("offload-32k", PROMPT_32K, 120, "--no-cpu-attention"),
    Part("resident", ("bench.py", *PRESET, "--prompt-len", "2048", str(PROMPT_32K), "--repeats", "2"), 90),
    offload("offload-128k", PROMPT_128K, 240, "--decode-steps", "0", "--against", "on-device"),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a part. `status` is the process' exit status, None where it was stopped or never ran."""

    part: str
    status: int | None
    seconds: float
    note: str
    figures: str | None  # the file that it wrote
    output: str

    @property
    def good(self) -> bool:
        return self.status == 0


def run_part(part: Part, directory: Path, seconds: float) -> Outcome:
    """Run one part for at most `seconds`, then end it and all that it started."""
    path = directory / f"{part.name}.json"
    command = [sys.executable, *part.command, *(["--output-json", str(path)] if part.figures else [])]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "NANOVLLM_CUDA": "1"}
    path.unlink(missing_ok=True)
    start = time.monotonic()
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=seconds)
        status: int | None = process.returncode
        note = "" if status == 0 else f"exit status {status}"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        status, note = None, f"stopped after {seconds:.0f} s"
    taken = time.monotonic() - start
    return Outcome(part.name, status, taken, note, path.name if path.exists() else None, output[-KEPT_OUTPUT:])


def run_all(parts: Sequence[Part], directory: Path, minutes: float) -> list[Outcome]:
    """All parts in turn within the time given in all. Each one's end is printed as soon as it is known."""
    end = time.monotonic() + 60 * minutes
    outcomes: list[Outcome] = []
    for part in parts:
        left = end - time.monotonic()
        if left < 1:
            outcome = Outcome(part.name, None, 0.0, "no time was left for it", None, "")
        else:
            print(f"---- {part.name}: {' '.join(part.command)}", flush=True)
            outcome = run_part(part, directory, min(left, part.seconds))
            print(outcome.output if outcome.good else outcome.output[-KEPT_OUTPUT // 2 :], flush=True)
        outcomes.append(outcome)
    return outcomes


def missing_packages() -> list[str]:
    """Of those that the parts use, what cannot be imported here."""
    return [name for name in PACKAGES if importlib.util.find_spec(name) is None]


def facts_now() -> dict[str, Any]:
    """The machine's, also where the extension has not been built."""
    try:
        return machine_facts("cuda")
    except ImportError as error:
        return machine_facts("cpu") | {"device": "cuda", "gpu": torch.cuda.get_device_name(), "extension": str(error)}


def show(facts: dict[str, Any], outcomes: Sequence[Outcome], missing: Sequence[str]) -> None:
    """The table that ends the report."""
    print(f"\n{facts['gpu']}, torch {facts['torch']}, Python {facts['python']}, commit {facts['commit']}")
    if missing:
        print(f"missing packages: {', '.join(missing)}")
    for outcome in outcomes:
        verdict = "good" if outcome.good else "NOT GOOD"
        print(f"{outcome.part:<14}{verdict:<10}{outcome.seconds:>6.0f} s   {outcome.note}".rstrip())


def run(args: argparse.Namespace) -> int:
    if not torch.cuda.is_available():
        print("gpu-check: torch sees no CUDA device, and this check is of nothing else.", file=sys.stderr)
        return 2
    names = set(args.only or [part.name for part in PARTS]) - set(args.skip)
    args.output_dir.mkdir(parents=True, exist_ok=True)
    missing = missing_packages()
    outcomes = run_all([part for part in PARTS if part.name in names], args.output_dir, args.minutes)
    facts = facts_now()
    write_json(args.output_dir / "gpu-check.json", args, facts, missing_packages=missing, parts=outcomes)
    show(facts, outcomes, missing)
    return 0 if all(outcome.good for outcome in outcomes) else 1


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m benchmarks.gpu_check", description="Everything that only a GPU can show.")
    names = [part.name for part in PARTS]
    add = parser.add_argument
    add("--output-dir", type=Path, required=True, help="where the JSON files go; made if it is not there")
    add("--only", nargs="+", choices=names, help="run these parts only")
    add("--skip", nargs="+", choices=names, default=[], help="leave these parts out")
    add("--minutes", type=positive, default=8, help="for all parts together (default: %(default)s)")
    return run(parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
