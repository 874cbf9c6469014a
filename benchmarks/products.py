"""Products with packed weights and LoRA adapters on a GPU, compared with torch's product of plain weights.

    python -m benchmarks.products [--dry] [--output-json FILE]

Each product is first compared with the dequantized weights in fp64 on some of its rows; exit status 1 if one is wrong.
Times are medians of the GPU alone. `times` is torch's time for plain weights, divided by the product's own: for an
adapter, that of the layer whose rows it is added to. --dry runs tiny sizes, without a GPU in Triton's interpreter.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernels import Figure, kernel_facts, open_device, seconds
from benchmarks.options import Parser, add_json_option
from benchmarks.report import print_row, write_json
from nanovllm.ops.packed_weights import PackedWeight, dequantize
from nanovllm.ops.triton_support import multiplies_fp8

# Of the sum of the products' sizes. Rounding inputs to fp8 alone is wrong by up to 2^-4.
BOUND, FP8_BOUND = 8e-3, 0.08
CHECKED_ROWS = 4


@dataclass(frozen=True, slots=True)
class Sizes:
    """The gate and up projection of Llama-3.1-8B; smaller for a dry run."""

    out_features: int = 14336
    in_features: int = 4096
    rows: tuple[int, ...] = (1, 16, 64, 4096)
    dtype: torch.dtype = torch.bfloat16
    rank: int = 16
    adapters: int = 8
    repeats: int = 20

    @classmethod
    def tiny(cls) -> Sizes:
        dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float16  # the interpreter's bf16 is wrong
        return cls(160, 256, (1, 17), dtype, rank=4, adapters=3, repeats=1)


def random_weight(scheme: str, group_size: int, sizes: Sizes, device: torch.device) -> PackedWeight:
    """Values that the bits can have, of about 1 / sqrt(in_features)."""
    shape, size = (sizes.out_features, sizes.in_features), sizes.in_features**-0.5
    groups = (sizes.out_features, sizes.in_features // group_size)
    if scheme == "fp8":
        data = (torch.rand(shape, device=device) * 2 - 1).to(torch.float8_e4m3fn)
        scales = torch.rand(groups, device=device) * size
        return PackedWeight("fp8", data, scales, None, group_size, sizes.in_features)
    columns, kind = (shape[1] // 2, torch.uint8) if scheme == "int4" else (shape[1], torch.int8)
    data = torch.randint(0, 256, (shape[0], columns), dtype=torch.uint8, device=device).view(kind)
    zeros = torch.randint(0, 16, groups, dtype=torch.uint8, device=device) if scheme == "int4" else None
    scales = torch.rand(groups, device=device) * (size / (8 if scheme == "int4" else 128))
    return PackedWeight(scheme, data, scales.to(sizes.dtype), zeros, group_size, sizes.in_features)


Product = Callable[[Tensor], Tensor]


def products(sizes: Sizes, device: torch.device) -> dict[str, tuple[Product, PackedWeight, float]]:
    """By name: a product, its weight, and how wrong it may be."""
    from nanovllm.ops.triton_packed import packed_linear

    found: dict[str, tuple[Product, PackedWeight, float]] = {}

    def add(name: str, scheme: str, group_size: int, fp8_inputs: bool = False) -> None:
        weight = random_weight(scheme, group_size, sizes, device)
        assert weight.scales is not None
        parts = (scheme, weight.data, weight.scales, weight.zeros, group_size)
        bound = FP8_BOUND if fp8_inputs else BOUND
        found[name] = (lambda x: packed_linear(x, *parts, fp8_inputs=fp8_inputs), weight, bound)

    add("int4, groups of 128", "int4", 128)
    add("int8, groups of 128", "int8", 128)
    add("fp8 per channel", "fp8", sizes.in_features)
    add("fp8 in blocks", "fp8", 128)
    if device.type == "cpu" or multiplies_fp8(device):
        add("fp8 per channel, inputs in fp8", "fp8", sizes.in_features, True)
        add("fp8 in blocks, inputs in fp8", "fp8", 128, True)
    return found


def adapters(sizes: Sizes, device: torch.device, rows: int) -> tuple[Callable[[Tensor, Tensor], None], Tensor]:
    """What adds the products of x to y, in row i of adapter i mod `adapters`; and B A of the checked rows in fp64."""
    from nanovllm.ops.triton_lora import FIELDS, add_low_rank_

    rank, count, (out, inputs) = sizes.rank, sizes.adapters, (sizes.out_features, sizes.in_features)
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


def check(found: Tensor, x: Tensor, dense: Tensor, bound: float) -> float:
    """The largest error, as a share of the sum of the products' sizes. Raises AssertionError above the bound.

    dense: fp64 [out, in], or one for each row.
    """
    rows, wide = found[:CHECKED_ROWS].double(), x[:CHECKED_ROWS].double()
    expected, size = ((each(wide)[:, None] @ each(dense).mT)[:, 0] for each in (lambda t: t, torch.abs))
    error = float(((rows - expected).abs() / size).max())
    assert error <= bound, f"wrong by {error:g} of the products' sizes, {bound:g} is allowed"
    return error


def measure(sizes: Sizes, device: torch.device) -> list[Figure]:
    """A row for each product and number of rows."""
    plain = torch.randn(sizes.out_features, sizes.in_features, device=device).to(sizes.dtype)
    figures: list[Figure] = []
    of_products = products(sizes, device)
    for rows in sizes.rows:
        x = torch.randn(rows, sizes.in_features, device=device).to(sizes.dtype)
        torch_seconds = seconds(partial(F.linear, x, plain), device, sizes.repeats)

        def add(name: str, took: float, error: float, rows: int = rows, torch_seconds: float = torch_seconds) -> None:
            times = torch_seconds / took
            print_row(f"{name}, {rows} rows", f"{took * 1e6:,.1f} us", f"{times:.2f} times torch's, error {error:.1e}")
            figures.append({"product": name, "rows": rows, "us": took * 1e6, "times": times, "error": error})

        for name, (product, weight, bound) in of_products.items():
            error = check(product(x), x, dequantize(weight).double(), bound)
            add(name, seconds(partial(product, x), device, sizes.repeats), error)
        add_, dense = adapters(sizes, device, rows)
        y = torch.zeros(rows, sizes.out_features, device=device, dtype=sizes.dtype)
        add_(y, x)
        error = check(y, x, dense, BOUND)
        took = seconds(partial(add_, y, x), device, sizes.repeats)
        add(f"{sizes.adapters} adapters of rank {sizes.rank}", took, error)
    return figures


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and write JSON if requested. Returns the exit status."""
    parser = Parser(prog="products", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true", help="tiny sizes, to see that everything runs")
    add_json_option(parser)
    args = parser.parse_args(arguments)
    device = open_device("products", args.dry)
    if device is None:
        return 1
    facts = kernel_facts(device)
    try:
        figures = measure(Sizes.tiny() if args.dry else Sizes(), device)
    except AssertionError:
        traceback.print_exc()
        return 1
    write_json(args.output_json, args, facts, products=figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
