"""Ranks that fail on purpose: a main function of their processes that breaks one of them, as the environment says."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from nanovllm import build
from nanovllm.features.distributed import rank
from nanovllm.features.distributed.rank import RankSetup
from nanovllm.layers.decoder_layer import DecoderLayer

VARIABLE = "TEST_RANK_FAILURE"  # rank, phase and way
STEPS = {"prefill": 1, "decode": 3}


def run_failing_rank(connection: Connection, setup: RankSetup) -> None:
    """`run_rank`, of which one rank fails while it loads, prefills or decodes."""
    index, phase, way = os.environ[VARIABLE].split(",")
    if setup.rank == int(index):
        fail = FAILURES[way]
        if phase == "load":
            build.load_model = _before(build.load_model, fail)  # type: ignore[assignment]
        else:
            _fail_in_step(STEPS[phase], fail)
    rank.run_rank(connection, setup)


def _before(function: Callable[..., Any], fail: Callable[[], None]) -> Callable[..., Any]:
    def failing(*args: Any, **kwargs: Any) -> Any:
        fail()
        return function(*args, **kwargs)

    return failing


def _fail_in_step(step: int, fail: Callable[[], None]) -> None:
    """Fail in the first layer of a step, where the other ranks wait for a sum."""
    finish_ = DecoderLayer._finish_
    calls = []

    def failing(self: DecoderLayer, *args: Any) -> Any:
        if self._build.prefix == "model.layers.0.":
            calls.append(self)
            if len(calls) == step:
                fail()
        return finish_(self, *args)

    DecoderLayer._finish_ = failing  # type: ignore[method-assign]


def _raise() -> None:
    raise LookupError("injected")


FAILURES: dict[str, Callable[[], None]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "raise": _raise,
    "hang": lambda: time.sleep(1000),
}
