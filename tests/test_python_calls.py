"""What the extensions promise to Python: the GIL is free during a call, and C++ exceptions become Python's."""

from __future__ import annotations

import threading

import pytest
import torch

from nanovllm.comm import _sgdma
from nanovllm.ops import _cpu_kernels

ROWS = 1 << 13


def test_arguments_that_do_not_fit_are_refused() -> None:
    x = torch.zeros(4)
    _cpu_kernels.fill(threads=1, value=2, size=3, x=x.data_ptr())
    assert x.tolist() == [2, 2, 2, 0]
    for changed in ({"sizes": 1}, {"size": "1"}, {"size": 1.5}, {"x": -1}, {"threads": 2**31}, {"size": 2**63}):
        with pytest.raises(TypeError, match="incompatible function arguments"):
            _cpu_kernels.fill(**{"x": x.data_ptr(), "size": 0, "value": 1.0, "threads": 1, **changed})
    with pytest.raises(TypeError, match="No constructor defined"):
        _cpu_kernels.HostTask()  # only HostAttention makes them


def test_exceptions_of_cpp_become_those_of_python() -> None:
    indices = torch.tensor([4])
    weight = torch.zeros(4, 16)
    with pytest.raises(IndexError, match="Row 4 is not one of 4"):
        _cpu_kernels.gather(
            dtype="float32", weight=weight.data_ptr(), y=weight.data_ptr(), indices=indices.data_ptr(), count=1,
            in_features=16, out_features=4, interleaved=False, threads=1,
        )  # fmt: skip
    with pytest.raises(ValueError, match="no CPU kernels for the dtype int8"):
        _cpu_kernels.interleave(dtype="int8", weight=0, out_features=0, in_features=32, back=False, threads=1)
    with pytest.raises(ValueError, match="kind must be h2h, h2d, d2h or d2d, got x2y"):
        _sgdma.memcpy_2d_async(0, 0, 0, 0, 0, 0, "x2y", 0)


def test_threads_call_the_kernels_side_by_side() -> None:
    """Each thread has the result of its own tensors, and this one runs while they compute."""
    inputs = [torch.randn(ROWS, 64, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
    outputs = [torch.empty_like(x) for x in inputs]

    def work(x: torch.Tensor, y: torch.Tensor) -> None:
        for _ in range(3):
            _cpu_kernels.sigmoid(x=(x.data_ptr(), 64), y=(y.data_ptr(), 64), rows=ROWS, size=64, threads=2)

    threads = [threading.Thread(target=work, args=pair) for pair in zip(inputs, outputs, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for x, y in zip(inputs, outputs, strict=True):
        assert torch.allclose(y, torch.sigmoid(x), atol=1e-6)
