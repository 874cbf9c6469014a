"""Ctrl-C, without losing what is finished."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Interrupt:
    """While entered, Ctrl-C is noted, and raised as KeyboardInterrupt only where that is `allowed`.

    So no result is half written and nothing is counted twice. A second Ctrl-C is raised wherever it comes.
    """

    def __init__(self) -> None:
        self._pending = False
        self._allowed = False
        self._before: Any = None

    def __enter__(self) -> Interrupt:
        in_main_thread = threading.current_thread() is threading.main_thread()
        # A shell that starts a process in the background has it ignore Ctrl-C, which stays so.
        if in_main_thread and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._before = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
            self._before = None

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """Within it Ctrl-C is raised at once, and on entry one that came before."""
        self._allowed = True
        try:
            if self.take():
                raise KeyboardInterrupt
            yield
        finally:
            self._allowed = False

    def take(self) -> bool:
        """Whether one came before; it is forgotten."""
        was_pending, self._pending = self._pending, False
        return was_pending

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._allowed or self.take():
            raise KeyboardInterrupt
        self._pending = True
