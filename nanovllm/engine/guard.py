"""The engine guard: one thread of one process may use an engine at a time, and no callback may during a step."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from nanovllm.errors import EngineError


@dataclass(eq=False, slots=True)
class EngineCall:
    """A call that uses the engine. `running`: false while a stream is suspended between two outputs."""

    name: str
    thread: threading.Thread = field(default_factory=threading.current_thread)
    running: bool = True

    def __str__(self) -> str:
        return f"{self.name}() in thread {self.thread.name!r}"


class EngineGuard:
    """Raises EngineError for concurrent use of an engine. The use that came first continues; nothing ever waits.

    An *operation* changes the engine: until it ends, no other operation may begin, neither in another thread nor in a
    callback of the same thread. A *call*, such as generate(), consists of many operations: until it ends, other threads
    may begin no operation.

    The engine belongs to the process that made it: a fork of that has its memory and none of its threads, so that
    what waits for them would wait for ever.
    """

    def __init__(self) -> None:
        self._process = os.getpid()
        # Of `_operation`, held for an instant; in that instant garbage collection may begin another operation.
        self._lock = threading.RLock()
        self._operation: EngineCall | None = None  # in progress
        self._calls: list[EngineCall] = []

    @property
    def is_forked(self) -> bool:
        """Whether this process is a fork of the engine's."""
        return os.getpid() != self._process

    def check_process(self, name: str) -> None:
        """Raise EngineError in a fork of the engine's process. name: of the refused operation."""
        if self.is_forked:
            raise EngineError(
                f"{name}() was called in process {os.getpid()}, a fork of process {self._process}, which made the "
                "engine: a fork has none of its threads, so use the engine there, or make an LLM in the fork"
            )

    @contextmanager
    def operation(
        self, name: str, *, allow_suspended: bool = False, resumes: EngineCall | None = None
    ) -> Iterator[EngineCall]:
        """Context of an operation; gives its caller.

        allow_suspended: suspended calls of other threads do not prevent it. resumes: the call that it continues, which
        prevents it only while it runs.
        """
        self.check_process(name)
        caller = EngineCall(name)
        try:
            try:
                self._begin(caller, allow_suspended, resumes)
                yield caller
            finally:
                self._end_operation(caller)
        finally:  # once more, if an interrupt came in the midst of that
            self._end_operation(caller)

    @contextmanager
    def call(self, name: str) -> Iterator[None]:
        """Context of a call."""
        caller = EngineCall(name)
        try:
            try:
                with self.operation(name):
                    self._calls.append(caller)
                yield
            finally:
                self.end(caller)
        finally:
            self.end(caller)

    @contextmanager
    def resumed(self, call: EngineCall) -> Iterator[None]:
        """Context of one part of a call that is suspended between its parts and may continue in another thread."""
        with self.operation(call.name, resumes=call) as caller:
            if call not in self._calls:
                self._calls.append(call)
            call.thread = caller.thread
            call.running = True
        try:
            yield
        finally:
            call.running = False

    def end(self, call: EngineCall) -> None:
        """End a call. Safe to call twice, and at any time."""
        self._calls = [other for other in self._calls if other is not call]

    def _begin(self, caller: EngineCall, allow_suspended: bool, resumes: EngineCall | None) -> None:
        with self._lock:
            holder = self._operation
            if holder is None:
                self._operation = caller
        if holder is not None:
            raise EngineError(self._refusal(caller, holder))
        for call in self._calls:
            is_around_it = call.thread is caller.thread and call is not resumes
            # A suspended call whose thread has ended never prevents another.
            may_be_suspended = allow_suspended or call is resumes or not call.thread.is_alive()
            if not is_around_it and (call.running or not may_be_suspended):
                raise EngineError(self._refusal(caller, call))

    def _end_operation(self, caller: EngineCall) -> None:
        if self._operation is caller:
            self._operation = None

    def _refusal(self, caller: EngineCall, holder: EngineCall) -> str:
        if caller.thread is holder.thread:
            return (
                f"{caller} was called from a callback of {holder.name}(): an engine cannot be used while it computes, "
                "so use it when that call has returned"
            )
        running = next((call for call in self._calls if call.thread is holder.thread and call.running), holder)
        return (
            f"{caller} was refused, because {running} is using the engine: one thread at a time may use an engine, so "
            "wait until that call has ended, or make an LLM for each thread"
        )
