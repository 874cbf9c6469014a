"""Times of runs, with prefill and decode separate, and their spread over repeats. Times are in seconds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RequestTiming:
    """Events of one request, on a monotonic clock."""

    prompt_tokens: int
    output_tokens: int
    arrival: float
    scheduled: float  # begin of its first step
    first_token: float
    finished: float

    @property
    def ttft(self) -> float:
        """Time to the first token, including waiting."""
        return self.first_token - self.arrival

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first; None if there was only one."""
        steps = self.output_tokens - 1
        return (self.finished - self.first_token) / steps if steps > 0 else None


@dataclass(frozen=True, slots=True)
class RunTiming:
    """One batch of requests that arrived together.

    Prefill lasts from the first request's first step to the last request's first token, decode from the first
    request's first token to the end. With one request they follow each other. With several that do not fit into one
    step they overlap, and share the machine.
    """

    requests: tuple[RequestTiming, ...]

    @property
    def prefill_seconds(self) -> float:
        return max(r.first_token for r in self.requests) - min(r.scheduled for r in self.requests)

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens per second."""
        return sum(r.prompt_tokens for r in self.requests) / self.prefill_seconds

    @property
    def decode_seconds(self) -> float:
        return max(r.finished for r in self.requests) - min(r.first_token for r in self.requests)

    @property
    def decode_rate(self) -> float | None:
        """Output tokens per second, without the first of each request; None if there are none."""
        tokens = sum(r.output_tokens - 1 for r in self.requests)
        return tokens / self.decode_seconds if tokens else None

    @property
    def ttft(self) -> float:
        """Median over the requests."""
        return statistics.median(r.ttft for r in self.requests)

    @property
    def tpot(self) -> float | None:
        """Median over the requests that have one."""
        known = [r.tpot for r in self.requests if r.tpot is not None]
        return statistics.median(known) if known else None


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure over repeated runs."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Spread | None:
        """None if the runs have no such figure."""
        known = [value for value in values if value is not None]
        return cls(statistics.median(known), min(known), max(known)) if known else None


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates of repeated runs of the same work."""

    prefill_tok_s: Spread | None
    decode_tok_s: Spread | None
    ttft_s: Spread | None
    tpot_s: Spread | None

    @classmethod
    def of(cls, runs: Sequence[RunTiming]) -> Rates:
        return cls(
            prefill_tok_s=Spread.of(run.prefill_rate for run in runs),
            decode_tok_s=Spread.of(run.decode_rate for run in runs),
            ttft_s=Spread.of(run.ttft for run in runs),
            tpot_s=Spread.of(run.tpot for run in runs),
        )


def repeat(run: Callable[[], RunTiming], warmup: int, repeats: int) -> list[RunTiming]:
    """The timings of `repeats` runs, after `warmup` uncounted ones."""
    for _ in range(warmup):
        run()
    return [run() for _ in range(repeats)]


@dataclass(frozen=True, slots=True)
class KernelTime:
    """One kernel of a GPU in decode steps, or one operator of the CPU."""

    name: str
    calls: float  # a step
    seconds: float  # a step


@dataclass(frozen=True, slots=True)
class DecodeKernels:
    """What ran in decode steps, the longest first, and how long the host took for a step."""

    steps: int
    prompts: int
    step_s: float  # with the profiler on
    kernels: list[KernelTime]
