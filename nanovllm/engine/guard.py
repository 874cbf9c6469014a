"""The engine guard: one thread at a time may use an engine, and no callback may use it during a step."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from nanovllm.errors import EngineError

HOLDER = "holder"


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
    """

    def __init__(self) -> None:
        self._held: dict[str, EngineCall] = {}  # the operation in progress, under HOLDER
        self._calls: list[EngineCall] = []

    @contextmanager
    def operation(self, name: str, *, allow_suspended: bool = False) -> Iterator[None]:
        """Context of an operation. allow_suspended: suspended calls of other threads do not prevent it."""
        caller = EngineCall(name)
        with self._holding(caller):
            self._check_calls(caller, allow_suspended)
            yield

    @contextmanager
    def call(self, name: str) -> Iterator[None]:
        """Context of a call."""
        caller = EngineCall(name)
        try:
            with self._holding(caller):
                self._check_calls(caller)
                self._calls.append(caller)
            yield
        finally:
            self.end(caller)

    @contextmanager
    def resumed(self, call: EngineCall) -> Iterator[None]:
        """Context of one part of a call that is suspended between its parts and may continue in another thread."""
        caller = EngineCall(call.name)
        with self._holding(caller):
            if call in self._calls and call.running:
                raise EngineError(self._refusal(caller, call))
            self._check_calls(caller, ignore=call)
            if call not in self._calls:
                self._calls.append(call)
            call.thread, call.running = caller.thread, True
        try:
            yield
        finally:
            call.running = False

    def end(self, call: EngineCall) -> None:
        """End a call. Safe to call twice, and at any time."""
        self._calls = [other for other in self._calls if other is not call]

    @contextmanager
    def _holding(self, caller: EngineCall) -> Iterator[None]:
        # `setdefault` acquires and records the holder in one atomic step. With a lock, an interrupt between acquiring
        # it and recording that would leave it held for good.
        try:
            holder = self._held.setdefault(HOLDER, caller)
            if holder is not caller:
                raise EngineError(self._refusal(caller, holder))
            yield
        finally:
            if self._held.get(HOLDER) is caller:
                del self._held[HOLDER]

    def _check_calls(self, caller: EngineCall, allow_suspended: bool = False, ignore: EngineCall | None = None) -> None:
        for call in self._calls:
            is_other = call.thread is not caller.thread and call is not ignore
            # A suspended call whose thread has ended never prevents another.
            if is_other and (call.running or (call.thread.is_alive() and not allow_suspended)):
                raise EngineError(self._refusal(caller, call))

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
