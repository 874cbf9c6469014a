"""Which work of the parts is under way, and whether it goes on: so the engine notices a disk that does not answer."""

from __future__ import annotations

import time

PATIENCE_SECONDS = 10.0  # without news of the oldest work; after that nothing is read until the disk answers


class UnderWay:
    """The work of each part that has begun and not ended.

    A part takes its reads in order, and its looks at the directory beside them. So the oldest goes on, unless a call to
    the disk does not return.
    """

    def __init__(self, num_parts: int) -> None:
        self._heard: list[dict[int, float]] = [{} for _ in range(num_parts)]  # of each part by work, the oldest first

    def begin(self, work: int) -> None:
        for heard in self._heard:
            heard[work] = time.monotonic()

    def progressed(self, part: int, work: int) -> None:
        if work in self._heard[part]:  # what threads of a part report may overtake each other
            self._heard[part][work] = time.monotonic()

    def ended(self, part: int, work: int) -> None:
        heard = self._heard[part]
        was_oldest = next(iter(heard), None) == work
        heard.pop(work, None)
        if was_oldest and (oldest := next(iter(heard), None)) is not None:
            heard[oldest] = time.monotonic()  # it may have waited until now; another one has overtaken what goes on

    def __contains__(self, work: int) -> bool:
        """Whether the work is under way in any part."""
        return any(work in heard for heard in self._heard)

    @property
    def is_stuck(self) -> bool:
        """Whether the oldest work of a part waits for the disk for too long. The disk may answer later."""
        oldest = (next(iter(heard.values()), None) for heard in self._heard)
        return any(time.monotonic() - heard > PATIENCE_SECONDS for heard in oldest if heard is not None)
