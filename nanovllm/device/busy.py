"""Bytes moved or read and the time that took, measured while the work runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from nanovllm.device.base import Busy, Mark, Stream


class BusyMeter:
    """Measures where the work runs, so that nobody has to wait for it. Any thread may use it."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._running = 0
        self._num_bytes = 0
        self._seconds = 0.0
        self._since = 0.0  # when the first of those that run now began

    @contextmanager
    def running(self, num_bytes: int) -> Iterator[None]:
        """Around a piece of work. One that fails has taken its time and done nothing."""
        self._begin()
        done = 0
        try:
            yield
            done = num_bytes
        finally:
            self._end(done)

    def read(self) -> Busy:
        """So far. Of work that is under way the time counts, and the bytes do when it ends."""
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


_MEASURED, _OUT_OF = 64, 1024  # copies; marks cost about as much as a small copy


@dataclass(frozen=True, slots=True)
class MarkedCopy:
    """A copy between two marks on its stream."""

    begin: Mark
    end: Mark
    num_bytes: int

    def times(self) -> tuple[float, float] | None:
        """Seconds at which it began and ended; None as long as it has not ended."""
        begin, end = self.begin.seconds(), self.end.seconds()
        return None if begin is None or end is None else (begin, end)


class LinkMeter:
    """Marks a run of copies every now and then, and reads the marks once all of the run are passed."""

    def __init__(self) -> None:
        self._count = 0
        self._measures = False  # in the run of copies under way
        self._run: list[MarkedCopy] = []
        self._total = Busy()

    def before(self, stream: Stream) -> Mark | None:
        """To be passed on to `after`, before a copy is put on `stream`; None if this one is not measured.

        At most _MEASURED copies are kept, whether anybody reads the meter or not: a new run of them begins only when
        the last one was counted.
        """
        position = self._count % _OUT_OF
        self._count += 1
        if position == 0:
            self.read()
            self._measures = not self._run
        return stream.mark() if self._measures and position < _MEASURED else None

    def after(self, stream: Stream, begin: Mark | None, num_bytes: int) -> None:
        if begin is not None:
            self._run.append(MarkedCopy(begin, stream.mark(), num_bytes))

    def read(self) -> Busy:
        """Bytes of the copies measured so far, and the time in which at least one of them ran. Waits for nothing."""
        times = [copy.times() for copy in self._run]
        passed = [pair for pair in times if pair is not None]
        if self._run and len(passed) == len(self._run):
            num_bytes = self._total.num_bytes + sum(copy.num_bytes for copy in self._run)
            self._total = Busy(num_bytes, self._total.seconds + union_seconds(passed))
            self._run = []
        return self._total


def union_seconds(spans: Iterable[tuple[float, float]]) -> float:
    """How long at least one of the spans (begin, end) lasted."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total
