"""The engine guard: one thread of one process may use an engine at a time, and no callback may during a step."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from nanovllm.errors import EngineError


class EngineGuard:
    """Refuses concurrent use of an engine with EngineError. The use that came first goes on; nothing ever waits.

    A *call*, such as generate(), keeps other threads out until it returns; the same thread may make calls within it.
    An *operation*, such as step(), changes the engine: no other one may begin within it, as a callback might.

    The engine belongs to the process that made it. A fork has its memory and none of its threads, so that whatever
    waits for them would wait for ever.
    """

    def __init__(self) -> None:
        self._process = os.getpid()
        self._lock = threading.RLock()  # held by the thread that is in a call
        self._call = ""  # the outermost one of that thread
        self._operation = ""  # that is in progress

    @property
    def is_forked(self) -> bool:
        """Whether this process is a fork of the engine's."""
        return os.getpid() != self._process

    def check_process(self, name: str) -> None:
        """Raise EngineError in a fork of the engine's process. name: of the refused call."""
        if self.is_forked:
            raise EngineError(
                f"{name}() was called in process {os.getpid()}, a fork of process {self._process}, which made the "
                "engine: a fork has none of its threads, so use the engine there, or make an LLM in the fork"
            )

    @contextmanager
    def call(self, name: str) -> Iterator[None]:
        """Context of a call. Raises EngineError if another thread is in one."""
        self.check_process(name)
        if not self._lock.acquire(blocking=False):
            raise self._refusal(name, self._call)
        outer = self._call
        self._call = outer or name
        try:
            yield
        finally:
            self._call = outer
            self._lock.release()

    @contextmanager
    def operation(self, name: str) -> Iterator[None]:
        """Context of an operation. Raises EngineError if another thread is in a call, or within an operation."""
        with self.call(name):
            if self._operation:
                raise self._refusal(name, self._operation)
            self._operation = name
            try:
                yield
            finally:
                self._operation = ""

    def _refusal(self, name: str, other: str) -> EngineError:
        return EngineError(
            f"{name}() was refused, because {other}() is using the engine: one thread at a time may use an engine, and "
            "no callback of it may, so wait until that call has returned, or make an LLM for each thread"
        )
