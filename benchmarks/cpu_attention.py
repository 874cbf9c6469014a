"""CPU attention compared with its ceilings: decode with torch.sum, prefill with torch.mm.

    python -m benchmarks.cpu_attention [--output-json FILE]

Ceilings and figures are measured in turns, so that other load affects both alike. Each is the median over the rounds.
Decode reads a KV cache far larger than the caches of the processor.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.report import machine_facts
from nanovllm.ops.attention import AttentionMetadata, SequenceMetadata
from nanovllm.ops.cpu_attention import attend_batch
from nanovllm.ops.cpu_kernels import instruction_sets

HEADS, KV_HEADS, HEAD_DIM = 16, 8, 128
CONTEXT, PREFILL_ROWS, BLOCK_SIZE = 32768, 2048, 4096
MATRIX = 4096
KV_BYTES = CONTEXT * KV_HEADS * HEAD_DIM * 2 * 2


@dataclass(frozen=True)
class Figures:
    """Medians over the rounds. GB are 1e9 bytes, GFLOP 1e9 operations (a multiply-add is two)."""

    isa: str
    threads: int
    rounds: int
    read_gb_s: float
    decode_gb_s: float
    decode_ratio: float
    matmul_gflop_s: float
    prefill_gflop_s: float
    prefill_ratio: float


def seconds(work: Callable[[], object], repeats: int) -> float:
    """Mean seconds of one call, after a warm-up call."""
    work()
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    return (time.perf_counter() - start) / repeats


def attention_call(rows: int, block_size: int, isa: str) -> Callable[[], None]:
    """Attention of the last `rows` positions of a context of CONTEXT tokens, bf16, over all KV heads."""
    shape = (CONTEXT // block_size, 2, KV_HEADS, block_size, HEAD_DIM)
    pool = torch.randn(shape, dtype=torch.float32).to(torch.bfloat16)
    q = torch.randn(rows, HEADS, HEAD_DIM).to(torch.bfloat16)
    out = torch.empty(rows, HEADS, HEAD_DIM)
    lse = torch.empty(HEADS, rows)
    addresses = [block.data_ptr() for block in pool]
    metadata = AttentionMetadata([SequenceMetadata(0, rows, CONTEXT - rows, 0, CONTEXT, addresses)])

    def call() -> None:
        assert pool is not None  # the addresses point into the pool, which must live as long as the call
        attend_batch(
            q,
            metadata.blocks,
            metadata.rows,
            kv_heads=KV_HEADS,
            block_size=block_size,
            scale=HEAD_DIM**-0.5,
            out=out,
            lse=lse,
            isa=isa,
        )

    return call


def prefill_operations() -> float:
    """Operations of a causal prefill of the last PREFILL_ROWS positions: two products over the visible keys."""
    visible = PREFILL_ROWS * (CONTEXT - PREFILL_ROWS) + PREFILL_ROWS * (PREFILL_ROWS + 1) / 2
    return 4.0 * HEADS * HEAD_DIM * visible


def measure(rounds: int, block_size: int, isa: str) -> Figures:
    """All four figures in turn, `rounds` times."""
    decode = attention_call(1, block_size, isa)
    prefill = attention_call(PREFILL_ROWS, block_size, isa)
    memory = torch.ones(KV_BYTES // 4)
    a, b = (torch.randn(MATRIX, MATRIX).to(torch.bfloat16) for _ in range(2))
    times: list[tuple[float, float, float, float]] = []
    for _ in range(rounds):
        times.append(
            (
                seconds(memory.sum, 10),
                seconds(decode, 10),
                seconds(lambda: torch.mm(a, b), 2),
                seconds(prefill, 1),
            )
        )
    read, decoded, multiplied, prefilled = (statistics.median(column) for column in zip(*times, strict=True))
    matmul_rate, prefill_rate = 2.0 * MATRIX**3 / multiplied / 1e9, prefill_operations() / prefilled / 1e9
    return Figures(
        isa=isa,
        threads=torch.get_num_threads(),
        rounds=rounds,
        read_gb_s=KV_BYTES / read / 1e9,
        decode_gb_s=KV_BYTES / decoded / 1e9,
        decode_ratio=read / decoded,
        matmul_gflop_s=matmul_rate,
        prefill_gflop_s=prefill_rate,
        prefill_ratio=prefill_rate / matmul_rate,
    )


def main() -> None:
    """Measure, print, and write JSON if requested."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-json", type=Path, help="file to write the figures to")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--block-size", type=int, default=BLOCK_SIZE, help=f"tokens per KV block, a divisor of {CONTEXT}"
    )
    parser.add_argument("--isa", choices=instruction_sets(), default=instruction_sets()[0])
    args = parser.parse_args()
    if args.rounds < 1 or args.block_size < 1 or CONTEXT % args.block_size:
        parser.error(f"--rounds must be positive and --block-size a divisor of {CONTEXT}")
    figures = measure(args.rounds, args.block_size, args.isa)
    print(f"{figures.isa}, {figures.threads} threads, medians of {figures.rounds} rounds")
    print(f"read memory (torch.sum)  {figures.read_gb_s:8.1f} GB/s")
    print(f"decode at {CONTEXT}          {figures.decode_gb_s:8.1f} GB/s   {figures.decode_ratio:5.0%}")
    print(f"bf16 torch.mm {MATRIX}       {figures.matmul_gflop_s:8.1f} GFLOP/s")
    print(f"prefill {PREFILL_ROWS} on {CONTEXT}    {figures.prefill_gflop_s:8.1f} GFLOP/s {figures.prefill_ratio:5.0%}")
    if args.output_json:
        report = {"machine": machine_facts("cpu"), **asdict(figures)}
        args.output_json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
