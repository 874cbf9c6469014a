"""The device's attention backend beside the machine's peaks, and merging two partial results beside plain torch.

    python -m benchmarks.kernels [--context 32768] [--merge-tokens 16384] [--output-json FILE]

Attention goes through the seam that the engine uses, on KV blocks in random order. Each figure is the median of
--repeats measurements; on a GPU each is of ten calls in a row, so that launching them is hidden as it is in an engine.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.engine import device_name
from benchmarks.options import Parser, add_device_option, add_json_option, exit_status, positive
from benchmarks.other_load import OtherLoad
from benchmarks.peaks import matmul_gflop_s, read_gb_s, synchronize
from benchmarks.report import machine_facts, print_other_load, print_row, write_json
from nanovllm.errors import ConfigError
from nanovllm.ops import select_backend
from nanovllm.ops.attention import AttentionBackend, AttentionState, KVSegment, SegmentTable

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128


@dataclass(frozen=True, slots=True)
class Figures:
    """Rates in 1e9 operations or bytes per second, times in microseconds."""

    backend: str
    matmul_gflop_s: float
    read_gb_s: float
    prefill_gflop_s: float
    decode_gb_s: float
    merge_us: float | None  # None where there is no fused merge
    torch_merge_us: float


def seconds(call: Callable[[], object], device: str, repeats: int) -> float:
    """Median seconds of one call, after two measurements that do not count."""
    calls = 10 if device == "cuda" else 1
    times = []
    for index in range(repeats + 2):
        synchronize(device)
        start = time.perf_counter()
        for _ in range(calls):
            call()
        synchronize(device)
        if index > 1:
            times.append((time.perf_counter() - start) / calls)
    return statistics.median(times)


def attention_call(
    backend: AttentionBackend, device: str, dtype: torch.dtype, rows: int, context: int, block_size: int
) -> Callable[[], None]:
    """Attention of the last `rows` positions of a context over all of it."""
    num_blocks = context // block_size
    pool = torch.randn(num_blocks, 2, KV_HEADS, block_size, HEAD_DIM, device=device).to(dtype)
    q = torch.randn(rows, HEADS, HEAD_DIM, device=device).to(dtype)
    blocks = random.Random(0).sample(range(num_blocks), num_blocks)
    table = SegmentTable([KVSegment(0, rows, context - rows, 0, context, blocks)])
    return lambda: backend.attend(q, pool, table, AttentionState.empty(q), HEAD_DIM**-0.5, None)


def torch_merge(o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    """The merge as one writes it down: a kernel for each operator."""
    top = torch.maximum(lse1, lse2)
    w1, w2 = torch.exp(lse1 - top), torch.exp(lse2 - top)
    total = w1 + w2
    out = (w1 / total).T.unsqueeze(-1) * o1 + (w2 / total).T.unsqueeze(-1) * o2
    return out.to(o1.dtype), top + torch.log(total)


def fused_merge() -> Callable[[Tensor, Tensor, Tensor, Tensor], object] | None:
    """The engine's own merge of two outputs, where this version has one."""
    try:
        from nanovllm.kvcache import chunked_attention
    except ImportError:
        return None
    merge: Callable[[Tensor, Tensor, Tensor, Tensor], object] = chunked_attention.merge_attention_outputs
    return merge


def measure(args: argparse.Namespace, device: str) -> Figures:
    dtype: torch.dtype = getattr(torch, args.dtype)
    backend = select_backend(torch.device(device), HEAD_DIM)
    sizes = (args.context, args.block_size)
    prefill = seconds(attention_call(backend, device, dtype, args.chunk, *sizes), device, args.repeats)
    decode = seconds(attention_call(backend, device, dtype, 1, *sizes), device, args.repeats)
    seen = args.chunk * (args.context - args.chunk) + args.chunk * (args.chunk + 1) / 2
    o1, o2 = (torch.randn(args.merge_tokens, HEADS, HEAD_DIM, device=device).to(dtype) for _ in range(2))
    lse1, lse2 = (torch.randn(HEADS, args.merge_tokens, device=device) for _ in range(2))
    fused = fused_merge()
    return Figures(
        backend=backend.name,
        matmul_gflop_s=matmul_gflop_s(dtype, device),
        read_gb_s=read_gb_s(device),
        prefill_gflop_s=4.0 * HEADS * HEAD_DIM * seen / prefill / 1e9,
        decode_gb_s=args.context * KV_HEADS * HEAD_DIM * 2 * dtype.itemsize / decode / 1e9,
        merge_us=None if fused is None else seconds(lambda: fused(o1, lse1, o2, lse2), device, args.repeats) * 1e6,
        torch_merge_us=seconds(lambda: torch_merge(o1, lse1, o2, lse2), device, args.repeats) * 1e6,
    )


def show(args: argparse.Namespace, figures: Figures) -> None:
    print(f"{figures.backend}, {HEADS} heads over {KV_HEADS} KV heads of {HEAD_DIM}, {args.dtype}")
    share = figures.prefill_gflop_s / figures.matmul_gflop_s
    what = f"{args.chunk:,} on {args.context:,}"
    print_row(f"prefill {what}", f"{figures.prefill_gflop_s:,.0f} GFLOP/s", f"{share:.0%} of torch.mm")
    share = figures.decode_gb_s / figures.read_gb_s
    print_row(f"decode on {args.context:,}", f"{figures.decode_gb_s:,.1f} GB/s", f"{share:.0%} of torch.sum")
    print_row(f"torch merge, {args.merge_tokens:,}", f"{figures.torch_merge_us:,.1f} us")
    if figures.merge_us is not None:
        gain = figures.torch_merge_us / figures.merge_us
        print_row(f"own merge, {args.merge_tokens:,}", f"{figures.merge_us:,.1f} us", f"{gain:.1f}x")


def run(args: argparse.Namespace) -> int:
    if args.context % args.block_size or args.chunk > args.context:
        raise ConfigError(
            f"--context {args.context}: must be a multiple of --block-size {args.block_size} and at least --chunk "
            f"{args.chunk}"
        )
    device = device_name(args.device)
    load = OtherLoad()
    with torch.inference_mode():
        figures = measure(args, device)
    other_load = load.share()
    show(args, figures)
    print_other_load(other_load)
    write_json(args.output_json, args, machine_facts(device), figures=figures, other_load=other_load)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    prog = "python -m benchmarks.kernels"
    parser = Parser(prog=prog, description="Attention and merge on a device, beside its peaks.")
    add = parser.add_argument
    add("--context", type=positive, default=32768, help="keys (default: %(default)s)")
    add("--chunk", type=positive, default=2048, help="query rows of a prefill (default: %(default)s)")
    add("--block-size", type=positive, default=256, help="tokens in a KV block (default: %(default)s)")
    add("--merge-tokens", type=positive, default=16384, help="query rows of a merge (default: %(default)s)")
    add("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    add("--repeats", type=positive, default=10, help="calls that count (default: %(default)s)")
    add_device_option(parser)
    add_json_option(parser)
    args = parser.parse_args(argv)
    return exit_status(prog, lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
