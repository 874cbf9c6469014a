"""The share of the processors that other processes used during a measurement, to judge its reliability."""

from __future__ import annotations

import os
import time
from pathlib import Path


class OtherLoad:
    """Counts from its creation. Linux only."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._others = _others_seconds()

    def share(self) -> float:
        """Share of all processors' time since then; 0.5 on two processors means that one was busy with other work."""
        elapsed = (time.monotonic() - self._start) * (os.cpu_count() or 1)
        busy = (_others_seconds() - self._others) / elapsed if elapsed else 0.0
        return min(max(busy, 0.0), 1.0)  # the system counts in ticks and can count one too many


def _others_seconds() -> float:
    """Processor seconds since boot that went neither to idleness nor to this process."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields[:8])
    busy = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
    return busy - sum(os.times()[:2])
