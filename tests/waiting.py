"""Waiting for what happens elsewhere, in another thread or process."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE = 60.0  # seconds after which a test gives up, on a busy machine too


def eventually(condition: Callable[[], bool], seconds: float = PATIENCE) -> bool:
    """Whether the condition becomes true in time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True
