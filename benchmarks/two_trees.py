"""Prefill, decode and the scheduler's time a step of this tree and of another one, such as an earlier commit, in turns.

    git worktree add /tmp/before COMMIT && (cd /tmp/before && python setup.py build_ext --inplace)
    python -m benchmarks.two_trees /tmp/before [--prompt-len 512 2048 8192] [--rounds 6] [--output-json FILE]

Each tree runs the work of its own bench.py, with this Python and its packages, in a process of its own that waits while
the other one runs. Each round is one prompt with each tree, and the two take turns in going first, so that a machine
whose speed changes from minute to minute changes both. A ratio is this tree's speed in a round divided by the other's.

The scheduler's time is the processor time of `Scheduler.schedule` and `Scheduler.update`, the mean of a round's steps.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.options import Parser, add_json_option, add_model_options, positive
from benchmarks.report import ROOT, commit_of, machine_facts, write_json
from nanovllm.errors import ConfigError

# The other tree may be older than this file: it needs a bench.py that gives a loaded engine to `report`.
WORKER = """
import json, sys
from time import thread_time

import bench
from nanovllm.engine.scheduler import Scheduler

seconds = {"schedule": [], "update": []}

def timed(name):
    method = getattr(Scheduler, name)
    def call(*args):
        begin = thread_time()
        result = method(*args)
        seconds[name].append(thread_time() - begin)
        return result
    setattr(Scheduler, name, call)

for name in seconds:
    timed(name)

def report(args, shape, facts, open_engine):
    engine = open_engine()
    print("ready", flush=True)
    for line in sys.stdin:
        for each in seconds.values():
            each.clear()
        timing = engine.run(shape.prompts(1, int(line), args.seed))
        per_step = sum(map(sum, seconds.values())) / len(seconds["update"])
        print(json.dumps([timing.prefill_rate, timing.tpot * 1e3, per_step * 1e6]), flush=True)

bench.report = report
sys.exit(bench.main(json.loads(sys.argv[1])))
"""

# What a round gives, with its unit, and whether more is faster.
FIGURES = (("prefill", "tok/s", True), ("decode", "ms", False), ("scheduler", "us", False))


class Tree:
    """A tree's engine in a process of its own."""

    def __init__(self, path: Path, arguments: list[str]) -> None:
        command = [sys.executable, "-c", WORKER, json.dumps(arguments)]
        # This tree's package sets the variable for its own process; each tree is to choose for itself.
        environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
        self._process = subprocess.Popen(
            command, cwd=path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.commit = commit_of(path) or str(path)
        self._path = path
        self._line()

    def __enter__(self) -> Tree:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.communicate()  # the end of its input is the end of its work

    def run(self, prompt_len: int) -> list[float]:
        """One prompt: its figures in the order of FIGURES."""
        assert self._process.stdin is not None
        print(prompt_len, file=self._process.stdin, flush=True)
        figures: list[float] = json.loads(self._line())
        return figures

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            status = self._process.wait()
            raise ConfigError(f"the bench.py of {self._path} ended with status {status}: see its message above.")
        return line


def compare(this: Tree, other: Tree, prompt_len: int, rounds: int) -> dict[str, Any]:
    """All rounds of one prompt length, after one that does not count. Prints each round."""
    timings: dict[Tree, list[list[float]]] = {this: [], other: []}
    for number in range(rounds + 1):
        for tree in (this, other) if number % 2 else (other, this):
            figures = tree.run(prompt_len)
            if number:
                timings[tree].append(figures)
    pairs = list(zip(timings[this], timings[other], strict=True))
    result = {"prompt_len": prompt_len, "this": timings[this], "other": timings[other]}
    for column, (name, unit, is_rate) in enumerate(FIGURES):
        gains = [ours[column] / theirs[column] for ours, theirs in pairs]
        ratios = gains if is_rate else [1 / gain for gain in gains]
        mine, others = (median(row[column] for row in timings[tree]) for tree in (this, other))
        print(
            f"{prompt_len:>7,} {name:<9} {mine:8.1f} {others:8.1f} {unit:<6}"
            f" {median(ratios):6.3f} ({min(ratios):.3f} to {max(ratios):.3f})",
            flush=True,
        )
        result[f"{name}_ratio"] = median(ratios)
    return result


def run(args: argparse.Namespace) -> int:
    """Measure, print, and write JSON if requested."""
    num_layers = "all" if args.num_layers is None else str(args.num_layers)
    arguments = ["--model", args.model, "--num-layers", num_layers, "--dtype", args.dtype]
    arguments += ["--prompt-len", *map(str, args.prompt_len), "--output-len", str(args.output_len)]
    facts = machine_facts("cpu")
    with ExitStack() as stack:
        this, other = (stack.enter_context(Tree(path, arguments)) for path in (ROOT, args.tree))
        print(f"{args.model}; {facts['cpu']}, {facts['threads']} threads; medians of {args.rounds} rounds")
        print(f"{'tokens':>7} {'':<9} {this.commit:>8} {other.commit:>8} {'':<6} {'ratio (extremes)'}")
        results = [compare(this, other, prompt_len, args.rounds) for prompt_len in args.prompt_len]
        write_json(args.output_json, args, facts, commits=[this.commit, other.commit], results=results)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="two_trees", description="This tree and another one in turns: prefill, decode, scheduling.")
    parser.add_argument("tree", type=Path, help="the other tree, with its extensions built")
    add_model_options(parser, num_layers=None)
    parser.add_argument("--prompt-len", type=positive, nargs="+", default=[512], help="tokens (default: %(default)s)")
    parser.add_argument("--output-len", type=positive, default=32, help="tokens (default: %(default)s)")
    parser.add_argument("--rounds", type=positive, default=6, help="of both trees (default: %(default)s)")
    add_json_option(parser)
    return parser.run(argv, run)


if __name__ == "__main__":
    sys.exit(main())
