"""Who may use an engine: one thread at a time, and nobody while it computes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from nanovllm.errors import EngineError

HOLDER = "holder"


class EngineCall:
    """A use of the engine: what was called, and in which thread. `running`: not suspended between two outputs."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.thread = threading.current_thread()
        self.running = True

    def __str__(self) -> str:
        return f"{self.name}() in thread {self.thread.name!r}"


class EngineGuard:
    """Refuses a use that would meet another one, with an EngineError that names both; the other one goes on.

    An *operation* changes the engine: while it lasts, no other may begin, be it in another thread or in a callback of
    the same one. A *call*, such as generate(), consists of many operations: until it has ended, other threads may
    begin none. Nothing here waits for anything.
    """

    def __init__(self) -> None:
        self._held: dict[str, EngineCall] = {}  # the operation under way
        self._calls: list[EngineCall] = []

    @contextmanager
    def operation(self, name: str, *, beside_suspended: bool = False) -> Iterator[None]:
        """Nothing else uses the engine inside. beside_suspended: calls of other threads that are not running do not
        matter."""
        caller = EngineCall(name)
        with self._holding(caller):
            self._check_calls(caller, beside_suspended)
            yield

    @contextmanager
    def call(self, name: str) -> Iterator[None]:
        """Other threads do not use the engine inside."""
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
        """The same for a part of a call that is suspended between its parts, and may go on in another thread."""
        caller = EngineCall(call.name)
        with self._holding(caller):
            if call in self._calls and call.running:
                raise EngineError(self._refusal(caller, call))
            self._check_calls(caller, besides=call)
            if call not in self._calls:
                self._calls.append(call)
            call.thread, call.running = caller.thread, True
        try:
            yield
        finally:
            call.running = False

    def end(self, call: EngineCall) -> None:
        """The call is over. Safe to call twice, and at any time."""
        self._calls = [other for other in self._calls if other is not call]

    @contextmanager
    def _holding(self, caller: EngineCall) -> Iterator[None]:
        # One step of the interpreter decides who holds the engine and remembers it, so that an interrupt anywhere
        # leaves it either free or with a holder that lets go. A lock could be taken and not be known to be.
        try:
            holder = self._held.setdefault(HOLDER, caller)
            if holder is not caller:
                raise EngineError(self._refusal(caller, holder))
            yield
        finally:
            if self._held.get(HOLDER) is caller:
                del self._held[HOLDER]

    def _check_calls(
        self, caller: EngineCall, beside_suspended: bool = False, besides: EngineCall | None = None
    ) -> None:
        for call in self._calls:
            is_other = call.thread is not caller.thread and call is not besides
            # A suspended call whose thread has ended is driven by nobody.
            if is_other and (call.running or (call.thread.is_alive() and not beside_suspended)):
                raise EngineError(self._refusal(caller, call))

    def _refusal(self, caller: EngineCall, holder: EngineCall) -> str:
        if caller.thread is holder.thread:
            return (
                f"{caller} was called from a callback of {holder.name}(): an engine cannot be used while it computes, "
                "so use it when that call has returned"
            )
        whole = next((call for call in self._calls if call.thread is holder.thread and call.running), holder)
        return (
            f"{caller} was refused, because {whole} is using the engine: one thread at a time may use an engine, so "
            "wait until that call has ended, or make an LLM for each thread"
        )
