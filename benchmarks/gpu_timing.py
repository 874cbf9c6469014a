"""Timing of short work on a GPU without the time of launching it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

WARM_UP = 3
TRIES = 5
CYCLES_PER_SECOND = 2e9  # at least a GPU's clock rate; a sleep that is too long only costs time


def queued_seconds(work: Callable[[], object], repeats: int, gpu: Any = torch.cuda) -> float:
    """Median seconds that a call keeps the GPU busy.

    Events around a call measure the host if launching takes longer than running. Therefore a sleeping kernel blocks the
    stream until every call is queued, and the calls then run one after the other. Raises RuntimeError if the work
    itself waits for the GPU, so that no queue can form. `gpu` replaces torch.cuda in tests.
    """
    for _ in range(WARM_UP):
        work()
    gpu.synchronize()
    start = time.perf_counter()
    work()
    launch = time.perf_counter() - start
    gpu.synchronize()
    cycles = int(CYCLES_PER_SECOND * (2 * repeats * launch + 1e-3))
    for _ in range(TRIES):
        marks = [(gpu.Event(enable_timing=True), gpu.Event(enable_timing=True)) for _ in range(repeats)]
        awake = gpu.Event()
        gpu._sleep(cycles)
        awake.record()
        for begin, end in marks:
            begin.record()
            work()
            end.record()
        all_queued = not awake.query()
        gpu.synchronize()
        if all_queued:
            return statistics.median(begin.elapsed_time(end) for begin, end in marks) / 1e3
        cycles *= 4
    raise RuntimeError("the work waits for the GPU, or is launched more slowly than it can be held up: it has no queue")
