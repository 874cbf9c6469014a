"""The parameters that `fast.py` chooses."""

from __future__ import annotations

from itertools import combinations, product

from fast import pairs
from hypothesis import given
from hypothesis import strategies as st


@given(st.lists(st.integers(1, 5), min_size=2, max_size=4), st.data())
def test_any_two_values_of_two_parameters_meet(sizes: list[int], data: st.DataObject) -> None:
    values = [range(size) for size in sizes]
    first = data.draw(st.lists(st.tuples(*map(st.sampled_from, values)), max_size=3, unique=True))
    chosen = pairs(*values, first=first)
    assert chosen[: len(first)] == first and len(chosen) == len(set(chosen))
    for i, j in combinations(range(len(sizes)), 2):
        assert {(each[i], each[j]) for each in chosen} == set(product(values[i], values[j]))
