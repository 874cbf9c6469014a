"""Where an error of one request, or of a whole command, becomes a sentence; and where messages go."""

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

from nanovllm.errors import ConfigError, EngineError, ModelError, RequestError, told


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


T = TypeVar("T")
OWN_ERRORS = (ConfigError, EngineError, ModelError, RequestError)  # each is a sentence for the person who reads it
LONGEST = 2000  # characters of a sentence


class Boundary:
    """Turns errors of any type into sentences, and shows their tracebacks only if `verbose`."""

    def __init__(self, verbose: bool = False) -> None:
        self._verbose = verbose

    def attempt(
        self, action: Callable[[], T], passing: tuple[type[Exception], ...] = ()
    ) -> tuple[T | None, str | None]:
        """What is done for one request: the action's result, or the sentence that says why there is none.

        Whatever the request causes is its own error; the others go on. `passing` are errors that are not of the
        request, and Ctrl-C passes as well.
        """
        try:
            return action(), None
        except passing:
            raise
        except Exception as error:
            return None, self.sentence(error)

    def sentence(self, error: BaseException) -> str:
        """One line about the error, after its traceback if that is wanted."""
        if self._verbose:
            say("".join(traceback.format_exception(error)).rstrip())
        if isinstance(error, OWN_ERRORS):
            return one_line(str(error))
        if isinstance(error, OSError):
            return one_line(told_by_system(error))
        hint = "" if self._verbose else "; --verbose shows where"
        return one_line(f"unexpected error: {told(error)}{hint}")


def told_by_system(error: OSError) -> str:
    """What the system says, and of which file."""
    said = error.strerror or str(error) or type(error).__name__
    return said if error.filename is None else f"{os.fsdecode(error.filename)!r}: {said}"


def one_line(text: str) -> str:
    """The text in one line that can be written in UTF-8, cut where it is longer than anybody reads."""
    line = " ".join(text[: 2 * LONGEST].split()).encode("utf-8", "backslashreplace").decode()
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 3]}..."


def say(text: str, end: str = "\n") -> None:
    """Write to standard error. A message that cannot be written costs nobody a result."""
    try:
        print(text, end=end, file=sys.stderr, flush=True)
    except (OSError, ValueError):
        discard(sys.stderr)


def discard(stream: TextIO) -> None:
    """Nobody takes what this stream still holds: Python's own flush at exit must not complain about that."""
    with suppress(OSError, ValueError, AttributeError):  # not a file of the system
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def open_closed_streams() -> None:
    """Give closed standard streams a file, so that no other file gets their numbers.

    Python has None for such a stream. Standard error becomes one that forgets; the others stay None.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  as long as the process lives
