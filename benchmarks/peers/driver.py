"""The run: environments, one checkpoint, then rounds in which the engines take turns."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.peers.env import EngineFailure, environment, last_line
from benchmarks.peers.process import command, json_of, run_job
from benchmarks.peers.runner import Job
from benchmarks.shapes import Shape

RUNNERS = {
    "nanovllm": "benchmarks.peers.run_nanovllm",
    "vllm": "benchmarks.peers.run_vllm",
    "llama.cpp": "benchmarks.peers.run_llama_cpp",
    "transformers": "benchmarks.peers.run_transformers",
}
GGUF_ENGINES = ("nanovllm", "llama.cpp")  # those that run the same GGUF file
LONGEST_OF_PEERS = 8192  # above it only nanovllm runs: Transformers would take an hour
WARMUP = 512
Run = Callable[[str, Job], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Plan:
    """The work of all engines. Lengths in tokens."""

    engines: Sequence[str]
    prompt_lens: Sequence[int]
    output_len: int
    repeats: int
    seed: int

    def lengths(self, engine: str) -> list[int]:
        """Prompt lengths that `engine` is run with."""
        return [n for n in self.prompt_lens if engine == "nanovllm" or n <= LONGEST_OF_PEERS]


@dataclass
class Findings:
    """Results by engine and prompt length, None in rounds without one.

    A result's "ceiling" is the better of those measured right before and after it, since the memory bandwidth of a
    shared machine may change by a factor of two within minutes.
    """

    runs: dict[tuple[str, int], list[dict[str, Any] | None]] = field(default_factory=dict)
    ceilings: list[dict[str, float]] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)

    @property
    def ceiling(self) -> dict[str, float]:
        """The best ceilings of the run."""
        return best(self.ceilings)


def best(ceilings: Sequence[dict[str, float]]) -> dict[str, float]:
    """The highest value of each kind."""
    return {name: max(c[name] for c in ceilings) for name in ("matmul_flop_s", "read_bytes_s")}


@dataclass(frozen=True, slots=True)
class Workshop:
    """The directory of environments, checkpoint and caches, and the number of threads of every engine."""

    work_dir: Path
    torch: Sequence[str]
    threads: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))

    def pythons(self, engines: Sequence[str], failures: dict[str, str]) -> dict[str, Path]:
        """The Python of each engine that could be installed; the others go to `failures`."""
        environments = {}
        for engine in engines:
            try:
                environments[engine] = environment(engine, self.work_dir, self.torch)
            except EngineFailure as error:
                report_failure(failures, engine, error)
        return environments

    def gguf(self, checkpoint: Path, python: Path, kind: str) -> Path:
        """The checkpoint as GGUF with matrices of type `kind`, written once. Raises EngineFailure."""
        target = checkpoint / f"model-{kind}.gguf"
        if not target.exists():
            arguments = command(python, "benchmarks.peers.gguf_writer", str(checkpoint), str(target), kind)
            done = subprocess.run(arguments, capture_output=True, text=True)
            if done.returncode != 0:
                raise EngineFailure(f"writing {target.name} failed: {last_line(done.stderr)}")
        return target

    def runner(self, pythons: Mapping[str, Path]) -> Run:
        """Runs a job in the engine's own environment."""
        return lambda engine, job: run_job(engine, pythons[engine], RUNNERS[engine], job, self.work_dir)

    def ceilings(self) -> dict[str, float]:
        """The machine's peak rates, by this interpreter's torch."""
        arguments = command(Path(sys.executable), "benchmarks.peers.run_ceilings")
        return json_of("ceilings", arguments, self.work_dir, self.threads)


def report_failure(failures: dict[str, str], name: str, error: EngineFailure) -> None:
    failures[name] = str(error)
    print(f"{name}: {error}", file=sys.stderr, flush=True)


def job_of(shape: Shape, checkpoint: Path, gguf: Path | None, plan: Plan, prompt_len: int, threads: int) -> Job:
    """The same prompt for every engine and round; the warm-up shares no token sequence with it."""
    (prompt,) = shape.prompts(1, prompt_len, plan.seed)
    (warmup,) = shape.prompts(1, min(WARMUP, prompt_len), plan.seed + 1)
    return Job(
        model=str(checkpoint),
        gguf=None if gguf is None else str(gguf),
        prompt=prompt,
        warmup=[(warmup[0] + (warmup[0] == prompt[0])) % shape.network.vocab_size, *warmup[1:]],
        output_len=plan.output_len,
        dtype=str(shape.dtype).removeprefix("torch."),
        threads=threads,
        kv_bytes=(prompt_len + plan.output_len) * shape.kv_token_bytes,
    )


def take_turns(
    plan: Plan, jobs: Mapping[int, Job], run: Run, ceilings: Callable[[], dict[str, float]], findings: Findings
) -> Iterator[None]:
    """Run one process at a time, in reverse order in every second round, with ceilings before the first and after each.

    Yields after each round, with its results in `findings`. An engine that fails at a prompt length is not run with it
    again.
    """
    findings.ceilings.append(ceilings())
    for round_index in range(plan.repeats):
        for prompt_len in plan.prompt_lens:
            order = [engine for engine in plan.engines if prompt_len in plan.lengths(engine)]
            for engine in order if round_index % 2 == 0 else reversed(order):
                result = one_run(engine, prompt_len, round_index, jobs[prompt_len], run, findings)
                if result is not None:
                    findings.ceilings.append(ceilings())
                    result["ceiling"] = best(findings.ceilings[-2:])
        yield


def one_run(
    engine: str, prompt_len: int, round_index: int, job: Job, run: Run, findings: Findings
) -> dict[str, Any] | None:
    """Run one job; returns and keeps its result, or the failure's message."""
    name = f"{engine} at {prompt_len}"
    runs = findings.runs.setdefault((engine, prompt_len), [])
    result = None
    if name not in findings.failures:
        try:
            result = run(engine, job)
        except EngineFailure as error:
            report_failure(findings.failures, name, error)
    runs.append(result)
    if result is not None:
        tpot = "" if result["tpot_s"] is None else f", {result['tpot_s'] * 1e3:,.1f} ms a token"
        print(f"round {round_index + 1}: {name:<22} {prompt_len / result['prefill_s']:,.1f} tok/s{tpot}", flush=True)
    return result
