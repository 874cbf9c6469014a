"""Calls of the extensions' functions: arguments that do not fit, and references."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from nanovllm.comm import _sgdma
from nanovllm.ops import _cpu_kernels


def fill(**changed: Any) -> None:
    arguments: dict[str, Any] = dict(x=0, size=0, value=1.0, threads=1)
    _cpu_kernels.fill(**{**arguments, **changed})


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"sizes": 1}, TypeError, "There is no argument sizes."),
        ({"size": "1"}, TypeError, "str"),
        ({"size": 1.5}, TypeError, "float"),
        ({"value": "1"}, TypeError, "real number"),
        ({"x": -1}, OverflowError, "must lie between 0 and"),
        ({"threads": 2**31}, OverflowError, "must lie between -2147483648 and 2147483647, got 2147483648."),
        ({"size": 2**63}, OverflowError, "too large|too big"),
        ({"threads": 0}, ValueError, "threads must be positive, got 0."),
    ],
)
def test_arguments_that_do_not_fit_are_refused(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    fill()
    with pytest.raises(error, match=message):
        fill(**changed)


def test_each_argument_is_given_once() -> None:
    with pytest.raises(TypeError, match="argument threads is missing"):
        _cpu_kernels.fill(x=0, size=0, value=1.0)
    with pytest.raises(TypeError, match="argument stream is missing"):
        _sgdma.destroy_stream()
    with pytest.raises(TypeError, match="argument start is given twice"):
        _sgdma.touch_pages(0, start=0, size=0, threads=1)
    with pytest.raises(TypeError, match="at most 1 arguments"):
        _sgdma.destroy_stream(1, 2)


def test_arguments_go_by_name_in_any_order() -> None:
    x = torch.zeros(4)
    _cpu_kernels.fill(threads=1, value=2, size=3, x=x.data_ptr())
    assert x.tolist() == [2, 2, 2, 0]


def test_tuples_and_objects_of_another_kind_are_refused() -> None:
    copy: dict[str, Any] = dict(x=(0, 0), y=(0, 0), rows=0, row_bytes=1, threads=1)
    _cpu_kernels.copy(**copy)
    for address in ((0,), (0, 0, 0), [0, 0], 0):
        with pytest.raises(TypeError, match="An argument must be a tuple of 2, got"):
            _cpu_kernels.copy(**{**copy, "x": address})
    with pytest.raises(TypeError, match="must be a sequence"):
        _cpu_kernels.Linear(parts=1, bias=0)
    with pytest.raises(TypeError, match=r"must be a .*PackedWeight, got int"):
        _cpu_kernels.Linear(parts=[1], bias=0)
    with pytest.raises(TypeError, match="cannot create"):
        _cpu_kernels.HostTask()  # only HostAttention makes them


def test_calls_keep_no_references() -> None:
    """Neither those that succeed nor those that fail on the way, whose first arguments have been read by then."""
    address = (1 << 40, 1 << 41)
    weight = _cpu_kernels.DenseWeight(address=1 << 40, in_features=32, out_features=16, interleaved=False)
    kept = [address, *address, weight, _cpu_kernels.DenseWeight, _cpu_kernels.Linear]
    before = [sys.getrefcount(one) for one in kept]
    for _ in range(10):
        _cpu_kernels.copy(x=address, y=address, rows=0, row_bytes=1, threads=1)
        _cpu_kernels.Linear(parts=[weight, weight], bias=0)
        with pytest.raises(TypeError):
            _cpu_kernels.copy(x=address, y=address, rows=0, row_bytes="1", threads=1)
        with pytest.raises(TypeError):
            _cpu_kernels.Linear(parts=[weight, None], bias=0)
        with pytest.raises(ValueError, match="needs weights"):
            _cpu_kernels.Linear(parts=[], bias=0)
    assert [sys.getrefcount(one) for one in kept] == before
