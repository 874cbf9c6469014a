"""CPU attention compared with its ceilings: decode with torch.sum, prefill with torch.mm.

    python -m benchmarks.cpu_attention [--output-json FILE]

Ceilings and figures are measured in turns, so that other load affects both alike. Each is the median over the rounds.
Decode reads a KV cache far larger than the caches of the processor.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import mean, median

import torch

from benchmarks.options import Parser, add_json_option, positive
from benchmarks.report import machine_facts, write_json
from nanovllm.errors import ConfigError
from nanovllm.ops.attention import AttentionMetadata, SequenceMetadata
from nanovllm.ops.cpu_attention import attend_batch
from nanovllm.ops.cpu_kernels import instruction_sets
from nanovllm.ops.timing import call_seconds

HEADS = 16
KV_HEADS = 8
HEAD_DIM = 128
CONTEXT = 32768
PREFILL_ROWS = 2048
BLOCK_SIZE = 4096
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
    works = ((memory.sum, 10), (decode, 10), (lambda: torch.mm(a, b), 2), (prefill, 1))  # with calls that count
    times = [[mean(call_seconds(work, calls)) for work, calls in works] for _ in range(rounds)]
    read, decoded, multiplied, prefilled = (median(column) for column in zip(*times, strict=True))
    matmul_rate = 2.0 * MATRIX**3 / multiplied / 1e9
    prefill_rate = prefill_operations() / prefilled / 1e9
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


def run(args: argparse.Namespace) -> int:
    """Measure, print, and write JSON if requested."""
    if CONTEXT % args.block_size:
        raise ConfigError(f"--block-size {args.block_size}: must be a divisor of {CONTEXT}")
    figures = measure(args.rounds, args.block_size, args.isa)
    print(f"{figures.isa}, {figures.threads} threads, medians of {figures.rounds} rounds")
    print(f"read memory (torch.sum)  {figures.read_gb_s:8.1f} GB/s")
    print(f"decode at {CONTEXT}          {figures.decode_gb_s:8.1f} GB/s   {figures.decode_ratio:5.0%}")
    print(f"bf16 torch.mm {MATRIX}       {figures.matmul_gflop_s:8.1f} GFLOP/s")
    print(f"prefill {PREFILL_ROWS} on {CONTEXT}    {figures.prefill_gflop_s:8.1f} GFLOP/s {figures.prefill_ratio:5.0%}")
    write_json(args.output_json, args, machine_facts("cpu"), **asdict(figures))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="cpu_attention", description="CPU attention compared with its ceilings.")
    parser.add_argument("--rounds", type=positive, default=5, help="(default: %(default)s)")
    size = f"tokens in a KV block, a divisor of {CONTEXT} (default: %(default)s)"
    parser.add_argument("--block-size", type=positive, default=BLOCK_SIZE, help=size)
    parser.add_argument("--isa", choices=instruction_sets(), default=instruction_sets()[0])
    add_json_option(parser)
    return parser.run(argv, run)


if __name__ == "__main__":
    sys.exit(main())
