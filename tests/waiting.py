"""Waiting for what happens elsewhere, in another thread or process."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import pytest

PATIENCE = 60.0  # seconds after which a test gives up, on a busy machine too
PATIENT = {  # seconds after which the engine and the server give up on a disk, a rank or a client
    "nanovllm.config_rules": ("DIR_SECONDS",),
    "nanovllm.features.kv_disk.store": ("LATE_SECONDS", "OPEN_SECONDS"),
    "nanovllm.features.kv_disk.part": ("CLOSE_SECONDS",),
    "nanovllm.features.distributed.executor": ("CAUSE_SECONDS", "CLOSE_SECONDS"),
    "nanovllm.apps.server.run": ("ANSWER_SECONDS", "CLOSE_SECONDS"),
}


def be_patient(patch: pytest.MonkeyPatch) -> None:
    """What is imported of these modules gives up later than a test does."""
    for module, names in PATIENT.items():
        for name in names if module in sys.modules else ():
            patch.setattr(sys.modules[module], name, 2 * PATIENCE)


def eventually(condition: Callable[[], bool], seconds: float = PATIENCE) -> bool:
    """Whether the condition becomes true in time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True
