"""Prefill and decode beside other work: one busy process, and a second engine.

    python -m benchmarks.contention [--model tiny DIRECTORY qwen3-0.6b] [--num-layers 4] [--other TREE]

Each round measures the engine alone, beside a process that keeps one core busy, and beside a second engine that does
the same work in a process of its own. A cost is the time beside the busy process divided by the time alone. Together is
the work of the two engines in a time, divided by that of the engine alone. Figures are medians over rounds.
--other measures another tree as well, such as an earlier commit with its extensions built, in turns with this one.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.options import Parser, add_json_option, positive
from benchmarks.report import ROOT, machine_facts, write_json
from benchmarks.tiny import write_tiny_config
from benchmarks.two_trees import Tree

Figures = tuple[float, float]  # prefill in tokens per second, decode in milliseconds per token
SMALL = "tiny"  # the name of a network of a few kilobytes


@contextmanager
def busy_process() -> Iterator[None]:
    """A process that keeps one core busy."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        try:
            yield
        finally:
            process.kill()


class Subject:
    """Two engines of one tree, of which the second one waits unless both are asked."""

    def __init__(self, path: Path, arguments: list[str], stack: ExitStack) -> None:
        self._engines = [stack.enter_context(Tree(path, arguments)) for _ in range(2)]
        self.commit = self._engines[0].commit
        self.rounds: list[dict[str, Figures]] = []

    def measure(self, prompt_len: int) -> dict[str, Figures]:
        """The figures alone, beside a busy process, and of each of two engines at once."""
        first = self._engines[0]
        alone = first.run(prompt_len)
        with busy_process():
            busy = first.run(prompt_len)
        with ThreadPoolExecutor(2) as threads:
            both = list(threads.map(lambda engine: engine.run(prompt_len), self._engines))
        return {"alone": alone, "busy": busy, "one_of_two": both[0], "other_of_two": both[1]}

    def summary(self) -> dict[str, float]:
        return {
            "prefill": self._median(lambda found: found["alone"][0]),
            "decode_ms": self._median(lambda found: found["alone"][1]),
            "prefill_cost": self._median(lambda found: found["alone"][0] / found["busy"][0]),
            "decode_cost": self._median(lambda found: found["busy"][1] / found["alone"][1]),
            "prefill_together": self._median(
                lambda found: (found["one_of_two"][0] + found["other_of_two"][0]) / found["alone"][0]
            ),
            "decode_together": self._median(
                lambda found: found["alone"][1] / found["one_of_two"][1] + found["alone"][1] / found["other_of_two"][1]
            ),
        }

    def _median(self, of: Callable[[dict[str, Figures]], float]) -> float:
        return median(of(found) for found in self.rounds)


def compare(args: argparse.Namespace, model: str) -> list[dict[str, Any]]:
    """All rounds of a model in each tree, after one that does not count."""
    with ExitStack() as stack:
        path = model
        if model == SMALL:
            path = str(write_tiny_config(Path(stack.enter_context(tempfile.TemporaryDirectory()))))
        layers = str(args.num_layers) if model == "qwen3-0.6b" and args.num_layers else "all"
        arguments = ["--model", path, "--num-layers", layers, "--dtype", "bfloat16"]
        arguments += ["--prompt-len", str(args.prompt_len), "--output-len", str(args.output_len)]
        trees = [ROOT] if args.other is None else [ROOT, args.other]
        subjects = [Subject(tree, arguments, stack) for tree in trees]
        for number in range(args.rounds + 1):
            for subject in subjects if number % 2 else subjects[::-1]:
                found = subject.measure(args.prompt_len)
                if number:
                    subject.rounds.append(found)
        results = []
        for subject in subjects:
            row = subject.summary()
            print(
                f"{Path(model).name[:24]:<24} {subject.commit[:8]:<8} {row['prefill']:9.1f} {row['decode_ms']:8.2f}"
                f" {row['prefill_cost']:8.2f} {row['decode_cost']:8.2f} {row['prefill_together']:8.2f}"
                f" {row['decode_together']:8.2f}",
                flush=True,
            )
            results.append({"model": Path(model).name, "commit": subject.commit, **row, "rounds": subject.rounds})
        return results


def run(args: argparse.Namespace) -> int:
    """Measure, print, and write JSON if requested."""
    facts = machine_facts("cpu")
    print(f"{facts['cpu']}, {facts['threads']} threads; {args.prompt_len} tokens in, {args.output_len} out")
    print(f"{'':<33} {'alone':^18} {'cost of a busy one':^17} {'two together':^17}")
    both = f"{'prefill':>8} {'decode':>8}"
    print(f"{'model':<24} {'commit':<8} {'tok/s':>9} {'ms':>8} {both} {both}")
    results = [row for model in args.model for row in compare(args, model)]
    write_json(args.output_json, args, facts, results=results)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="contention", description="Prefill and decode beside a busy process and a second engine.")
    add = parser.add_argument
    told = f"models: {SMALL!r}, a name in benchmarks/configs, or a directory (default: %(default)s)"
    add("--model", nargs="+", default=[SMALL, "qwen3-0.6b"], help=told)
    add("--num-layers", type=positive, default=4, help="of qwen3-0.6b (default: %(default)s)")
    add("--prompt-len", type=positive, default=256, help="tokens (default: %(default)s)")
    add("--output-len", type=positive, default=64, help="tokens (default: %(default)s)")
    add("--rounds", type=positive, default=5, help="(default: %(default)s)")
    add("--other", type=Path, help="another tree to measure in turns, with its extensions built")
    add_json_option(parser)
    return parser.run(argv, run)


if __name__ == "__main__":
    sys.exit(main())
