"""Analysis of traces of an engine's steps, files of `LLM(trace=...)`: copies, their overlap, and waits. In seconds.

On a GPU computation waits where no kernel runs within a step. The gaps between kernels are from traces of their own.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.timing import DecodeKernels, KernelTime
from nanovllm import LLM, SamplingParams
from nanovllm.device.busy import union_seconds
from nanovllm.errors import ConfigError

Interval = tuple[float, float]
COPY = re.compile(r"(?:h2d|d2h) copy, (\d+) bytes")  # as `CpuDevice` names them
WARM_STEPS = 2  # of decode, before those that are profiled
SPARE_STEPS = 8  # in which the first prompts decode already, while the others are prefilled


@dataclass(frozen=True, slots=True)
class Slice:
    """A piece of work."""

    name: str
    begin: float
    end: float
    num_bytes: int = 0  # of a copy

    @property
    def interval(self) -> Interval:
        return self.begin, self.end


@dataclass(frozen=True, slots=True)
class Timeline:
    """The forward passes of an engine, its copies between the tiers, and when computation waited."""

    steps: list[Slice]
    copies: list[Slice]
    waits: list[Slice]

    @classmethod
    def read(cls, path: Path) -> Timeline:
        """Raises ConfigError if the file is not a trace of an engine."""
        try:
            events = [event for event in json.loads(path.read_text())["traceEvents"] if event.get("ph") == "X"]
            kernels = [_slice(event) for event in events if event.get("cat") == "kernel"]
            ranges = "gpu_user_annotation" if kernels else "user_annotation"
            named = [_slice(event) for event in events if event.get("cat") == ranges]
            copies = [piece for event in events if (piece := _copy(event)) is not None]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{str(path)!r} is not a trace that nanovllm wrote: {error!r}") from error
        attends = [piece.begin for piece in named if piece.name.startswith("attend")]
        steps = [s for s in named if s.name == "step" and any(s.begin <= begin < s.end for begin in attends)]
        if not steps:
            raise ConfigError(f"{str(path)!r} has no forward pass in it: trace a run that computes something")
        steps.sort(key=lambda step: step.begin)
        waits = [piece for piece in named if piece.name == "wait"]
        return cls(steps, copies, [idle for step in steps for idle in _idle(step, kernels)] if kernels else waits)


def _slice(event: dict[str, Any]) -> Slice:
    begin = event["ts"] / 1e6
    return Slice(event["name"], begin, begin + event["dur"] / 1e6)


def _copy(event: dict[str, Any]) -> Slice | None:
    """A copy between the tiers: of a GPU as the profiler names it, of the CPU as `CpuDevice` does; None for others."""
    piece = _slice(event)
    if event.get("cat") == "gpu_memcpy":
        across = "HtoD" in piece.name or "DtoH" in piece.name
        return replace(piece, num_bytes=event["args"]["bytes"]) if across else None
    match = COPY.fullmatch(piece.name)
    return None if match is None else replace(piece, num_bytes=int(match[1]))


def _idle(step: Slice, kernels: Sequence[Slice]) -> list[Slice]:
    """When no kernel ran within a step."""
    idle = []
    reached = step.begin
    for kernel in sorted(kernels, key=lambda piece: piece.begin):
        if step.begin <= kernel.begin < step.end:
            if kernel.begin > reached:
                idle.append(Slice("wait", reached, kernel.begin))
            reached = max(reached, kernel.end)
    return idle


@dataclass(frozen=True, slots=True)
class Overlap:
    """How much of a phase's copies was hidden behind computation."""

    steps_s: float
    copied_bytes: int  # both ways
    copies_s: float  # in which at least one copy was under way
    hidden_s: float  # of those, within a step in which the compute stream did not wait
    waits_s: float  # of the compute stream: for copies, and for CPU attention

    @property
    def hidden_share(self) -> float | None:
        """None if nothing was copied."""
        return self.hidden_s / self.copies_s if self.copies_s else None

    @classmethod
    def of(cls, timeline: Timeline, steps: Sequence[Slice], until: float) -> Overlap:
        """Of consecutive steps, and of copies from the first one's begin to `until`."""
        begin = steps[0].begin
        copied_bytes = sum(copy.num_bytes for copy in timeline.copies if begin <= copy.begin < until)
        copies = [
            (max(begin, copy.begin), min(until, copy.end))
            for copy in timeline.copies
            if copy.begin < until and copy.end > begin
        ]
        waits = [wait.interval for wait in timeline.waits if wait.begin < until and wait.end > begin]
        computing = [step.interval for step in steps]
        inside = union_seconds(computing) + union_seconds(copies) - union_seconds([*copies, *computing])
        waited = union_seconds(copies) + union_seconds(waits) - union_seconds([*copies, *waits])
        hidden = max(0.0, inside - waited)
        return cls(union_seconds(computing), copied_bytes, union_seconds(copies), hidden, union_seconds(waits))


def overlaps(timeline: Timeline, decode_steps: int) -> dict[str, Overlap]:
    """Of one request alone, which decoded for the last `decode_steps` steps."""
    first = len(timeline.steps) - decode_steps
    prefill = timeline.steps[:first]
    decode = timeline.steps[first:]
    end = max(piece.end for piece in [*timeline.steps, *timeline.copies])
    shown = {"prefill": Overlap.of(timeline, prefill, decode[0].begin if decode else end)}
    return shown | ({"decode": Overlap.of(timeline, decode, end)} if decode else {})


# ---- kernels


@dataclass(frozen=True, slots=True)
class Gaps:
    """Of a GPU, from a phase's first kernel to its last."""

    kernels: int
    span_s: float
    idle_s: float  # in which no kernel ran

    @classmethod
    def read(cls, path: Path) -> Gaps | None:
        """From a trace of torch's profiler; None if it has no kernel."""
        events = json.loads(path.read_text())["traceEvents"]
        kernels = [(e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6) for e in events if e.get("cat") == "kernel"]
        if not kernels:
            return None
        total = max(end for _, end in kernels) - min(begin for begin, _ in kernels)
        return cls(len(kernels), total, total - union_seconds(kernels))


def kernel_gaps(llm: LLM, prompt: list[int], output_len: int) -> dict[str, Gaps | None]:
    """Prefill and decode of one request on a GPU, each under torch's profiler, in separate traces."""
    params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
    llm.engine.add_request("gaps", None, params, prompt)

    def prefill() -> None:
        while not any(output.outputs[0].token_ids for output in llm.engine.step()):
            pass

    def decode() -> None:
        while llm.engine.has_unfinished_requests():
            llm.engine.step()

    return {name: _gaps_of(phase) for name, phase in (("prefill", prefill), ("decode", decode))}


def kernel_output(steps: int) -> int:
    """Output tokens of a request with so many profiled steps."""
    return steps + WARM_STEPS + SPARE_STEPS


def decode_kernels(llm: LLM, prompts: Sequence[list[int]], steps: int) -> DecodeKernels:
    """All prompts are prefilled; then so many decode steps of all of them run under torch's profiler."""
    params = SamplingParams(temperature=0.0, max_tokens=kernel_output(steps), ignore_eos=True)
    waiting = {f"kernels-{index}" for index in range(len(prompts))}
    for name, prompt in zip(sorted(waiting), prompts, strict=True):
        llm.engine.add_request(name, None, params, prompt)
    while waiting:
        waiting -= {output.request_id for output in llm.engine.step() if output.outputs[0].token_ids}
    for _ in range(WARM_STEPS):
        llm.engine.step()
    on_gpu = torch.cuda.is_available()
    activity = torch.profiler.ProfilerActivity.CUDA if on_gpu else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity]) as profiler:
        start = time.perf_counter()
        for _ in range(steps):
            llm.engine.step()
        if on_gpu:
            torch.cuda.synchronize()
        taken = time.perf_counter() - start
    for name in [f"kernels-{index}" for index in range(len(prompts))]:
        llm.engine.abort_request(name)
    kernels = []
    for event in profiler.key_averages():
        micros = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        kernels.append(KernelTime(event.key, event.count / steps, micros / 1e6 / steps))
    kernels.sort(key=lambda kernel: -kernel.seconds)
    return DecodeKernels(steps, len(prompts), taken / steps, kernels)


def _gaps_of(phase: Callable[[], None]) -> Gaps | None:
    with TemporaryDirectory(prefix="nanovllm-bench-") as directory:
        path = Path(directory) / "kernels.json"
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            phase()
            torch.cuda.synchronize()
        profiler.export_chrome_trace(str(path))
        return Gaps.read(path)
