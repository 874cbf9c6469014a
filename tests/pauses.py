"""Random pauses in all threads, which show what depends on time. NANOVLLM_TEST_PAUSES=SEED runs the tests with them.

A thread pauses when it starts, when it puts something into a queue or takes it out, before each piece of work of a
stream of the CPU device, before and after each step of the server's engine, and in each round of an event loop. So the
threads of streams, of KV on disk, of the server and of the command line overtake each other in ways that an idle
machine never shows, and so do ranks whose processes are kept.
"""

from __future__ import annotations

import asyncio.base_events
import functools
import os
import queue
import threading
import time
from collections.abc import Callable
from itertools import count
from random import Random
from typing import Any

VARIABLE = "NANOVLLM_TEST_PAUSES"
# seconds at most; of all places to pause
SHORT = 0.005
SHARE_OF_SHORT = 1 / 8
LONG = 0.05
SHARE_OF_LONG = 1 / 400


class Pauses:
    """Every thread draws its pauses from a generator of its own."""

    def __init__(self, seed: str) -> None:
        self._seed = seed
        self._threads = count()
        self._own = threading.local()
        self._sleep = time.sleep  # which tests may replace

    def pause(self) -> None:
        if not hasattr(self._own, "random"):
            self._own.random = Random(f"{self._seed} {threading.current_thread().name} {next(self._threads)}")
        chosen = self._own.random.random()
        if chosen < SHARE_OF_LONG:
            self._sleep(LONG)
        elif chosen < SHARE_OF_LONG + SHARE_OF_SHORT:
            self._sleep(self._own.random.uniform(0, SHORT))

    def around(self, owner: type, name: str) -> None:
        """From now on a method pauses before it begins and after it has ended."""
        method: Callable[..., Any] = getattr(owner, name)

        @functools.wraps(method)
        def paused(*arguments: Any, **named: Any) -> Any:
            self.pause()
            try:
                return method(*arguments, **named)
            finally:
                self.pause()

        setattr(owner, name, paused)

    def in_queues(self, kind: type) -> type:
        """The class of queues, with pauses."""
        made = type(kind.__name__, (kind,), {})
        for name in ("put", "get"):
            self.around(made, name)
        return made


def install_pauses() -> None:
    """Pause in this process from now on, if the environment asks for it. Before nanovllm's modules are imported."""
    seed = os.environ.get(VARIABLE)
    if not seed:
        return
    pauses = Pauses(seed)
    for name in ("SimpleQueue", "Queue"):
        setattr(queue, name, pauses.in_queues(getattr(queue, name)))
    from nanovllm.apps.server.async_llm import AsyncLLM
    from nanovllm.device.cpu import WorkerStream

    pauses.around(threading.Thread, "run")
    pauses.around(WorkerStream, "_carry_out")
    pauses.around(AsyncLLM, "_step")
    pauses.around(asyncio.base_events.BaseEventLoop, "_run_once")
