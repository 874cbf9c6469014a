"""The errors that a user of the engine can meet. Each message says what was wrong, the value, and what to do."""

from __future__ import annotations

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
