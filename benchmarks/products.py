"""Products with packed weights and LoRA adapters on a GPU, compared with torch's product of plain weights.

    python -m benchmarks.products [--rows 1 8 ...] [--schemes int4 ...] [--dry] [--output-json FILE]

Each product is first compared with the dequantized weights in fp64 on some of its rows; exit status 1 if one is wrong.
Times are medians of the GPU alone, of calls that take copies of the weight in turn, so that none is in the cache.
`times` is torch's time for plain weights, divided by the product's own: for an adapter, that of the layer whose rows it
is added to. `gb_per_second`: the weight's bytes, read once, over the time. --dry runs tiny sizes, without a GPU in
Triton's interpreter.
"""

from __future__ import annotations

import argparse
import copy
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernel_checks import random_gguf
from benchmarks.kernels import Figure, kernel_facts, open_device, seconds
from benchmarks.options import Parser, add_json_option, positive
from benchmarks.report import print_row, write_json
from nanovllm.ops.packed_weights import PackedWeight, dequantize, packed_linear, triton_linear
from nanovllm.ops.triton_support import multiplies_fp8

# Of the sum of the products' sizes. Rounding inputs to fp8 alone is wrong by up to 2^-4.
BOUND = 8e-3
FP8_BOUND = 0.08
CHECKED_ROWS = 4
Copied = TypeVar("Copied")


@dataclass(frozen=True, slots=True)
class Sizes:
    """The gate and up projection of Llama-3.1-8B; smaller for a dry run."""

    out_features: int = 14336
    in_features: int = 4096
    rows: tuple[int, ...] = (1, 8, 64, 256, 4096)
    dtype: torch.dtype = torch.bfloat16
    rank: int = 16
    adapters: int = 8
    repeats: int = 20
    cached_bytes: int = 256 << 20  # more than a GPU's cache holds

    @classmethod
    def tiny(cls) -> Sizes:
        dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float16  # the interpreter's bf16 is wrong
        return cls(160, 256, (1, 130), dtype, rank=4, adapters=3, repeats=1, cached_bytes=0)


def random_weight(scheme: str, group_size: int, sizes: Sizes, device: torch.device) -> PackedWeight:
    """Values that the bits can have, of about 1 / sqrt(in_features)."""
    shape = (sizes.out_features, sizes.in_features)
    size = sizes.in_features**-0.5
    groups = (sizes.out_features, sizes.in_features // group_size)
    if scheme == "fp8":
        data = (torch.rand(shape, device=device) * 2 - 1).to(torch.float8_e4m3fn)
        scales = torch.rand(groups, device=device) * size
        return PackedWeight("fp8", data, scales, None, group_size, sizes.in_features)
    if scheme == "mxfp4":
        data = torch.randint(0, 256, (shape[0], shape[1] // 2), dtype=torch.uint8, device=device)
        codes = torch.randint(118, 121, groups, dtype=torch.uint8, device=device)
        return PackedWeight("mxfp4", data, codes, None, group_size, sizes.in_features)
    columns, kind = (shape[1] // 2, torch.uint8) if scheme == "int4" else (shape[1], torch.int8)
    data = torch.randint(0, 256, (shape[0], columns), dtype=torch.uint8, device=device).view(kind)
    zeros = torch.randint(0, 16, groups, dtype=torch.uint8, device=device) if scheme == "int4" else None
    scales = torch.rand(groups, device=device) * (size / (8 if scheme == "int4" else 128))
    return PackedWeight(scheme, data, scales.to(sizes.dtype), zeros, group_size, sizes.in_features)


ADAPTERS = "adapters"
GGUF_SCHEMES = ("q4_k", "q6_k", "q8_0")
SCHEMES = ("int4", "int8", "fp8", "mxfp4", *GGUF_SCHEMES, ADAPTERS)


@dataclass(frozen=True, slots=True)
class Product:
    """A weight and how it is multiplied; bound: how wrong a result may be."""

    weight: PackedWeight
    fp8_inputs: bool = False

    @property
    def bound(self) -> float:
        return FP8_BOUND if self.fp8_inputs else BOUND

    def __call__(self, x: Tensor, weight: PackedWeight) -> Tensor:
        if weight.planes:
            return packed_linear(x, weight)
        return triton_linear(x, weight, fp8_inputs=self.fp8_inputs)


def products(sizes: Sizes, schemes: Sequence[str], device: torch.device) -> dict[str, Product]:
    """By name."""
    groups = {"int4, groups of 128": 128, "int4, groups of 32": 32, "int8, groups of 128": 128}
    groups |= {"fp8 per channel": sizes.in_features, "fp8 in blocks": 128, "mxfp4, groups of 32": 32}
    by_name: dict[str, Product] = {}
    for name, group_size in groups.items():
        scheme = name.split(",")[0].split()[0]
        if scheme in schemes:
            by_name[name] = Product(random_weight(scheme, group_size, sizes, device))
            if scheme == "fp8" and (device.type == "cpu" or multiplies_fp8(device)):
                by_name[f"{name}, inputs in fp8"] = Product(by_name[name].weight, fp8_inputs=True)
    for scheme in [scheme for scheme in GGUF_SCHEMES if scheme in schemes]:
        by_name[scheme] = Product(random_gguf(scheme, sizes.out_features, sizes.in_features, device).in_planes())
    return by_name


def in_turn(call: Callable[[Copied], object], thing: Copied, nbytes: int, sizes: Sizes) -> Callable[[], object]:
    """A call that takes copies of the thing in turn, as many as together are larger than the cache."""
    turns = cycle([thing, *(copy.deepcopy(thing) for _ in range(-(-sizes.cached_bytes // nbytes)))])
    return lambda: call(next(turns))


def adapters(sizes: Sizes, device: torch.device, rows: int) -> tuple[Callable[[Tensor, Tensor], None], Tensor]:
    """What adds the products of x to y, in row i of adapter i mod `adapters`; and B A of the checked rows in fp64."""
    from nanovllm.ops.triton_lora import FIELDS, add_low_rank_

    rank = sizes.rank
    count = sizes.adapters
    (out, inputs) = (sizes.out_features, sizes.in_features)
    memory = torch.randn(count, rank * (inputs + out), device=device).to(sizes.dtype) * sizes.in_features**-0.25
    table = torch.zeros(count, 1, FIELDS, dtype=torch.int64)
    for slot in range(count):
        begin = slot * memory.stride(0)
        table[slot, 0] = torch.tensor([begin, rank, begin + rank * inputs, 0, out])
    of_row = torch.arange(rows) % count
    counts = torch.bincount(of_row, minlength=count)
    sorted_rows, ends, table = (x.to(device) for x in (of_row.argsort(stable=True), counts.cumsum(0), table))
    a, b = memory.double().split([rank * inputs, rank * out], dim=1)
    checked = of_row[:CHECKED_ROWS].to(device)
    dense = b.view(count, out, rank)[checked] @ a.view(count, rank, inputs)[checked]
    return lambda y, x: add_low_rank_(y, x, memory, table, sorted_rows, ends, rank), dense


def check(y: Tensor, x: Tensor, dense: Tensor, bound: float) -> float:
    """The largest error, as a share of the sum of the products' sizes. Raises AssertionError above the bound.

    dense: fp64 [out, in], or one for each row.
    """
    rows = y[:CHECKED_ROWS].double()
    wide = x[:CHECKED_ROWS].double()
    expected, size = ((part(wide)[:, None] @ part(dense).mT)[:, 0] for part in (lambda t: t, torch.abs))
    error = float(((rows - expected).abs() / size).max())
    assert error <= bound, f"wrong by {error:g} of the products' sizes, {bound:g} is allowed"
    return error


def measure(sizes: Sizes, schemes: Sequence[str], device: torch.device) -> list[Figure]:
    """A row for each product and number of rows."""
    plain = torch.randn(sizes.out_features, sizes.in_features, device=device).to(sizes.dtype)
    figures: list[Figure] = []
    of_schemes = products(sizes, schemes, device)
    for rows in sizes.rows:
        x = torch.randn(rows, sizes.in_features, device=device).to(sizes.dtype)
        torch_product = in_turn(partial(F.linear, x), plain, plain.nbytes, sizes)
        torch_seconds = seconds(torch_product, device, sizes.repeats)
        figures.append({"product": "torch", "rows": rows, "us": torch_seconds * 1e6, "times": 1.0})
        print_row(
            f"torch, {rows} rows", f"{torch_seconds * 1e6:,.1f} us", f"{plain.nbytes / torch_seconds / 1e9:,.0f} GB/s"
        )

        def add(name: str, took: float, error: float, rows: int = rows, torch_seconds: float = torch_seconds) -> Figure:
            times = torch_seconds / took
            figures.append({"product": name, "rows": rows, "us": took * 1e6, "times": times, "error": error})
            return figures[-1]

        for name, product in of_schemes.items():
            weight = product.weight
            error = check(product(x, weight), x, dequantize(weight).double(), product.bound)
            call = in_turn(partial(product, x), weight, weight.nbytes, sizes)
            figure = add(name, seconds(call, device, sizes.repeats), error)
            figure["gb_per_second"] = weight.nbytes / figure["us"] / 1e3
            told = f"{figure['times']:.2f} times torch's, {figure['gb_per_second']:,.0f} GB/s, error {error:.1e}"
            print_row(f"{name}, {rows} rows", f"{figure['us']:,.1f} us", told)
        if ADAPTERS in schemes:
            add_, dense = adapters(sizes, device, rows)
            y = torch.zeros(rows, sizes.out_features, device=device, dtype=sizes.dtype)
            add_(y, x)
            error = check(y, x, dense, BOUND)
            name = f"{sizes.adapters} adapters of rank {sizes.rank}"
            figure = add(name, seconds(partial(add_, y, x), device, sizes.repeats), error)
            told = f"{figure['times']:.2f} times torch's, error {error:.1e}"
            print_row(f"{name}, {rows} rows", f"{figure['us']:,.1f} us", told)
    return figures


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and write JSON if requested. Returns the exit status."""
    parser = Parser(prog="products", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    of_rows = f"numbers of rows (default: {' '.join(map(str, Sizes().rows))})"
    parser.add_argument("--rows", type=positive, nargs="+", help=of_rows)
    parser.add_argument(
        "--schemes", choices=SCHEMES, nargs="+", default=SCHEMES, help="what is measured (default: all)"
    )
    parser.add_argument("--dry", action="store_true", help="tiny sizes, to see that everything runs")
    add_json_option(parser)
    args = parser.parse_args(arguments)
    device = open_device("products", args.dry)
    if device is None:
        return 1
    facts = kernel_facts(device)
    try:
        sizes = Sizes.tiny() if args.dry else Sizes()
        figures = measure(replace(sizes, rows=args.rows or sizes.rows), args.schemes, device)
    except AssertionError:
        traceback.print_exc()
        return 1
    write_json(args.output_json, args, facts, products=figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
