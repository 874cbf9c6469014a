"""The machine's peak rates: torch.mm on square matrices in the fastest of three dtypes, torch.sum over memory.

Without bf16 instructions, torch multiplies bf16 at a fifth of the rate of fp32, which is then the ceiling. The memory
is larger than the caches.
"""

from __future__ import annotations

import json
import time

import torch

SIZE = 4096
ROUNDS = 8
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def matmul_flop_s(size: int = SIZE, rounds: int = ROUNDS) -> float:
    """Operations per second of the fastest product in the fastest dtype, a multiply-add counts as two."""
    small = size // 4  # enough to compare the dtypes
    seconds_of = {dtype: _least_seconds(small, dtype, 3) for dtype in DTYPES}
    return 2.0 * size**3 / _least_seconds(size, min(DTYPES, key=lambda dtype: seconds_of[dtype]), rounds)


def _least_seconds(size: int, dtype: torch.dtype, rounds: int) -> float:
    a, b = (torch.randn(size, size).to(dtype) for _ in range(2))
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        torch.mm(a, b)
        seconds.append(time.perf_counter() - start)
    return min(seconds)


if __name__ == "__main__":
    from benchmarks.peaks import read_gb_s

    print(json.dumps({"matmul_flop_s": matmul_flop_s(), "read_bytes_s": read_gb_s() * 1e9}))
