"""Parameters of tests of which the fast run takes a few; and of which no run takes all."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import combinations, product
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


def fast_pairs(fast: Collection[tuple[Any, ...]], *values: Iterable[Any]) -> list[Any]:
    """`fast_only` of `pairs`."""
    return fast_only(fast, pairs(*values, first=fast))


def pairs(*values: Iterable[Any], first: Iterable[tuple[Any, ...]] = ()) -> list[tuple[Any, ...]]:
    """Combinations in which any two values of two parameters meet at least once; those of `first`, then few others.

    Most mistakes need no more than two values to meet, and three parameters of four values have 16 such combinations
    instead of 64. Each next one is a combination with most new pairs.
    """
    every = list(product(*values))
    chosen = list(first)
    left = {pair for case in every for pair in _pairs_of(case)} - {pair for case in chosen for pair in _pairs_of(case)}
    while left:
        chosen.append(max(every, key=lambda case: len(left & _pairs_of(case))))
        left -= _pairs_of(chosen[-1])
    return chosen


def _pairs_of(combination: tuple[Any, ...]) -> set[tuple[tuple[int, Any], ...]]:
    return set(combinations(enumerate(combination), 2))
