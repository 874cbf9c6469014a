"""The engine's exceptions. Each message says what was wrong, the value, and what to do."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

MOST_QUOTED = 200  # characters of a value in a message
MOST_TOLD = 500  # characters of another library's error in a message
NEAR = 0.7  # similarity (difflib's ratio) from which on a valid name is a likely correction
LEAST_BEGINNING = 5  # characters of an unknown name with which the meant name is likely to begin


class ConfigError(ValueError):
    """An engine argument that cannot be honoured."""


class RequestError(ValueError):
    """A prompt or a sampling parameter that cannot be served. Nothing was added to the engine.

    field: the path of what is wrong with messages, such as "messages.2.content.0".
    """

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class ModelError(ValueError):
    """A checkpoint that is missing, damaged, or of an unsupported architecture."""


class EngineError(RuntimeError):
    """The engine is closed or in use, or a step failed.

    outputs: the final `RequestOutput`s of the requests that a failed step ended.
    """

    def __init__(self, message: str, outputs: Sequence[object] = ()) -> None:
        super().__init__(message)
        self.outputs = list(outputs)


def unknown_name_message(what: str, name: str, known: Collection[str], otherwise: str | None = None) -> str:
    """The message for an unknown name, with the nearest valid one: one that begins with it, or the most similar.

    otherwise: what to do where no name is near; by default the message lists the valid names.
    """
    short = name[:MOST_QUOTED]
    longer = [valid for valid in known if len(short) >= LEAST_BEGINNING and valid.startswith(short)]
    near = longer or difflib.get_close_matches(short, known, n=1, cutoff=NEAR)
    advice = f"the valid names are {', '.join(sorted(known))}" if otherwise is None else otherwise
    hint = f"did you mean {near[0]!r}?" if near else advice
    return f"unknown {what} {quoted(name)}: {hint}"


class _ShortRepr(reprlib.Repr):
    """Formats only the first few items of a container, and only the size of a huge number."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 4
        self.maxstring = 120
        self.maxother = 120
        self.maxlong = 60
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = self.maxfrozenset = self.maxarray = 10

    def repr_int(self, value: int, level: int) -> str:
        if value.bit_length() > 512:  # Python refuses to format numbers of more than 4,300 digits
            return f"<a whole number of about {value.bit_length() * 3 // 10:,} digits>"
        return super().repr_int(value, level)


def quoted(value: object) -> str:
    """`repr` of any value, in one line of at most MOST_QUOTED characters.

    Never raises, and the time it takes does not grow with the value.
    """
    try:
        text = _ShortRepr().repr(value)
    except Exception:  # from the object's own __repr__
        text = f"<{type(value).__name__}>"
    if len(text.splitlines()) > 1:  # such as that of an array
        text = " ".join(text.split())
    return text if len(text) <= MOST_QUOTED else f"{text[: MOST_QUOTED - 3]}..."


def one_line(text: str, most: int) -> str:
    """The text as one line of valid UTF-8, at most `most` characters long."""
    line = " ".join(text[: 4 * most].split()).encode("utf-8", "backslashreplace").decode()
    return line if len(line) <= most else f"{line[: most - 3]}..."


def told(error: BaseException) -> str:
    """The message of another library's error, in one line of at most MOST_TOLD characters, and its type."""
    try:
        text = one_line(str(error), MOST_TOLD)
    except Exception:  # from the error's own __str__
        text = ""
    return f"{text} ({type(error).__name__})" if text else type(error).__name__


@contextmanager
def as_request_error(sentence: str) -> Iterator[None]:
    """Context that turns any Exception into a RequestError: `sentence`, then the original message.

    The engine's own exceptions and KeyboardInterrupt pass through unchanged.
    """
    try:
        yield
    except (RequestError, EngineError, ConfigError, ModelError):
        raise
    except Exception as error:
        raise RequestError(f"{sentence}: {told(error)}") from error
