"""Products with packed weights on the CPU: this package's kernel, its product with dense weights, and reading memory.

    python -m benchmarks.cpu_packed [--schemes q4_0 q8_0] [--rows 1 4 512] [--dtype bfloat16] [--output-json FILE]

For each scheme and each number of rows, the following take turns: the kernel of csrc/cpu_packed, that of
csrc/cpu_linear with dense weights of the same shape, and torch.sum over memory. With few rows, the weights are many
copies, far more than the caches hold, and GB/s compare with reading. With many rows, GFLOP/s compare with the dense
product. A figure is the median over rounds of the fastest of several passes. NANOVLLM_CPU_ISA
restricts the kernels to older instruction sets.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import peaks
from benchmarks.cpu_linear import MANY_ROWS
from benchmarks.options import Parser, add_json_option, positive
from benchmarks.other_load import OtherLoad
from benchmarks.report import machine_facts, print_other_load, write_json
from benchmarks.timing import Spread
from nanovllm.errors import ConfigError
from nanovllm.ops import cpu_kernels
from nanovllm.ops.packed_panels import HALF_BYTES
from nanovllm.ops.packed_weights import (
    GGUF_BLOCKS,
    MXFP4_GROUP,
    SCHEMES,
    PackedWeight,
    cpu_packed_linear,
    gguf_weight,
)


@dataclass(frozen=True, slots=True)
class Result:
    """One scheme on some rows. Seconds are of one product; GB are 1e9 bytes, GFLOP 1e9 operations."""

    scheme: str
    rows: int
    in_features: int
    out_features: int
    weight_bytes: int
    packed_seconds: Spread
    dense_seconds: Spread
    read_gb_s: Spread

    @property
    def packed_gb_s(self) -> float:
        """Rate at which the kernel reads the packed weights."""
        return self.weight_bytes / self.packed_seconds.median / 1e9

    @property
    def packed_gflop_s(self) -> float:
        """A multiply-add is two operations."""
        return 2.0 * self.rows * self.in_features * self.out_features / self.packed_seconds.median / 1e9

    @property
    def of_dense(self) -> float:
        """Speed relative to the product with dense weights."""
        return self.dense_seconds.median / self.packed_seconds.median


def packed_weight(scheme: str, out_features: int, in_features: int) -> PackedWeight:
    """Random bytes below 64: all numbers are finite. Groups of 128 inputs where the scheme leaves a choice.

    The time of a product does not depend on the values.
    """
    if scheme in GGUF_BLOCKS:
        block = GGUF_BLOCKS[scheme]
        shape = (out_features, in_features // block.inputs * block.bytes)
        return gguf_weight(scheme, torch.randint(64, shape, dtype=torch.uint8)).in_panels()
    shape = (out_features, in_features // 2 if scheme in HALF_BYTES else in_features)
    dtype = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}.get(scheme, torch.uint8)
    data = torch.randint(64, shape, dtype=torch.uint8).view(dtype)
    if scheme == "mxfp4":
        scales = torch.full((out_features, in_features // MXFP4_GROUP), 120, dtype=torch.uint8)
        return PackedWeight(scheme, data, scales, None, MXFP4_GROUP, in_features).in_panels()
    scales = torch.rand(out_features, in_features // 128, dtype=torch.float32 if scheme == "fp8" else torch.float16)
    return PackedWeight(scheme, data, scales, None, 128, in_features).in_panels()


def copies_of(weight: PackedWeight, count: int) -> list[PackedWeight]:
    return [weight, *(replace(weight, data=weight.data.clone()) for _ in range(count - 1))]


def measure(args: argparse.Namespace) -> Iterator[Result]:
    """All schemes on all numbers of rows."""
    dtype: torch.dtype = getattr(torch, args.dtype)
    out_features = args.out_features
    in_features = args.in_features
    dense = torch.randn(out_features, in_features).to(dtype)
    for scheme in args.schemes:
        weight = packed_weight(scheme, out_features, in_features)
        for rows in args.rows:
            few = rows < MANY_ROWS
            packed = copies_of(weight, max(1, peaks.BUFFER_BYTES // weight.nbytes) if few else 1)
            denses = dense.expand(1, -1, -1)
            if few:
                denses = dense.repeat(max(1, peaks.BUFFER_BYTES // dense.nbytes), 1, 1)
            x = torch.randn(rows, in_features).to(dtype)
            works = (
                partial(seconds, cpu_packed_linear, x, packed),
                partial(seconds, cpu_kernels.cpu_linear, x, list(denses)),
                peaks.read_gb_s,
            )
            figures = [[work() for work in works] for _ in range(args.rounds)]
            spreads = [Spread.of(column) for column in zip(*figures, strict=True)]
            yield Result(scheme, rows, in_features, out_features, weight.nbytes, *spreads)  # type: ignore[arg-type]


def seconds(product: Callable[[Tensor, Any], Tensor], x: Tensor, weights: Sequence[object]) -> float:
    """Of one product of x [rows, in] with one of the weights, in a pass over all of them."""

    def all_copies() -> None:
        for weight in weights:
            product(x, weight)

    return peaks.least_seconds(all_copies) / len(weights)


def print_result(result: Result) -> None:
    bits = 8 * result.weight_bytes / (result.in_features * result.out_features)
    read = result.read_gb_s.median
    rates = f"{result.packed_gb_s:>8.1f} {result.packed_gb_s / read:>7.0%} {result.packed_gflop_s:>9.1f}"
    print(f"{result.scheme:<6} {bits:>6.2f} {result.rows:>5} {read:>6.1f} {rates} {result.of_dense:>9.2f}", flush=True)


def run(args: argparse.Namespace) -> int:
    """Measure, print, and write JSON if requested."""
    if args.in_features % 256:
        raise ConfigError(f"--in-features {args.in_features}: must be a multiple of 256")
    facts = machine_facts("cpu")
    load = OtherLoad()
    isa = cpu_kernels.choose(None, "packed")
    machine = f"{facts['cpu']}, {facts['threads']} threads, {isa}"
    print(f"{args.in_features} x {args.out_features} in {args.dtype}; {machine}; medians of {args.rounds} rounds")
    print(f"{'bits':>13} {'rows':>5} {'read':>6} {'GB/s':>8} {'of read':>7} {'GFLOP/s':>9} {'of dense':>9}")
    results = []
    for result in measure(args):
        print_result(result)
        results.append(result)
    other_load = load.share()
    print_other_load(other_load)
    write_json(args.output_json, args, facts, isa=isa, results=results, other_load=other_load)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="cpu_packed", description="Speed of products with packed weights on the CPU.")
    add = parser.add_argument
    add("--schemes", nargs="+", choices=SCHEMES, default=list(SCHEMES), help="of the weights (default: all)")
    add("--rows", type=positive, nargs="+", default=[1, 4, 512], help="rows of x (default: %(default)s)")
    add("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16", help="of x (default: %(default)s)")
    add("--in-features", type=positive, default=2048, help="a multiple of 256 (default: %(default)s)")
    add("--out-features", type=positive, default=4096, help="(default: %(default)s)")
    add("--rounds", type=positive, default=3, help="of all three measurements (default: %(default)s)")
    add_json_option(parser)
    return parser.run(argv, run)


if __name__ == "__main__":
    sys.exit(main())
