"""The errors that a user of the engine can meet. Each message says what was wrong, the value, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Sequence


class ConfigError(ValueError):
    """An engine argument that cannot be honoured."""


class RequestError(ValueError):
    """A prompt or a sampling parameter that cannot be served. Nothing was added to the engine."""


class ModelError(ValueError):
    """A checkpoint that is missing, damaged or of an architecture that is not supported."""


class EngineError(RuntimeError):
    """The engine cannot go on with what it was asked: it is closed, or a step failed.

    `outputs`: the requests that a failed step has ended (`RequestOutput`), with what they had generated.
    """

    def __init__(self, message: str, outputs: Sequence[object] = ()) -> None:
        super().__init__(message)
        self.outputs = list(outputs)


def unknown_name_message(what: str, name: str, known: list[str]) -> str:
    """One sentence for a name that does not exist, with the nearest one that does."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"the valid names are {', '.join(sorted(known))}"
    return f"unknown {what} {name!r}: {hint}"
