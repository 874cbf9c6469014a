"""What the machine can do at best, measured now, for figures to stand beside. GB: 1e9 bytes, GFLOP: 1e9 operations."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

MATRIX = 2048
BUFFER_BYTES = 256 << 20  # far larger than the caches of a processor
ROUNDS = 10


def matmul_gflop_s(dtype: torch.dtype) -> float:
    """torch.mm on two square matrices, a multiply-add being two operations."""
    a, b = (torch.randn(MATRIX, MATRIX).to(dtype) for _ in range(2))
    return 2.0 * MATRIX**3 / least_seconds(lambda: torch.mm(a, b)) / 1e9


def read_gb_s() -> float:
    """torch.sum over memory that is in no cache."""
    memory = torch.ones(BUFFER_BYTES // 4)
    return memory.nbytes / least_seconds(memory.sum) / 1e9


def copy_gb_s() -> float:
    """memcpy_2d_async from host to host in one large row: each byte counts once, though it is read and written."""
    from nanovllm.comm import memcpy_2d_async

    src, dst = (torch.ones(BUFFER_BYTES, dtype=torch.uint8) for _ in range(2))

    def copy() -> None:
        memcpy_2d_async(dst, src, BUFFER_BYTES, BUFFER_BYTES, BUFFER_BYTES, 1, "h2h", 0)

    return BUFFER_BYTES / least_seconds(copy) / 1e9


def least_seconds(work: Callable[[], object]) -> float:
    """Seconds of the fastest call after a first one: a peak is what the machine can do while nothing else runs."""
    work()
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)
