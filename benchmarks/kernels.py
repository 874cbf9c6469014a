"""The GPU kernels compared with their ceilings and with other kernels: merge, KV write, decode, its reduction with
other numbers of warps, prefill, segments.

    python -m benchmarks.kernels [--dry] [--parts NAME ...] [--output-json FILE]

The parts are independent: a failure is reported, the others continue, and the exit status is 1. The file is written
after each part. Times are medians over calls that were queued before the first of them ran, measured with CUDA events.
GB are 1e9 bytes, TFLOP 1e12 operations; a multiply-add is two. --dry runs tiny sizes, without a GPU in Triton's
interpreter.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks import interpreted_ptx
from benchmarks.gpu_timing import queued_seconds
from benchmarks.options import Parser, add_json_option, positive
from benchmarks.report import machine_facts, print_row, write_json
from nanovllm.ops.attention import (
    AttentionBackend,
    AttentionMetadata,
    AttentionState,
    DeviceMetadata,
    SequenceMetadata,
)
from nanovllm.ops.backends import cuda_backends
from nanovllm.ops.kernel_config import DecodeConfig
from nanovllm.ops.kv_quantization import LARGEST, dtype_name, quantize_rows_torch
from nanovllm.ops.merge import merge_attention_outputs, merge_attention_outputs_torch
from nanovllm.ops.prefill_libraries import LIBRARIES, difference_from_fp64, installed
from nanovllm.ops.row_kernels import store_kv
from nanovllm.ops.segment_attention import Library, SegmentAttention
from nanovllm.ops.timing import call_seconds
from nanovllm.ops.triton_support import triton_runs

PARTS = ("ceilings", "merge", "store_kv", "decode", "reduction", "prefill")
WARPS = (1, 2, 4)  # of the reduction of decode, on which no bit may depend


@dataclass(frozen=True, slots=True)
class Sizes:
    """The attention of Llama-3.1-8B at the lengths that matter; smaller for a test of the benchmark itself."""

    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16
    merge_tokens: tuple[int, ...] = (1024, 4096, 16384)
    store_tokens: int = 16384
    decode: tuple[tuple[int, int, int], ...] = (  # see `decode`
        (1, 2048, 256), (1, 2048, 1024), (1, 32768, 4096), (1, 130048, 256), (1, 130048, 1024), (8, 32768, 4096),
        (64, 4096, 256),
    )  # fmt: skip
    # (out, in) of the projections q, k and v, of o, gate and up, down, and of the logits.
    products: tuple[tuple[int, int], ...] = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096))
    prefill: tuple[tuple[int, int, int], ...] = ((16384, 16384, 4096), (4096, 32768, 4096))  # see `prefill`
    segments: tuple[int, ...] = (4096, 8192, 16384)  # tokens, see `segments`
    segment_contexts: tuple[int, ...] = (16384, 65536)  # of 16,384 rows each
    matrix: int = 8192
    copy_bytes: int = 1 << 30
    repeats: int = 20

    @classmethod
    def tiny(cls) -> Sizes:
        """For a test of the benchmark itself, also in Triton's interpreter, whose bf16 products are wrong."""
        return cls(
            heads=2,
            kv_heads=1,
            head_dim=16,
            dtype=torch.bfloat16 if torch.cuda.is_available() else torch.float16,
            merge_tokens=(3,),
            store_tokens=20,
            decode=((2, 40, 16),),
            products=((48, 64),),
            prefill=((70, 70, 64),),
            segments=(64,),
            segment_contexts=(128,),
            matrix=8,
            copy_bytes=64,
            repeats=1,
        )

    @property
    def token_bytes(self) -> int:
        """K and V of one token in one layer."""
        return 2 * self.kv_heads * self.head_dim * self.dtype.itemsize


Figure = dict[str, Any]


def seconds(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median seconds of a call, after calls that do not count; on a GPU, of the GPU alone."""
    if device.type == "cuda":
        return queued_seconds(work, repeats)
    return statistics.median(call_seconds(work, repeats))


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
    copy = copy_gb_s(sizes, device)
    matmul = matmul_tflop_s(sizes, device)
    print_row("copy on the device", f"{copy:,.0f} GB/s", "read and written")
    print_row(f"torch.matmul {sizes.matrix}", f"{matmul:,.1f} TFLOP/s", str(sizes.dtype))
    return [{"name": "copy", "gb_s": copy}, {"name": "matmul", "tflop_s": matmul}]


# ---- parts


def merge(sizes: Sizes, device: torch.device) -> list[Figure]:
    """Merging a partial result into the running state: our kernel against the same formula in torch operators."""
    figures = []
    for tokens in sizes.merge_tokens:
        q = torch.empty(tokens, sizes.heads, sizes.head_dim, device=device)
        state = AttentionState(torch.randn_like(q), torch.randn(sizes.heads, tokens, device=device))
        part = torch.randn_like(q).to(sizes.dtype)
        part_lse = torch.randn_like(state.lse)

        def ours(s: AttentionState = state, p: Tensor = part, lse: Tensor = part_lse) -> None:
            merge_attention_outputs(s.out, s.lse, p, lse)

        def theirs(s: AttentionState = state, p: Tensor = part, lse: Tensor = part_lse) -> None:
            merge_attention_outputs_torch(s.out, s.lse, p, lse)

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
    tokens = sizes.store_tokens
    block_size = 256
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
) -> tuple[Tensor, Tensor, AttentionMetadata, AttentionState]:
    """The last `rows` positions of each of some sequences of `context` tokens, in a pool of their own blocks."""
    per_sequence = -(-context // block_size)
    shape = (sequences * per_sequence, 2, sizes.kv_heads, block_size, sizes.head_dim)
    pool = torch.randn(shape, device=device, dtype=sizes.dtype)
    q = torch.randn(sequences * rows, sizes.heads, sizes.head_dim, device=device).to(sizes.dtype)
    metadata = [
        SequenceMetadata(i * rows, rows, context - rows, 0, context, range(i * per_sequence, (i + 1) * per_sequence))
        for i in range(sequences)
    ]
    return q, pool, AttentionMetadata(metadata), AttentionState.empty(q)


def decode(sizes: Sizes, device: torch.device, backends: Sequence[AttentionBackend]) -> list[Figure]:
    """(sequences, context, block size): one query row each, KV bytes read."""
    figures = []
    for sequences, context, block_size in sizes.decode:
        q, pool, table, state = problem(sizes, device, sequences, 1, context, block_size)
        for backend in backends[:1]:  # the others use the same kernel for decode
            took = _attend_seconds(backend, q, pool, table, state, sizes, device)
            rate = sequences * context * sizes.token_bytes / took / 1e9
            print_row(f"decode, {sequences} x {context}", f"{rate:,.0f} GB/s", f"{took * 1e6:,.1f} us, {backend.name}")
            figures.append(
                {"backend": backend.name, "sequences": sequences, "context": context, "block_size": block_size}
                | {"us": took * 1e6, "gb_s": rate}
            )
    return figures


def reduction(sizes: Sizes, device: torch.device) -> list[Figure]:
    """Decode without a state, with other numbers of warps for the reduction: time, and whether all bits are the same.

    Raises RuntimeError if they are not, after all were timed.
    """
    from nanovllm.ops.kernel_config import decode_config_on
    from nanovllm.ops.triton_decode import decode_whole

    figures: list[Figure] = []
    default = decode_config_on(device, sizes.head_dim, sizes.dtype)
    scale = sizes.head_dim**-0.5
    for sequences, context, block_size in sizes.decode:
        q, pool, metadata, _ = problem(sizes, device, sequences, 1, context, block_size)
        table = metadata.on(device)
        expected = torch.empty_like(q)
        decode_whole(q, pool, table, expected, scale, None, None, default)
        for warps in WARPS:
            config = replace(default, reduce_warps=warps)
            out = torch.empty_like(q)

            def attend(config: DecodeConfig = config, q: Tensor = q, pool: Tensor = pool,
                       table: DeviceMetadata = table, out: Tensor = out) -> None:  # fmt: skip
                decode_whole(q, pool, table, out, scale, None, None, config)

            took = seconds(attend, device, sizes.repeats)
            equal = torch.equal(out, expected)
            rate = sequences * context * sizes.token_bytes / took / 1e9
            what = f"decode, {sequences} x {context}, blocks of {block_size}"
            print_row(what, f"{rate:,.0f} GB/s", f"{took * 1e6:,.1f} us, reduce_warps {warps}, equal bits: {equal}")
            figures.append(
                {"reduce_warps": warps, "sequences": sequences, "context": context, "block_size": block_size}
                | {"us": took * 1e6, "gb_s": rate, "outputs_equal": equal}
            )
    unequal = [figure for figure in figures if not figure["outputs_equal"]]
    if unequal:
        raise RuntimeError(f"outputs depend on the number of warps of the reduction: {unequal}")
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


def segments(sizes: Sizes, device: torch.device) -> list[Figure]:
    """A chunk through each library in segments of several lengths, and through the Triton kernel; KV in 16 and 8 bits.

    error: the largest of output and LSE against fp64, of the library alone at this length; repeats: whether a second
    call has the same bits.
    """
    from nanovllm.ops.triton_attention import TritonAttention

    own = TritonAttention()
    shape = (sizes.heads, sizes.kv_heads, sizes.head_dim)
    figures: list[Figure] = []
    block_size = min(256, *sizes.segments)
    most = min(2 * sizes.segments[-1], 16384)
    ways: list[tuple[AttentionBackend, Figure]] = [(own, {"backend": own.name})]
    for segment, library in itertools.product(sizes.segments, libraries(device)):
        facts: Figure = {"backend": library.name, "segment": segment}
        try:
            facts["error"] = difference_from_fp64(library, device, shape, sizes.dtype, segment)
        except Exception as error:  # a library built for another torch or GPU may fail in any way
            print_row(f"segments of {segment}", "failed", f"{library.name}: {error}")
            figures.append(facts | {"failed": f"{type(error).__name__}: {error}"})
        else:
            ways.append((SegmentAttention(library, own, [shape], most, segment), facts))
    for context, stored in itertools.product(sizes.segment_contexts, (None, *LARGEST)):
        rows = min(context, most)
        q, pool, table, state = problem(sizes, device, 1, rows, context, block_size)
        pool = pool if stored is None else quantize_rows_torch(pool, stored)
        for backend, facts in ways:
            took = _attend_seconds(backend, q, pool, table, state, sizes, device)
            rate = operations(sizes, rows, context) / took / 1e12
            again = [AttentionState.empty(q) for _ in range(2)]
            for metadata in again:
                backend.attend(q, pool, table, metadata, sizes.head_dim**-0.5, None)
            repeats = torch.equal(again[0].out, again[1].out) and torch.equal(again[0].lse, again[1].lse)
            kv = "16 bits" if stored is None else dtype_name(stored)
            print_row(f"{rows} of {context}, {kv}", f"{rate:,.1f} TFLOP/s", backend.name)
            figures.append(facts | {"rows": rows, "context": context, "kv": kv, "tflop_s": rate, "repeats": repeats})
    return figures


def libraries(device: torch.device) -> list[Library]:
    """Those that are installed; in a dry run without a GPU, the definition in torch."""
    if device.type != "cuda":
        return [Library("torch", _dense)]
    return [library for name, of_name in LIBRARIES.items() if installed(name) for library in of_name]


def _dense(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """See `segment_attention.DenseAttention`."""
    k, v = (x.float().repeat_interleave(q.shape[1] // k.shape[0], 0) for x in (k, v))
    scores = torch.einsum("thd,hsd->hts", q.float(), k) * scale
    if causal:
        scores.masked_fill_(torch.ones_like(scores[0], dtype=torch.bool).triu(1 + k.shape[1] - len(q)), float("-inf"))
    return torch.einsum("hts,hsd->thd", scores.softmax(-1), v).to(q.dtype), scores.logsumexp(-1)


def operations(sizes: Sizes, rows: int, context: int) -> float:
    """Operations of causal attention: two products over the keys that each of the last `rows` positions sees."""
    visible = rows * (context - rows) + rows * (rows + 1) / 2
    return 4.0 * sizes.heads * sizes.head_dim * visible


def _attend_seconds(
    backend: AttentionBackend,
    q: Tensor,
    pool: Tensor,
    table: AttentionMetadata,
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


def measure(
    sizes: Sizes,
    device: torch.device,
    backends: Sequence[AttentionBackend],
    after_each: Callable[[Figure], None] = lambda figures: None,
    chosen: Sequence[str] = PARTS,
) -> Figure:
    """The chosen parts' figures by their names; for one that failed, the last line of its error."""
    parts: dict[str, Callable[[], list[Figure]]] = {
        "ceilings": lambda: ceilings(sizes, device),
        "merge": lambda: merge(sizes, device),
        "store_kv": lambda: store(sizes, device),
        "decode": lambda: decode(sizes, device, backends),
        "reduction": lambda: reduction(sizes, device),
        "prefill": lambda: prefill(sizes, device, backends),
        "segments": lambda: segments(sizes, device),
    }
    figures: Figure = {}
    for name in chosen:
        try:
            figures[name] = parts[name]()
        except Exception as error:  # a failure of any type does not stop the other parts
            traceback.print_exc()
            figures[name] = {"failed": f"{type(error).__name__}: {error}"}
            print_row(name, "failed", str(error).partition("\n")[0])
        after_each(figures)
    return figures


def backends_here(sizes: Sizes, device: torch.device) -> list[AttentionBackend]:
    """The attention backends of this device; in a dry run without a GPU, the interpreted Triton kernels."""
    if device.type == "cuda":
        return cuda_backends(device, sizes.head_dim)
    from nanovllm.ops.triton_attention import TritonAttention

    return [TritonAttention()]


def open_device(prog: str, dry: bool) -> torch.device | None:
    """The GPU, or the CPU for a dry run without one; None, after a message, if neither is possible."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    if dry:
        interpreted_ptx.install()
        return torch.device("cpu")
    print(f"{prog}: error: torch sees no CUDA device, and these kernels run on nothing else", file=sys.stderr)
    return None


def kernel_facts(device: torch.device) -> Figure:
    """Facts of the machine and versions of the kernels' packages."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    facts = machine_facts(name) | {"triton": triton_runs(), "cuda": torch.version.cuda}
    print(f"{facts['device']}, torch {facts['torch']}, CUDA {facts['cuda']}; {facts['commit'] or 'no git commit'}\n")
    return facts


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and write JSON if requested. Returns the exit status."""
    parser = Parser(prog="kernels", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true", help="tiny sizes, to see that everything runs")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="measure these alone (default: all)")
    parser.add_argument("--repeats", type=positive, default=20, help="calls that count (default: %(default)s)")
    add_json_option(parser)
    args = parser.parse_args(arguments)
    device = open_device("kernels", args.dry)
    if device is None:
        return 1
    sizes = Sizes.tiny() if args.dry else replace(Sizes(), repeats=args.repeats)
    facts = kernel_facts(device)

    def keep(figures: Figure) -> None:
        write_json(args.output_json, args, facts, kernels=figures)

    results = measure(sizes, device, backends_here(sizes, device), keep, args.parts)
    return int(any("failed" in part for part in results.values()))


if __name__ == "__main__":
    sys.exit(main())
