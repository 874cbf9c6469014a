"""Timing of calls, for rates that are measured on the machine at hand."""

from __future__ import annotations

import time
from collections.abc import Callable


def call_seconds(work: Callable[[], object], rounds: int, finish: Callable[[], object] = lambda: None) -> list[float]:
    """Seconds of each of `rounds` calls of `work` and `finish`, after a first call that does not count.

    finish: waits for what `work` launched.
    """
    times: list[float] = []
    work()
    finish()
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        finish()
        times.append(time.perf_counter() - start)
    return times
