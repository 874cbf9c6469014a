"""The peak rates of the machine, for comparison. GB: 1e9 bytes, GFLOP: 1e9 operations."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable

import torch

# A dry run (see gpu_check.py) only tests that everything runs.
DRY = os.environ.get("NANOVLLM_DRY_RUN") == "1"
MATRIX = 64 if DRY else 2048
CUDA_MATRIX = 64 if DRY else 8192  # smaller matrices do not fill a large GPU
BUFFER_BYTES = 1 << 20 if DRY else 256 << 20  # far larger than the caches of a processor
CUDA_BUFFER_BYTES = 1 << 20 if DRY else 2 << 30
ROUNDS = 1 if DRY else 10


def matmul_gflop_s(dtype: torch.dtype, device: str = "cpu") -> float:
    """torch.mm on two square matrices of random numbers, a multiply-add counts as two operations.

    On a CPU in the fastest of three dtypes, `dtype` or not: on some, bf16 instructions run at half the rate of fp32.
    """
    size = MATRIX if device == "cpu" else CUDA_MATRIX
    dtypes = {dtype, torch.bfloat16, torch.float16, torch.float32} if device == "cpu" else {dtype}

    def seconds(dtype: torch.dtype, size: int, rounds: int) -> float:
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        return least_seconds(lambda: torch.mm(a, b), device, rounds)

    fastest = min(dtypes, key=lambda dtype: seconds(dtype, size // 4, 2)) if len(dtypes) > 1 else dtype
    return 2.0 * size**3 / seconds(fastest, size, ROUNDS) / 1e9


def read_gb_s(device: str = "cpu") -> float:
    """torch.sum over memory larger than the caches."""
    size = BUFFER_BYTES if device == "cpu" else CUDA_BUFFER_BYTES
    memory = torch.ones(size // 4, device=device)
    return memory.nbytes / least_seconds(memory.sum, device) / 1e9


def copy_gb_s(device: str = "cpu", kind: str = "h2d") -> float:
    """One large copy over the link, "h2d" or "d2h", from and to pinned memory; on the CPU from host to host.

    Each byte counts once, although it is read and written.
    """
    from nanovllm.comm import memcpy_2d_async

    host = torch.ones(BUFFER_BYTES, dtype=torch.uint8, pin_memory=device == "cuda")
    other = torch.ones(BUFFER_BYTES, dtype=torch.uint8, device=device)
    stream: int | torch.cuda.Stream = 0 if device == "cpu" else torch.cuda.Stream()
    dst, src = (host, other) if kind == "d2h" else (other, host)

    def copy() -> None:
        memcpy_2d_async(
            dst, src, BUFFER_BYTES, BUFFER_BYTES, BUFFER_BYTES, 1, "h2h" if device == "cpu" else kind, stream
        )

    return BUFFER_BYTES / least_seconds(copy, device) / 1e9


def file_gb_s(directory: str) -> float:
    """One large read of a file of weights, with as many threads as an engine has, directly into memory."""
    from nanovllm.features.streamed_weights.weight_file import WeightFile

    file = WeightFile(directory, BUFFER_BYTES)
    memory = memoryview(mmap.mmap(-1, BUFFER_BYTES))
    memory[:] = os.urandom(BUFFER_BYTES)
    file.append(memory)
    seconds = least_seconds(lambda: file.read(0, memory).wait())
    file.close()
    return BUFFER_BYTES / seconds / 1e9


def least_seconds(work: Callable[[], object], device: str = "cpu", rounds: int = ROUNDS) -> float:
    """Seconds of the fastest call after a first one, since a peak is the rate without other load."""
    work()
    times = []
    for _ in range(rounds):
        synchronize(device)
        start = time.perf_counter()
        work()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return min(times)


def synchronize(device: str) -> None:
    """Wait for all work on the device."""
    if device == "cuda":
        torch.cuda.synchronize()
