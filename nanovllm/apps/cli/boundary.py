"""Turns errors of a request or a command into sentences, writes messages, and handles Ctrl-C."""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, TextIO, TypeVar

from tqdm import tqdm

from nanovllm.errors import ConfigError, EngineError, ModelError, RequestError, one_line, told


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
        was_pending = self._pending
        self._pending = False
        return was_pending

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._allowed or self.take():
            raise KeyboardInterrupt
        self._pending = True


T = TypeVar("T")
OWN_ERRORS = (ConfigError, EngineError, ModelError, RequestError)  # their messages are sentences for the user
LONGEST = 2000  # characters of a sentence


class Boundary:
    """Turns errors of any type into sentences, and shows their tracebacks only if `verbose`."""

    def __init__(self, verbose: bool = False) -> None:
        self._verbose = verbose

    def attempt(
        self, action: Callable[[], T], passing: tuple[type[Exception], ...] = ()
    ) -> tuple[T | None, str | None]:
        """Run an action for one request: returns its result, or a sentence about the error.

        An error affects only its own request. Errors of the types in `passing` and Ctrl-C are raised.
        """
        try:
            return action(), None
        except passing:
            raise
        except Exception as error:
            return None, self.sentence(error)

    def sentence(self, error: BaseException) -> str:
        """One line about the error, which follows its traceback if `verbose`."""
        if self._verbose:
            say("".join(traceback.format_exception(error)).rstrip())
        if isinstance(error, OWN_ERRORS):
            return one_line(str(error), LONGEST)
        if isinstance(error, OSError) and error.strerror:
            file = "" if error.filename is None else f"{os.fsdecode(error.filename)!r}: "
            return one_line(f"{file}{error.strerror}", LONGEST)
        hint = "" if self._verbose else "; --verbose shows where"
        return one_line(f"unexpected error: {told(error)}{hint}", LONGEST)


def say(text: str, end: str = "\n") -> None:
    """Write to standard error, above a bar of progress. A message that cannot be written is dropped."""
    try:
        tqdm.write(text, file=sys.stderr, end=end)
    except (OSError, ValueError):
        discard(sys.stderr)


def discard(stream: TextIO) -> None:
    """Redirect a stream that cannot be written to the null device, so that Python's flush at exit does not fail."""
    with suppress(OSError, ValueError, AttributeError):  # without a file descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
