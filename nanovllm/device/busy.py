"""How much was done, and in what time, by work that comes in pieces which may overlap."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Busy:
    """Bytes that were read or copied, and the seconds in which at least one piece of that work ran."""

    num_bytes: int = 0
    seconds: float = 0.0

    def __sub__(self, other: Busy) -> Busy:
        return Busy(self.num_bytes - other.num_bytes, self.seconds - other.seconds)


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
