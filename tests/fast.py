"""Parameters of tests of which the fast run takes a few and the full run all."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import product
from typing import Any

import pytest


def fast_only(fast: Collection[Any], values: Iterable[Any]) -> list[Any]:
    """All values, those that are not in `fast` marked slow. A tuple is the values of several parameters."""
    values = list(values)
    assert all(value in values for value in fast), "a fast value is none of the values"
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)), marks=[] if value in fast else pytest.mark.slow
        )
        for value in values
    ]


def fast_products(fast: Collection[tuple[Any, ...]], *values: Iterable[Any]) -> list[Any]:
    """`fast_only` of all combinations."""
    return fast_only(fast, product(*values))
