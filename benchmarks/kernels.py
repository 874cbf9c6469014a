"""The GPU kernels beside their ceilings and peers, one part after the other: merge, KV write, decode, prefill.

    python -m benchmarks.kernels [--sweep] [--output-json FILE]

Each part stands for itself: one that fails says so, the others go on, and the exit status is 1. Times are medians
over calls, taken by CUDA events. GB are 1e9 bytes, TFLOP 1e12 operations, a multiply-add being two.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.options import Parser, add_json_option, positive
from benchmarks.report import machine_facts, print_row, write_json
from nanovllm.ops.attention import AttentionBackend, AttentionState, KVSegment, SegmentTable
from nanovllm.ops.backends import cuda_backends
from nanovllm.ops.merge import merge_states_, merge_states_torch_
from nanovllm.ops.store_kv import store_kv
from nanovllm.ops.triton_support import triton_runs


@dataclass(frozen=True, slots=True)
class Sizes:
    """The attention of Llama-3.1-8B at the lengths that matter; smaller for a test of the benchmark itself."""

    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16
    merge_tokens: tuple[int, ...] = (1024, 4096, 16384)
    store_tokens: int = 16384
    decode: tuple[tuple[int, int, int], ...] = ((1, 32768, 4096), (8, 32768, 4096), (64, 4096, 256))  # see `decode`
    prefill: tuple[tuple[int, int, int], ...] = ((16384, 16384, 4096), (4096, 32768, 4096))  # see `prefill`
    matrix: int = 8192
    copy_bytes: int = 1 << 30
    repeats: int = 20

    @property
    def token_bytes(self) -> int:
        """K and V of one token in one layer."""
        return 2 * self.kv_heads * self.head_dim * self.dtype.itemsize


Figure = dict[str, Any]


def seconds(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median seconds of a call, after three that are not counted."""
    for _ in range(3):
        work()
    if device.type != "cuda":
        return statistics.median(_timed(work) for _ in range(repeats))
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for begin, end in marks:
        begin.record()
        work()
        end.record()
    torch.cuda.synchronize(device)
    return statistics.median(begin.elapsed_time(end) for begin, end in marks) / 1e3


def _timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


# ---- ceilings


def copy_gb_s(sizes: Sizes, device: torch.device) -> float:
    """torch's copy within the device: bytes read and written."""
    src = torch.empty(sizes.copy_bytes, dtype=torch.uint8, device=device)
    dst = torch.empty_like(src)
    return 2 * sizes.copy_bytes / seconds(lambda: dst.copy_(src), device, sizes.repeats) / 1e9


def matmul_tflop_s(sizes: Sizes, device: torch.device) -> float:
    a, b = (torch.randn(sizes.matrix, sizes.matrix, device=device).to(sizes.dtype) for _ in range(2))
    return 2 * sizes.matrix**3 / seconds(lambda: torch.matmul(a, b), device, sizes.repeats) / 1e12


def ceilings(sizes: Sizes, device: torch.device) -> list[Figure]:
    copy, matmul = copy_gb_s(sizes, device), matmul_tflop_s(sizes, device)
    print_row("copy on the device", f"{copy:,.0f} GB/s", "read and written")
    print_row(f"torch.matmul {sizes.matrix}", f"{matmul:,.1f} TFLOP/s", str(sizes.dtype))
    return [{"name": "copy", "gb_s": copy}, {"name": "matmul", "tflop_s": matmul}]


# ---- parts


def merge(sizes: Sizes, device: torch.device) -> list[Figure]:
    """One partial result into the running state: our kernel against the same formula operator by operator."""
    figures = []
    for tokens in sizes.merge_tokens:
        q = torch.empty(tokens, sizes.heads, sizes.head_dim, device=device)
        state = AttentionState(torch.randn_like(q), torch.randn(sizes.heads, tokens, device=device))
        part, part_lse = torch.randn_like(q).to(sizes.dtype), torch.randn_like(state.lse)

        def ours(s: AttentionState = state, p: Tensor = part, lse: Tensor = part_lse) -> None:
            merge_states_(s.out, s.lse, p, lse)

        def theirs(s: AttentionState = state, p: Tensor = part, lse: Tensor = part_lse) -> None:
            merge_states_torch_(s.out, s.lse, p, lse)

        own, torch_ = (seconds(work, device, sizes.repeats) for work in (ours, theirs))
        moved = 2 * state.out.nbytes + part.nbytes + 3 * state.lse.nbytes
        row = {"tokens": tokens, "us": own * 1e6, "torch_us": torch_ * 1e6, "gb_s": moved / own / 1e9}
        print_row(
            f"merge, {tokens} tokens", f"{own * 1e6:,.1f} us", f"torch {torch_ * 1e6:,.1f} us, {torch_ / own:.1f} times"
        )
        figures.append(row | {"times": torch_ / own})
    return figures


def store(sizes: Sizes, device: torch.device) -> list[Figure]:
    """New K/V of a chunk into blocks by slot mapping: bytes read and written."""
    tokens, block_size = sizes.store_tokens, 256
    pool = torch.empty(
        -(-tokens // block_size), 2, sizes.kv_heads, block_size, sizes.head_dim, dtype=sizes.dtype, device=device
    )
    k, v = torch.randn(2, tokens, sizes.kv_heads, sizes.head_dim, device=device).to(sizes.dtype)
    slots = torch.arange(tokens, device=device)
    took = seconds(lambda: store_kv(pool, k, v, slots), device, sizes.repeats)
    rate = 2 * tokens * sizes.token_bytes / took / 1e9
    print_row(f"store_kv, {tokens} tokens", f"{rate:,.0f} GB/s", f"{took * 1e6:,.1f} us")
    return [{"tokens": tokens, "us": took * 1e6, "gb_s": rate}]


def problem(
    sizes: Sizes, device: torch.device, sequences: int, rows: int, context: int, block_size: int
) -> tuple[Tensor, Tensor, SegmentTable, AttentionState]:
    """The last `rows` positions of each of some sequences of `context` tokens, in a pool of their own blocks."""
    per_sequence = -(-context // block_size)
    shape = (sequences * per_sequence, 2, sizes.kv_heads, block_size, sizes.head_dim)
    pool = torch.randn(shape, device=device, dtype=sizes.dtype)
    q = torch.randn(sequences * rows, sizes.heads, sizes.head_dim, device=device).to(sizes.dtype)
    segments = [
        KVSegment(i * rows, rows, context - rows, 0, context, range(i * per_sequence, (i + 1) * per_sequence))
        for i in range(sequences)
    ]
    return q, pool, SegmentTable(segments), AttentionState.empty(q)


def decode(sizes: Sizes, device: torch.device, backends: Sequence[AttentionBackend]) -> list[Figure]:
    """(sequences, context, block size): one query row each, KV bytes read."""
    figures = []
    for sequences, context, block_size in sizes.decode:
        q, pool, table, state = problem(sizes, device, sequences, 1, context, block_size)
        for backend in backends[:1]:  # the others leave decode to the same kernel
            took = _attend_seconds(backend, q, pool, table, state, sizes, device)
            rate = sequences * context * sizes.token_bytes / took / 1e9
            print_row(f"decode, {sequences} x {context}", f"{rate:,.0f} GB/s", f"{took * 1e6:,.1f} us, {backend.name}")
            figures.append(
                {"backend": backend.name, "sequences": sequences, "context": context, "block_size": block_size}
                | {"us": took * 1e6, "gb_s": rate}
            )
    return figures


def prefill(sizes: Sizes, device: torch.device, backends: Sequence[AttentionBackend]) -> list[Figure]:
    """(rows, context, block size): a chunk of query rows at the end of its context."""
    figures = []
    for rows, context, block_size in sizes.prefill:
        q, pool, table, state = problem(sizes, device, 1, rows, context, block_size)
        work = operations(sizes, rows, context)
        for backend in backends:
            took = _attend_seconds(backend, q, pool, table, state, sizes, device)
            print_row(f"prefill, {rows} of {context}", f"{work / took / 1e12:,.1f} TFLOP/s", backend.name)
            figures.append({"backend": backend.name, "rows": rows, "context": context, "tflop_s": work / took / 1e12})
    rows = sizes.prefill[0][0]
    took = seconds(_torch_causal(sizes, device, rows), device, sizes.repeats)
    rate = operations(sizes, rows, rows) / took / 1e12
    print_row(f"prefill, {rows} of {rows}", f"{rate:,.1f} TFLOP/s", "torch's scaled_dot_product_attention, contiguous")
    return [*figures, {"backend": "scaled_dot_product_attention", "rows": rows, "context": rows, "tflop_s": rate}]


def sweep(sizes: Sizes, device: torch.device) -> list[Figure]:
    """The Triton prefill kernel with other tiles and pipelines than the ones that are shipped."""
    from nanovllm.ops.triton_prefill import PrefillConfig, prefill_

    rows, context, block_size = sizes.prefill[0]
    q, pool, table, state = problem(sizes, device, 1, rows, context, block_size)
    figures = []
    for tile, keys in ((128, 64), (128, 128), (128, 32), (64, 64), (64, 128), (256, 64)):
        for warps, stages in ((4, 2), (4, 3), (8, 2), (8, 3), (8, 4)):
            config = PrefillConfig(tile, keys, warps, stages)

            def call(config: PrefillConfig = config) -> None:
                prefill_(q, pool, table.on(q.device), state, sizes.head_dim**-0.5, None, config)

            try:
                took = seconds(call, device, max(3, sizes.repeats // 4))
            except Exception as error:  # most often: more shared memory than there is
                print_row(str(asdict(config)), "-", str(error).splitlines()[0][:80])
                continue
            rate = operations(sizes, rows, context) / took / 1e12
            print_row(f"{tile} x {keys}, {warps} warps, {stages} stages", f"{rate:,.1f} TFLOP/s")
            figures.append(asdict(config) | {"tflop_s": rate})
    return figures


def operations(sizes: Sizes, rows: int, context: int) -> float:
    """Of causal attention: two products over the keys that each of the last `rows` positions sees."""
    visible = rows * (context - rows) + rows * (rows + 1) / 2
    return 4.0 * sizes.heads * sizes.head_dim * visible


def _attend_seconds(
    backend: AttentionBackend,
    q: Tensor,
    pool: Tensor,
    table: SegmentTable,
    state: AttentionState,
    sizes: Sizes,
    device: torch.device,
) -> float:
    scale = sizes.head_dim**-0.5
    return seconds(lambda: backend.attend(q, pool, table, state, scale, None), device, sizes.repeats)


def _torch_causal(sizes: Sizes, device: torch.device, rows: int) -> Callable[[], Tensor]:
    q = torch.randn(1, sizes.heads, rows, sizes.head_dim, device=device).to(sizes.dtype)
    k, v = torch.randn(2, 1, sizes.kv_heads, rows, sizes.head_dim, device=device).to(sizes.dtype)
    attention = torch.nn.functional.scaled_dot_product_attention
    return lambda: attention(q, k, v, is_causal=True, enable_gqa=True)


# ---- all of it


def measure(sizes: Sizes, device: torch.device, backends: Sequence[AttentionBackend], with_sweep: bool) -> Figure:
    """Every part's figures by its name; for one that failed, the last line of its error."""
    parts: dict[str, Callable[[], list[Figure]]] = {
        "ceilings": lambda: ceilings(sizes, device),
        "merge": lambda: merge(sizes, device),
        "store_kv": lambda: store(sizes, device),
        "decode": lambda: decode(sizes, device, backends),
        "prefill": lambda: prefill(sizes, device, backends),
    }
    if with_sweep:
        parts["sweep"] = lambda: sweep(sizes, device)
    found: Figure = {}
    for name, part in parts.items():
        try:
            found[name] = part()
        except Exception as error:  # a part may fail in any way, and the others are still worth having
            traceback.print_exc()
            found[name] = {"failed": f"{type(error).__name__}: {error}"}
            print_row(name, "failed", str(error).partition("\n")[0])
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and write JSON where asked. Returns the exit status."""
    parser = Parser(prog="kernels", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true", help="try other tiles of the prefill kernel as well")
    parser.add_argument("--repeats", type=positive, default=20, help="calls that count (default: %(default)s)")
    add_json_option(parser)
    args = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("kernels: error: torch sees no CUDA device, and these kernels run on nothing else", file=sys.stderr)
        return 1
    device = torch.device("cuda", torch.cuda.current_device())
    sizes = replace(Sizes(), repeats=args.repeats)
    facts = machine_facts(torch.cuda.get_device_name(device)) | {"triton": triton_runs(), "cuda": torch.version.cuda}
    print(f"{facts['device']}, torch {facts['torch']}, CUDA {facts['cuda']}; {facts['commit'] or 'no git commit'}\n")
    found = measure(sizes, device, cuda_backends(device, sizes.head_dim), args.sweep)
    write_json(args.output_json, args, facts, kernels=found)
    return int(any("failed" in part for part in found.values()))


if __name__ == "__main__":
    sys.exit(main())
