"""How fast the link is, from marks on streams: for devices on which a copy does not run where it is put."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from nanovllm.device.base import Mark, Stream
from nanovllm.device.busy import Busy

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
