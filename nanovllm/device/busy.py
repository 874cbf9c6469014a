"""Meters of bytes moved or read and of the time that this took, measured while the work runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from nanovllm.device.base import Busy, Mark, Stream


class BusyMeter:
    """Measures on the threads that do the work, without waiting. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._running = 0
        self._num_bytes = 0
        self._seconds = 0.0
        self._since = 0.0  # when the oldest of the running pieces of work began

    @contextmanager
    def running(self, num_bytes: int) -> Iterator[None]:
        """Enclose a piece of work. Failed work counts its time and no bytes."""
        self._begin()
        done = 0
        try:
            yield
            done = num_bytes
        finally:
            self._end(done)

    def read(self) -> Busy:
        """The total so far. Running work counts with its time; its bytes count when it ends."""
        with self._lock:
            under_way = self._clock() - self._since if self._running else 0.0
            return Busy(self._num_bytes, self._seconds + under_way)

    def _begin(self) -> None:
        with self._lock:
            if not self._running:
                self._since = self._clock()
            self._running += 1

    def _end(self, num_bytes: int) -> None:
        with self._lock:
            self._running -= 1
            self._num_bytes += num_bytes
            if not self._running:
                self._seconds += self._clock() - self._since


# copies; marks cost about as much as a small copy
_MEASURED = 64
_OUT_OF = 1024


@dataclass(frozen=True, slots=True)
class MarkedCopy:
    """A copy between two marks on its stream."""

    begin: Mark
    end: Mark
    num_bytes: int


class LinkMeter:
    """Samples copies: marks _MEASURED of every _OUT_OF copies and reads the marks when all are passed. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._count = 0
        self._measures = False  # the copies of the current sample
        self._sample: list[MarkedCopy] = []
        self._total = Busy()

    def before(self, stream: Stream) -> Mark | None:
        """Call before a copy is submitted to `stream` and pass the result to `after`; None if the copy is not sampled.

        At most _MEASURED copies are kept even if the meter is never read: a new sample begins only after the last one
        was counted.
        """
        with self._lock:
            position = self._count % _OUT_OF
            self._count += 1
            if position == 0:
                self.read()
                self._measures = not self._sample
        return stream.mark() if self._measures and position < _MEASURED else None

    def after(self, stream: Stream, begin: Mark | None, num_bytes: int) -> None:
        if begin is not None:
            marked = MarkedCopy(begin, stream.mark(), num_bytes)
            with self._lock:
                self._sample.append(marked)

    def read(self) -> Busy:
        """Bytes of the sampled copies, and the time during which at least one of them ran. Does not wait."""
        with self._lock:
            times = [times_of(copy.begin, copy.end) for copy in self._sample]
            passed = [pair for pair in times if pair is not None]
            if self._sample and len(passed) == len(self._sample):
                num_bytes = self._total.num_bytes + sum(copy.num_bytes for copy in self._sample)
                self._total = Busy(num_bytes, self._total.seconds + union_seconds(passed))
                self._sample = []
            return self._total


def times_of(begin: Mark, end: Mark) -> tuple[float, float] | None:
    """The times of two marks in seconds; None before both are reached."""
    times = begin.seconds(), end.seconds()
    return None if times[0] is None or times[1] is None else (times[0], times[1])


def union_seconds(intervals: Iterable[tuple[float, float]]) -> float:
    """The length of the union of intervals (begin, end)."""
    total = 0.0
    reached = float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total
