"""Finds the fastest tiles and pipelines of the attention kernels on this GPU, and for which shapes of a dense weight a
product of few rows of our own is faster than torch's; or times products with packed weights.

    python -m benchmarks.sweep [--head-dim 128 ...] [--only dense|packed] [--keep] [--dry] [--output-json FILE]

Every configuration is timed on the same problems, with the heads of Llama-3.1-8B in bf16. One whose results differ from
the default's is left out. --keep writes the fastest to nanovllm/ops/tuned under the device's name, for engines on such
a device; entries for other head sizes are kept. The file with all figures is written after each step. --dry runs tiny
sizes and a few configurations, without a GPU in Triton's interpreter, and writes no entry. --only dense leaves the
attention kernels out. --only packed times products of few rows with packed weights instead, by the sizes of
`benchmarks.products`, and keeps nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import products as packed_products
from benchmarks.kernel_variants import decode_variants, few_rows_variants, packed_variants, prefill_variants
from benchmarks.kernels import Sizes, kernel_facts, open_device, operations, problem, seconds
from benchmarks.options import Parser, add_json_option, positive
from benchmarks.report import print_row, write_json
from nanovllm.ops.attention import AttentionMetadata, AttentionState
from nanovllm.ops.cpu_kernels import dtype_name
from nanovllm.ops.kernel_config import (
    TABLES,
    DecodeConfig,
    FewRowsConfig,
    FewRowsEntry,
    PrefillConfig,
    TunedEntry,
    read_table,
    table_path,
)
from nanovllm.ops.packed_weights import PackedWeight, dequantize

if TYPE_CHECKING:
    from nanovllm.ops.triton_packed import PackedConfig

BOUND = 2e-2  # of outputs and LSE between two configurations
MARGIN = 1.03  # how many times faster a product of our own must be than torch's
PRODUCT_ROWS = (1, 8)
Config = PrefillConfig | DecodeConfig


@dataclass(frozen=True, slots=True)
class Problems:
    """(rows, context, block size) of prefill, and (sequences, context, block size) of decode."""

    prefill: tuple[tuple[int, int, int], ...] = ((8192, 16384, 256), (8192, 16384, 4096))
    decode: tuple[tuple[int, int, int], ...] = ((1, 32768, 4096), (8, 32768, 1024), (64, 4096, 256))
    repeats: int = 7
    configs: int | None = None  # how many, None for all

    @classmethod
    def tiny(cls) -> Problems:
        return cls(((70, 100, 64),), ((1, 70, 32),), 1, 2)


@dataclass(frozen=True, slots=True)
class Timing:
    """A configuration: seconds of each problem, or the reason why it was left out."""

    config: Config
    seconds: tuple[float, ...]
    note: str = ""


class Sweep:
    """One head size on one device."""

    def __init__(self, sizes: Sizes, problems: Problems, device: torch.device) -> None:
        self.sizes = sizes
        self.problems = problems
        self.device = device
        self.scale = sizes.head_dim**-0.5
        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)
        count = problems.configs
        self.prefill_configs = prefill_variants(sizes.head_dim, sizes.dtype, capability)[:count]
        self.decode_configs = decode_variants(sizes.head_dim, sizes.dtype)[:count]

    def prefill(self) -> list[Timing]:
        from nanovllm.ops.triton_prefill import prefill_

        def attend(q: Tensor, pool: Tensor, table: AttentionMetadata, state: AttentionState, config: Config) -> None:
            assert isinstance(config, PrefillConfig)
            prefill_(q, pool, table.on(q.device), state, self.scale, None, config)

        problems = [problem(self.sizes, self.device, 1, *sizes) for sizes in self.problems.prefill]
        rates = [operations(self.sizes, rows, context) / 1e12 for rows, context, _ in self.problems.prefill]
        return [self._time(config, attend, problems, rates, "TFLOP/s") for config in self.prefill_configs]

    def decode(self) -> list[Timing]:
        from nanovllm.ops.triton_decode import decode_

        def attend(q: Tensor, pool: Tensor, table: AttentionMetadata, state: AttentionState, config: Config) -> None:
            assert isinstance(config, DecodeConfig)
            decode_(q, pool, table.on(q.device), state, self.scale, None, None, config)

        problems = [
            problem(self.sizes, self.device, sequences, 1, context, block_size)
            for sequences, context, block_size in self.problems.decode
        ]
        rates = [n * context * self.sizes.token_bytes / 1e9 for n, context, _ in self.problems.decode]
        return [self._time(config, attend, problems, rates, "GB/s") for config in self.decode_configs]

    def _time(
        self,
        config: Config,
        attend: Callable[..., None],
        problems: Sequence[tuple[Tensor, Tensor, AttentionMetadata, AttentionState]],
        work: Sequence[float],
        unit: str,
    ) -> Timing:
        """Time one configuration on all problems, after its results were compared with the default's."""
        name = " ".join(f"{key}={value}" for key, value in asdict(config).items())
        default = self.prefill_configs[0] if isinstance(config, PrefillConfig) else self.decode_configs[0]
        took = []
        try:
            for q, pool, table, state in problems:
                results = [AttentionState.empty(q) for _ in range(2)]
                for each, result in zip((default, config), results, strict=True):
                    attend(q, pool, table, result, each)
                off = max(
                    float((results[0].out - results[1].out).abs().max()),
                    float((results[0].lse - results[1].lse).abs().max()),
                )
                if not off <= BOUND:
                    raise RuntimeError(f"its results are off by {off:g}")
                call = lambda q=q, pool=pool, table=table, state=state: attend(q, pool, table, state, config)  # noqa: E731
                took.append(seconds(call, self.device, self.problems.repeats))
        except Exception as error:  # most often: more shared memory than there is
            note = f"{type(error).__name__}: {error}".partition("\n")[0]
            print_row("-", "left out", f"{name}: {note[:100]}")
            return Timing(config, (), note)
        rates = ", ".join(f"{amount / one:,.1f}" for amount, one in zip(work, took, strict=True))
        print_row(rates, unit, name)
        return Timing(config, tuple(took))


def fastest(timings: Sequence[Timing]) -> Config:
    """The configuration with the least time, each problem counted against the default's, which is the first."""
    default = timings[0]
    if not default.seconds:
        raise RuntimeError(f"the default configuration cannot be timed: {default.note}")

    def relative(timing: Timing) -> float:
        return sum(took / base for took, base in zip(timing.seconds, default.seconds, strict=True))

    return min((timing for timing in timings if timing.seconds), key=relative).config


def sweep_products(
    sizes: Sizes, device: torch.device, most: int | None
) -> tuple[list[dict[str, Any]], list[FewRowsEntry]]:
    """Microseconds of each shape, for PRODUCT_ROWS, through torch and every configuration of our own kernel.

    Also what belongs into the table: a shape's fastest configuration, if torch's is slower by MARGIN for every count of
    rows.
    """
    from nanovllm.ops.triton_few_rows import few_rows_linear

    figures = list[dict[str, Any]]()
    kept = list[FewRowsEntry]()
    for out_features, in_features in sizes.products:
        weight = torch.randn(out_features, in_features, device=device, dtype=sizes.dtype)
        copies = cycle([weight, *(weight.clone() for _ in range(3))])  # more than a cache of the device holds
        inputs = [torch.randn(rows, in_features, device=device, dtype=sizes.dtype) for rows in PRODUCT_ROWS]
        by_torch = [
            seconds(lambda x=x, copies=copies: F.linear(x, next(copies)), device, sizes.repeats)  # type: ignore[misc]
            for x in inputs
        ]
        best: tuple[float, FewRowsConfig | None] = (1.0, None)  # of the largest share of torch's time
        for config in [None, *few_rows_variants()[:most]]:
            name = "torch"
            took = by_torch
            if config is not None:
                name = " ".join(map(str, asdict(config).values()))
                took = []
                for x in inputs:
                    y = few_rows_linear(x, weight, None, config)
                    expected = F.linear(x, weight)
                    off = float((y - expected).abs().max() / expected.abs().max())
                    if not off <= BOUND:
                        raise RuntimeError(f"products with {config} are off by {off:g}")
                    call = lambda x=x, copies=copies, c=config: few_rows_linear(x, next(copies), None, c)  # noqa: E731
                    took.append(seconds(call, device, sizes.repeats))
                share = max(own / other for own, other in zip(took, by_torch, strict=True))
                best = min(best, (share, config), key=lambda each: each[0])
            rates = ", ".join(f"{weight.nbytes / each / 1e9:,.0f}" for each in took)
            print_row(rates, "GB/s", f"{out_features} x {in_features}, {PRODUCT_ROWS} rows: {name}")
            figures.append({"out": out_features, "in": in_features, "config": config, "us": [t * 1e6 for t in took]})
        if best[1] is not None and best[0] * MARGIN <= 1:
            kept.append(FewRowsEntry(out_features, in_features, dtype_name(sizes.dtype), best[1]))
    return figures, kept


def keep(
    facts: dict[str, Any],
    device: tuple[str, tuple[int, int]],
    entry: TunedEntry | None = None,
    products: Sequence[FewRowsEntry] | None = None,
    directory: Path = TABLES,
) -> Path:
    """Write to the table of a device, by name and capability: the entry in place of that for the same heads and dtype,
    the products in place of all."""
    path = table_path(device[0], directory)
    old = read_table(path)
    entries = {(kept.head_dim, kept.dtype): kept for kept in [*old.entries, *([] if entry is None else [entry])]}
    table = {
        "device": device[0],
        "capability": device[1],
        "machine": facts,
        "entries": [asdict(entries[key]) for key in sorted(entries)],
        "few_rows": [asdict(kept) for kept in (old.few_rows if products is None else products)],
    }
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(table, indent=2) + "\n")
    return path


def run(args: argparse.Namespace, device: torch.device) -> int:
    facts = kernel_facts(device)
    named = ("cpu", (9, 0))
    if device.type == "cuda":
        named = (torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device))
    results: list[dict[str, Any]] = []
    print("products of few rows")
    figures, products = sweep_products(Sizes.tiny() if args.dry else Sizes(repeats=7), device, 2 if args.dry else None)
    write_json(args.output_json, args, facts, products=figures, few_rows=products, sweep=results)
    print("faster than torch: " + ("; ".join(map(str, products)) or "none"))
    if args.keep and not args.dry:
        print(f"kept in {keep(facts, named, products=products)}")
    for head_dim in [] if args.only else [Sizes.tiny().head_dim] if args.dry else args.head_dim:
        sizes = Sizes.tiny() if args.dry else replace(Sizes(), head_dim=head_dim)
        sweep = Sweep(sizes, Problems.tiny() if args.dry else Problems(), device)
        results.append({"head_dim": head_dim, "dtype": str(sizes.dtype).removeprefix("torch.")})
        result = results[-1]

        def write(name: str, figures: Any, result: dict[str, Any] = result) -> None:
            result[name] = figures
            write_json(args.output_json, args, facts, products=figures, few_rows=products, sweep=results)

        print(f"prefill, heads of {head_dim}")
        write("prefill", sweep.prefill())
        print(f"decode, heads of {head_dim}")
        write("decode", sweep.decode())
        prefill = fastest(result["prefill"])
        decode = fastest(result["decode"])
        assert isinstance(prefill, PrefillConfig) and isinstance(decode, DecodeConfig)
        entry = TunedEntry(head_dim, result["dtype"], prefill, decode)
        write("entry", entry)
        print(f"fastest: {entry}")
        if args.keep and not args.dry:
            print(f"kept in {keep(facts, named, entry)}")
    return 0


def sweep_packed(dry: bool, device: torch.device) -> list[dict[str, Any]]:
    """A row for each configuration, scheme and number of rows. One that cannot run or is wrong has a note."""
    from nanovllm.ops.triton_packed import packed_config, packed_linear

    sizes = packed_products.Sizes.tiny() if dry else packed_products.Sizes()
    rows_found: list[dict[str, Any]] = []
    for name, product in packed_products.products(sizes, packed_products.SCHEMES, device).items():
        weight = product.weight
        dense = dequantize(product.weight).double()
        for rows in (1,) if dry else (1, 16, 64):
            x = torch.randn(rows, sizes.in_features, device=device).to(sizes.dtype)
            default = packed_config(rows, sizes.out_features, sizes.in_features)
            for config in packed_variants(default)[: 2 if dry else None]:

                def multiply(
                    weight: PackedWeight, x: Tensor = x, config: PackedConfig = config, fp8: bool = product.fp8_inputs
                ) -> Tensor:
                    assert weight.scales is not None
                    parts = (weight.scheme, weight.data, weight.scales, weight.zeros, weight.group_size)
                    return packed_linear(x, *parts, None, config, fp8_inputs=fp8)

                rows_found.append({"product": name, "rows": rows, "config": asdict(config)})
                try:
                    packed_products.check(multiply(weight), x, dense, product.bound)
                    call = packed_products.in_turn(multiply, weight, weight.nbytes, sizes)
                    rows_found[-1]["us"] = seconds(call, device, sizes.repeats) * 1e6
                except Exception as error:  # most often: more shared memory than there is
                    rows_found[-1]["note"] = f"{type(error).__name__}: {error}".partition("\n")[0]
                told = f"{rows_found[-1]['us']:,.1f}" if "us" in rows_found[-1] else "left out"
                print_row(told, "us", f"{name}, {rows} rows: {config}")
    return rows_found


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="sweep", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--head-dim", type=positive, nargs="+", default=[128], help="sizes of heads (default: 128)")
    add("--only", choices=("dense", "packed"), help="products with weights in this form, and no attention kernels")
    add("--keep", action="store_true", help="write what was fastest to the package's table of this device")
    add("--dry", action="store_true", help="tiny sizes, to see that everything runs")
    add_json_option(parser)
    args = parser.parse_args(argv)
    device = open_device("sweep", args.dry)
    if device is not None and args.only == "packed":
        facts = kernel_facts(device)
        write_json(args.output_json, args, facts, products=sweep_packed(args.dry, device))
        return 0
    return 1 if device is None else run(args, device)


if __name__ == "__main__":
    sys.exit(main())
