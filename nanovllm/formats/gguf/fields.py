"""Checked access to a GGUF file's metadata."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from nanovllm.data.json_fields import Field
from nanovllm.errors import ModelError, quoted


class Metadata:
    """The metadata of the file at `path`. Every value is checked when it is read; ModelError names key and value."""

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self.path = path
        self._values = values

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def get(self, key: str, field: Field) -> Any:
        """The value, or None if the file has none."""
        value = self._values.get(key)
        if value is not None and not field.holds(value):
            raise ModelError(f"{self.path}: {key}={quoted(value)}: must be {field.rule}.")
        return value

    def need(self, key: str, field: Field) -> Any:
        """The value. Raises ModelError if the file has none."""
        if key not in self._values:
            raise ModelError(f"{self.path} has no {key}, which its network needs.")
        return self.get(key, field)

    def texts(self, key: str) -> list[str]:
        """The texts of a list; none if the file does not have it."""
        value = self._values.get(key, [])
        if isinstance(value, np.ndarray) and not len(value):  # an empty list of another type
            return []
        if not isinstance(value, list):
            raise ModelError(f"{self.path}: {key}={quoted(value)}: must be a list of texts.")
        return value

    def numbers(self, key: str, count: int, default: float | None) -> Any:
        """A list of `count` numbers: the file's, or `default` for each. Without a default the file must have it."""
        value = self._values.get(key)
        if value is None and default is not None:
            return [default] * count
        if not isinstance(value, np.ndarray) or len(value) != count or not np.isfinite(value).all():
            found = f"{len(value)} values" if isinstance(value, np.ndarray | list) else quoted(value)
            raise ModelError(f"{self.path}: {key} must be a list of {count} finite numbers, and it has {found}.")
        return value

    def refuse_true(self, *keys: str) -> None:
        """Raise ModelError for a key that is true."""
        for key in keys:
            if self._values.get(key):
                raise ModelError(f"{self.path}: {key}={quoted(self._values[key])} is not supported; use tokenizer=.")
