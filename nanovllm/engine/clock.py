"""The engine's clock, for arrival times and metrics."""

from __future__ import annotations

import time


class Clock:
    """Seconds since the epoch, comparable with `time.time()`, that go on as steadily as `time.monotonic()`.

    So differences are durations even if the system's clock is set in between. `reset` follows such a change.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Read `time.time()` anew."""
        self._offset = time.time() - time.monotonic()

    def now(self) -> float:
        return self._offset + time.monotonic()
