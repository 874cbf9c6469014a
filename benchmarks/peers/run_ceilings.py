"""What the machine can do at best, now: torch.mm on bf16 squares of 4096, torch.sum over memory that is in no cache."""

from __future__ import annotations

import json
import time

import torch

SIZE = 4096
ROUNDS = 8


def matmul_flop_s(size: int = SIZE, rounds: int = ROUNDS) -> float:
    """Operations per second of the fastest product, a multiply-add being two."""
    a, b = (torch.randn(size, size).to(torch.bfloat16) for _ in range(2))
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        torch.mm(a, b)
        seconds.append(time.perf_counter() - start)
    return 2.0 * size**3 / min(seconds)


if __name__ == "__main__":
    from benchmarks.peaks import read_gb_s

    print(json.dumps({"matmul_flop_s": matmul_flop_s(), "read_bytes_s": read_gb_s() * 1e9}))
