"""All measurements that need a GPU in one command, the most important ones first.

    python -m benchmarks.gpu_check --output-dir DIR [--first | --second --earlier FILE | --only PART ...]
                                   [--skip PART ...] [--minutes 9] [--dry]

--first and --second are the two runs that fill a quarter of an hour: the first measures what has not been measured, and
the second begins with what failed in it and goes on with what is off by default.

Needs neither network nor git and installs nothing. Each part runs in a separate process with a time limit, so that its
failure does not stop the others. A part that hangs prints its stacks before it is ended. DIR/gpu-check.json is
rewritten whenever a part ends, with the outcome, the figures and the end of the output of every part, also of earlier
runs. DIR/gpu-check.log has all output. --dry runs the same parts on the CPU with tiny sizes. Exit status: 0 if every
part that ran succeeded, 1 if one failed, 2 without a GPU. See GPU.md.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any

import torch

from benchmarks import gpu_bars
from benchmarks.options import Parser, positive
from benchmarks.report import ROOT, machine_facts, plain, python_path
from benchmarks.tiny import write_tiny_config

KEPT_OUTPUT = 30_000  # characters of a part's output that are kept, from its end
STACKS_SECONDS = 5  # in which a part prints its stacks before it is killed
DRY_SECONDS = 300  # for a part of a dry run, on test machines with few cores and other load
# Llama-3.1-8B as published; KV of 4 GiB and 16 GiB. The longer prompt and its output fit the model's 131,072 positions.
PROMPT_32K = 32768
PROMPT_128K = 130048
LLAMA = ("--device", "cuda", "--model", "llama-3.1-8b", "--num-layers", "all", "--block-size", "1024",
         "--max-num-batched-tokens", "16384", "--warmup", "1")  # fmt: skip
MODEL = "{model}"  # in arguments of a dry run: the directory of a tiny model
TINY = ("--device", "cpu", "--model", MODEL, "--num-layers", "2", "--dtype", "float32", "--block-size", "16")
TINY_RUN = (*TINY, "--max-num-batched-tokens", "128", "--output-len", "5", "--warmup", "0", "--repeats", "1")
EIGHT_BITS = ("--kv-cache-dtype", "fp8_e4m3", "--against", "model-dtype")
XDIST = importlib.util.find_spec("xdist") is not None
CUDA_MARKS = re.compile(r"pytest\.mark\.cuda|TRITON_MARKS")
# Files with tests for a GPU. Others may need packages that are not there.
CUDA_TESTS = tuple(
    str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("tests/test_*.py")) if CUDA_MARKS.search(path.read_text())
)


@dataclass(frozen=True, slots=True)
class Part:
    """One process. `dry`: additional arguments of a dry run, which override the others; `on_gpu`: of any other run."""

    name: str
    command: tuple[str, ...]  # arguments of Python
    seconds: int  # after which it is ended
    likely: int = 1  # expected seconds: the part does not start with less time left
    dry: tuple[str, ...] = ()
    figures: bool = True  # takes --output-json
    on_gpu: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()  # switches
    repeats: bool = False  # another part's script with other options, which a dry run of all parts leaves out

    def arguments(self, dry: bool, model: Path, figures: Path) -> list[str]:
        """Of Python."""
        options = [*self.command, *(self.dry if dry else self.on_gpu)]
        written = ["--output-json", str(figures)] if self.figures else []
        return [str(model) if option == MODEL else option for option in [*options, *written]]


def offload(name: str, prompt_len: int, seconds: int, likely: int, *options: str, decode_steps: int = 0) -> Part:
    """A prompt on the device and offloaded, in turns."""
    runs = ("--prompt-len", str(prompt_len), "--output-len", "17", "--repeats", "1")
    command = ("bench_offload.py", *LLAMA, *runs, "--decode-steps", str(decode_steps), "--against", "on-device")
    return Part(name, (*command, *options), seconds, likely, (*TINY_RUN, "--prompt-len", "600"))


def model(name: str, stored: str | None = None, *options: str) -> Part:
    """A published size with random weights, resident: prefill, decode, and the kernels of decode steps."""
    form = ("--stored", stored) if stored else ()
    work = ("--prompt-len", "4096", "--output-len", "33", "--repeats", "1", "--kernel-steps", "8", *options)
    command = ("bench.py", "--device", "cuda", "--model", name, *form, *work)
    dry = (*TINY_RUN, "--prompt-len", "64", "--num-prompts", "1", "--kernel-steps", "2")
    return Part(f"{name}-{stored}" if stored else name, command, 90, 25, dry, repeats=stored != "q4_k_m")


def weights(name: str, seconds: int, likely: int, *options: str) -> Part:
    """A published size with random weights on the device and with most of them in host memory, in turns."""
    work = ("--prompt-len", str(PROMPT_32K), "--output-len", "9", "--repeats", "1", "--warmup", "1")
    sizes = ("--device", "cuda", "--block-size", "1024", "--max-num-batched-tokens", "16384")
    dry = (*TINY_RUN, "--prompt-len", "600", "--weights", "1%")
    return Part(name, ("-m", "benchmarks.streamed_weights", *sizes, *work, *options), seconds, likely, dry)


def library(name: str) -> tuple[tuple[str, str], ...]:
    """The switch for the library of prefill."""
    return (("NANOVLLM_PREFILL_LIBRARY", name),)


PARTS = (
    Part("facts", ("-m", "benchmarks.gpu_facts"), 40),
    Part("build", ("setup.py", "build_ext", "--inplace"), 180, 70, ("--help",), figures=False),
    Part("probe", ("-m", "benchmarks.probe", "--device", "cuda"), 90, 40,
         ("--device", "cpu", "--dry", "--threads", "1", "--connections", "8")),
    Part("smoke", ("-m", "benchmarks.smoke", "--device", "cuda"), 150, 25, ("--device", "cpu")),
    offload("offload-32k", PROMPT_32K, 150, 30, "--no-cpu-attention"),
    offload("cpu-attention-32k", PROMPT_32K, 150, 40, decode_steps=4),
    Part(
        "copies",
        ("-m", "benchmarks.copy_bandwidth", "--device", "cuda"),
        60,
        15,
        ("--device", "cpu", "--mib", "1", "--row-bytes", "4096", "--repeats", "2"),
    ),
    Part("kernels", ("-m", "benchmarks.kernels"), 160, 70, ("--dry",)),
    Part(
        "recall-128k",
        ("-m", "nanovllm.apps.demo", "--recall-only", "--device", "cuda", "--prompt-tokens", "131072",
         "--num-gpu-blocks", "12"),
        120,
        40,
        ("--device", "cpu", "--prompt-tokens", "1024", "--num-gpu-blocks", "4", "--block-size", "64",
         "--max-num-batched-tokens", "256"),
        figures=False,
    ),
    replace(offload("offload-128k", PROMPT_128K, 300, 120, "--no-cpu-attention"), repeats=True),
    offload("kv-8-bits-32k", PROMPT_32K, 150, 60, "--no-cpu-attention", *EIGHT_BITS),
    Part("features", ("-m", "benchmarks.features", "--device", "cuda"), 240, 30, ("--device", "cpu")),
    Part("products", ("-m", "benchmarks.products"), 90, 15, ("--dry", "--schemes", "int4", "fp8", "q4_k")),
    Part("sweep", ("-m", "benchmarks.sweep", "--keep"), 300, 120, ("--dry",)),
    Part(
        "tests",
        ("-m", "pytest", "-v", "-m", "cuda", "-p", "no:cacheprovider", "-o", "faulthandler_timeout=60",
         "--durations=15", *(("-n", "8") if XDIST else ())),
        420,
        60,
        (*(("-n", "0") if XDIST else ()), "tests/test_sgdma.py"),
        on_gpu=CUDA_TESTS,
        figures=False,
    ),
    Part(
        "resident",
        ("bench.py", *LLAMA, "--prompt-len", "2048", str(PROMPT_32K), "--output-len", "33", "--repeats", "2"),
        100,
        50,
        (*TINY_RUN, "--prompt-len", "64"),
        repeats=True,
    ),
    Part(
        "decode-kernels",
        ("bench.py", *LLAMA, "--prompt-len", "2048", "4096", "--output-len", "33", "--repeats", "1",
         "--kernel-steps", "16"),
        60,
        20,
        (*TINY_RUN, "--prompt-len", "64", "80", "--kernel-steps", "2"),
    ),
    Part(
        "prompts-64",
        ("bench.py", *LLAMA, "--prompt-len", "512", "--num-prompts", "64", "--output-len", "33", "--repeats", "1",
         "--kernel-steps", "16"),
        60,
        20,
        (*TINY_RUN, "--prompt-len", "64", "--num-prompts", "3", "--kernel-steps", "2"),
        repeats=True,
    ),
    replace(
        offload("offload-32k-own", PROMPT_32K, 90, 30, "--no-cpu-attention"),
        environment=library("triton"),
        repeats=True,
    ),
    replace(
        offload("offload-32k-16k-segments", PROMPT_32K, 90, 30, "--no-cpu-attention"),
        environment=library("cudnn:16384"),
        repeats=True,
    ),
    replace(
        offload("cpu-attention-32k-driver", PROMPT_32K, 90, 30, decode_steps=4),
        environment=(("NANOVLLM_POLLED_CALLS", "0"),),
        repeats=True,
    ),
    model("gpt-oss-20b"),
    model("qwen3.6-35b-a3b", "int4"),
    model("llama-3.1-8b", "q4_k_m"),
    model("qwen3.5-9b"),
    weights("weights", 90, 50, "--model", "llama-3.1-8b", "--weights", "25%"),
    replace(
        weights("weights-experts", 90, 50, "--model", "qwen3.6-35b-a3b", "--stored", "int4", "--weights", "8G"),
        repeats=True,
    ),
    # Half of its layers, with half of 16 GB: all of them on the device beside those that stream are too much for one
    # card, and making and moving 54 GB of weights takes too long here.
    replace(
        weights("weights-gpt-oss", 120, 70, "--model", "gpt-oss-120b", "--num-layers", "18", "--weights", "8G"),
        repeats=True,
    ),
    Part("ranks", ("-m", "benchmarks.ranks", "--device", "cuda", "--model", "llama-3.1-8b"), 120, 60,
         ("--device", "cpu", "--model", MODEL, "--dtype", "float32", "--prompt-len", "20", "--output-len", "5")),
)  # fmt: skip

# What has not been measured yet, in at most 8 minutes.
FIRST = (
    "build", "probe", "smoke", "offload-32k", "cpu-attention-32k", "decode-kernels", "prompts-64", "features",
    "products", "gpt-oss-20b", "qwen3.6-35b-a3b-int4", "llama-3.1-8b-q4_k_m", "qwen3.5-9b", "tests",
)  # fmt: skip
# What is chosen otherwise by default: prefill on the own kernel and on longer segments, CPU attention
# by a thread of the driver.
SECOND = ("offload-32k-own", "offload-32k-16k-segments", "cpu-attention-32k-driver", "kernels")
FIRST_MINUTES = 8.0
SECOND_MINUTES = 4.0
ALL_MINUTES = 9.0
ALWAYS = ("build",)  # for a machine that is new
LONGEST = "tests"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a part. `status` is the process's exit status, None if it was stopped or never ran."""

    part: str
    status: int | None
    seconds: float
    note: str
    figures: Any  # its output, also if it was stopped
    output: str
    commit: str | None = None
    date: str = ""

    @property
    def good(self) -> bool:
        return self.status == 0


class Check:
    """The parts of one run, and the report in its directory."""

    def __init__(self, directory: Path, dry: bool = False, facts: dict[str, Any] | None = None) -> None:
        self.directory = directory
        self.dry = dry
        self.facts = facts or {}
        directory.mkdir(parents=True, exist_ok=True)
        self._model = write_tiny_config(directory / "tiny-model") if dry else directory
        self._log = directory / "gpu-check.log"

    def run(self, parts: Sequence[Part], minutes: float, args: argparse.Namespace | None = None) -> list[Outcome]:
        """Run the parts in turn within the total time. The report is written after each."""
        end = time.monotonic() + 60 * minutes
        outcomes: list[Outcome] = []
        for part in parts:
            left = end - time.monotonic()
            likely, limit = (1, DRY_SECONDS) if self.dry else (part.likely, part.seconds)
            if left < likely:
                note = f"not run: {max(0.0, left):.0f} s were left, and it takes about {likely}"
                outcomes.append(Outcome(part.name, None, 0.0, note, None, ""))
                continue
            outcomes.append(self.run_part(part, min(left, limit)))
            self.write(outcomes, args)
        return outcomes

    def run_part(self, part: Part, seconds: float) -> Outcome:
        """Run one part for at most `seconds`, then end it and all that it started."""
        path = self.directory / f"{part.name}.json"
        path.unlink(missing_ok=True)
        command = [sys.executable, *part.arguments(self.dry, self._model, path)]
        self._say(f"---- {part.name}, at most {seconds:.0f} s: {' '.join(command[1:])}\n")
        start = time.monotonic()
        with self._log.open("a") as log:
            process = self._start(command, dict(part.environment))
            output = Output(process, log)
            note = wait_for(process, seconds)
            output.finish()
        taken = time.monotonic() - start
        status = None if note else process.returncode
        if status:
            note = f"exit status {status}"
        figures = read_json(path)
        path.unlink(missing_ok=True)
        date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        return Outcome(part.name, status, taken, note, figures, output.kept(), self.facts.get("commit"), date)

    def _start(self, command: list[str], switches: dict[str, str]) -> subprocess.Popen[str]:
        environment = {
            **os.environ,
            **switches,
            "PYTHONPATH": python_path(),
            "PYTHONUNBUFFERED": "1",
            "PYTHONFAULTHANDLER": "1",
        }
        if self.dry:
            environment |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "NANOVLLM_DRY_RUN": "1"}
        else:
            environment |= {"NANOVLLM_CUDA": "1"}
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
        # A part that is aborted must not spend minutes on a core dump.
        with suppress(OSError, ValueError):
            resource.prlimit(process.pid, resource.RLIMIT_CORE, (0, 0))
        return process

    def write(self, outcomes: Sequence[Outcome], args: argparse.Namespace | None) -> None:
        """Write the report atomically. It keeps parts of earlier runs that did not run now."""
        path = self.directory / "gpu-check.json"
        new = {outcome.part: asdict(outcome) for outcome in outcomes if outcome.date}
        earlier = read_json(path) or {"parts": []}
        parts = {old["part"]: old for old in earlier["parts"]} | new
        bars = gpu_bars.bars(parts)
        report = plain(args or argparse.Namespace(), self.facts, bars=bars, parts=list(parts.values()))
        unfinished = path.with_suffix(".part")
        unfinished.write_text(json.dumps(report, indent=1) + "\n")
        unfinished.replace(path)

    def _say(self, text: str) -> None:
        print(text, end="", flush=True)
        with self._log.open("a") as log:
            log.write(text)


class Output:
    """The output of a process: shown and logged immediately, with its end kept."""

    def __init__(self, process: subprocess.Popen[str], log: IO[str]) -> None:
        self._process = process
        self._log = log
        self._lines: list[str] = []
        self._thread = threading.Thread(target=self._copy, daemon=True)
        self._thread.start()

    def _copy(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.append(line)
            self._log.write(line)
            self._log.flush()
            print(line, end="", flush=True)

    def finish(self) -> None:
        """Wait for pending output, but not for a process that outlives the part."""
        self._thread.join(STACKS_SECONDS)

    def kept(self) -> str:
        return "".join(self._lines)[-KEPT_OUTPUT:]


def wait_for(process: subprocess.Popen[str], seconds: float) -> str:
    """Wait for the process, or let it and its children print their stacks, end them, and return a note."""
    try:
        process.wait(seconds)
        return ""
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGABRT)  # Python's fault handler prints the stacks of all threads
        with suppress(subprocess.TimeoutExpired):
            process.wait(STACKS_SECONDS)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return f"stopped after {seconds:.0f} s"


def read_json(path: Path) -> Any:
    """The content of a JSON file; None if it is missing or incomplete."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def facts_now(dry: bool) -> dict[str, Any]:
    """Facts of the machine, also without the built extension."""
    if dry:
        return machine_facts("cpu") | {"gpu": "dry run on the CPU"}
    try:
        return machine_facts("cuda")
    except ImportError as error:
        return machine_facts("cpu") | {"device": "cuda", "gpu": torch.cuda.get_device_name(), "extension": str(error)}


def show(facts: dict[str, Any], outcomes: Sequence[Outcome], bars: Sequence[gpu_bars.Bar]) -> None:
    """The tables at the end of the report, and how to continue if parts are left."""
    print(f"\n{facts['gpu']}, torch {facts['torch']}, Python {facts['python']}, commit {facts['commit']}\n")
    if facts["device"] == "cpu":
        print(
            "a dry run: figures mean nothing; bars that can be read: " + "; ".join(bar.name for bar in readable(bars))
        )
    else:
        gpu_bars.show(bars)
    print()
    for outcome in outcomes:
        verdict = "good" if outcome.good else "NOT GOOD" if outcome.date else "-"
        print(f"{outcome.part:<20}{verdict:<10}{outcome.seconds:>6.0f} s   {outcome.note}".rstrip())
    left = [outcome.part for outcome in outcomes if not outcome.date]
    if left:
        print(f'\nnot run: make gpu-check PART="{" ".join(left)}"')


def readable(bars: Sequence[gpu_bars.Bar]) -> list[gpu_bars.Bar]:
    """The parts whose figures are present at the expected path."""
    return [bar for bar in bars if bar.value is not None]


def chosen(args: argparse.Namespace) -> list[Part]:
    """The parts that the options name, in the order in which they run."""
    by_name = {part.name: part for part in PARTS}
    if args.first:
        return [by_name[name] for name in FIRST]
    if not args.second:
        return [part for part in PARTS if (part.name in args.only if args.only else not (args.dry and part.repeats))]
    path = args.earlier or args.output_dir / "gpu-check.json"
    report = read_json(path)
    if report is None:
        print(f"gpu-check: {path} is no report of a first run, so none of its parts is repeated", file=sys.stderr)
    status = {outcome["part"]: outcome["status"] for outcome in (report or {"parts": []})["parts"]}
    again = [name for name in FIRST if report is not None and status.get(name) != 0]
    last = [name for name in again if name == LONGEST]  # it would leave no time for the others
    names = [*ALWAYS, *(name for name in again if name != LONGEST), *SECOND, *last]
    return [by_name[name] for name in dict.fromkeys(names)]


def run(args: argparse.Namespace) -> int:
    if not args.dry and not torch.cuda.is_available():
        print("gpu-check: torch sees no CUDA device, and this check is of nothing else.", file=sys.stderr)
        return 2
    parts = [part for part in chosen(args) if part.name not in args.skip]
    minutes = args.minutes or (FIRST_MINUTES if args.first else SECOND_MINUTES if args.second else ALL_MINUTES)
    check = Check(args.output_dir, args.dry, facts_now(args.dry))
    outcomes = check.run(parts, minutes, args)
    check.facts = facts_now(args.dry)  # now with the extension
    check.write(outcomes, args)
    bars = gpu_bars.bars(gpu_bars.parts_of([args.output_dir / "gpu-check.json"]))
    show(check.facts, outcomes, bars)
    ran = {outcome.part for outcome in outcomes}
    unread = [bar for bar in bars if bar.value is None and bar.part in ran]
    if args.dry and not args.only and len(unread) > 1:  # only the GPU's idle time is missing
        print("gpu-check: a bar looks for figures that no part writes.", file=sys.stderr)
        return 1
    return 0 if all(outcome.good for outcome in outcomes) else 1


def parser() -> Parser:
    parser = Parser(prog="python -m benchmarks.gpu_check", description="Everything that only a GPU can show.")
    names = [part.name for part in PARTS]
    add = parser.add_argument
    add("--output-dir", type=Path, required=True, help="where the report goes; made if it is not there")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--first", action="store_true", help="what has not been measured, in 8 minutes")
    which.add_argument("--second", action="store_true", help="what failed before, then what is off by default, in 4")
    which.add_argument("--only", nargs="+", choices=names, help="run these parts only, in the order of the table")
    add("--earlier", type=Path, help="report of the first run, for --second (default: the one in --output-dir)")
    add("--skip", nargs="+", choices=names, default=[], help="leave these parts out")
    told = f"for all parts together (default: {FIRST_MINUTES:g}, {SECOND_MINUTES:g} or {ALL_MINUTES:g})"
    add("--minutes", type=positive, help=told)
    add("--dry", action="store_true", help="the same parts on the CPU with tiny sizes")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    return run(parser().parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
