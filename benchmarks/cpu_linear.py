"""The linear layers of a decode step on the CPU: GB/s of weights, beside reading memory and torch's own kernel.

    python -m benchmarks.cpu_linear [--model qwen3-0.6b] [--rows 1 8 32] [--output-json FILE]

For each projection of the model, on --rows rows: the kernel of csrc/cpu_linear, F.linear, and torch.sum over as much
memory, in turns, round after round. Weights are many copies of the projection, far more than the caches hold. A figure
is the median over the rounds of the fastest of several passes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import peaks
from benchmarks.options import Parser, add_json_option, exit_status, positive
from benchmarks.other_load import OtherLoad
from benchmarks.report import machine_facts, print_other_load, write_json
from benchmarks.shapes import Shape, open_shape
from benchmarks.timing import Spread
from nanovllm.errors import ConfigError
from nanovllm.models.decoder import Decoder
from nanovllm.ops import cpu_linear


@dataclass(frozen=True, slots=True)
class Result:
    """One projection on some rows; GB are 1e9 bytes of weights."""

    projection: str
    in_features: int
    out_features: int
    rows: int
    kernel_gb_s: Spread
    torch_gb_s: Spread
    read_gb_s: Spread
    kernel_is_used: bool  # by the engine, which leaves many rows to torch


def projections(shape: Shape) -> dict[str, tuple[int, int]]:
    """(out_features, in_features) of the products that a decode step takes."""
    decoder = Decoder(shape.spec, shape.dtype, torch.device("meta"))
    layer = decoder.layers[0]
    weights = {"qkv": layer.qkv, "o": layer.o, "gate_up": layer.gate_up, "down": layer.down}
    found = {name: (linear.weight.shape[0], linear.weight.shape[1]) for name, linear in weights.items()}
    return found | {"lm_head": (shape.spec.vocab_size, shape.spec.hidden_size)}


def measure(shape: Shape, rows: Sequence[int], rounds: int) -> Iterator[Result]:
    """All projections on all numbers of rows."""
    for name, (out_features, in_features) in projections(shape).items():
        copies = max(1, peaks.BUFFER_BYTES // (out_features * in_features * shape.dtype.itemsize))
        weights = torch.randn(copies, out_features, in_features, dtype=shape.dtype)
        for count in rows:
            x = torch.randn(count, in_features, dtype=shape.dtype)
            kernels = (cpu_linear.few_row_linear, F.linear)
            figures = [(*(gb_s(k, x, weights) for k in kernels), peaks.read_gb_s()) for _ in range(rounds)]
            kernel, of_torch, read = (Spread.of(column) for column in zip(*figures, strict=True))
            assert kernel is not None and of_torch is not None and read is not None
            used = cpu_linear.supports(x, weights[0], None)
            yield Result(name, in_features, out_features, count, kernel, of_torch, read, used)


def gb_s(linear: Callable[[Tensor, Tensor], Tensor], x: Tensor, weights: Tensor) -> float:
    """Rate at which `linear` goes through `weights` [copies, out, in], x [rows, in] being the input of each."""

    def all_copies() -> None:
        for weight in weights:
            linear(x, weight)

    return weights.nbytes / peaks.least_seconds(all_copies) / 1e9


def print_result(result: Result) -> None:
    kernel, of_torch, read = (figure.median for figure in (result.kernel_gb_s, result.torch_gb_s, result.read_gb_s))
    shape = f"{result.in_features} x {result.out_features}"
    used = "" if result.kernel_is_used else "   torch is used"
    figures = f"{kernel:8.1f} {kernel / read:8.0%} {of_torch:8.1f} {kernel / of_torch:8.2f}"
    print(f"{result.projection:<8} {shape:>15} {result.rows:>5} {read:>8.1f} {figures}{used}", flush=True)


def run(args: argparse.Namespace) -> int:
    """Measure, print, and write JSON where asked."""
    if not cpu_linear.available():
        raise ConfigError("the kernel needs AVX512-bf16, which this processor does not have: measure on another one")
    with open_shape(args.model, 1, "bfloat16") as shape:
        facts, load = machine_facts("cpu"), OtherLoad()
        print(f"{shape.name}; {facts['cpu']}, {facts['threads']} threads; GB/s, medians of {args.rounds} rounds")
        print(f"{'in x out':>24} {'rows':>5} {'read':>8} {'kernel':>8} {'of read':>8} {'torch':>8} {'ratio':>8}")
        results = []
        for result in measure(shape, args.rows, args.rounds):
            print_result(result)
            results.append(result)
        other_load = load.share()
        print_other_load(other_load)
        write_json(args.output_json, args, facts, model=shape.facts(), results=results, other_load=other_load)
    return 0


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="cpu_linear", description="GB/s at which the linear layers of a decode step read weights.")
    add = parser.add_argument
    add("--model", default="qwen3-0.6b", help="a name in benchmarks/configs, or a directory with a config.json")
    add("--rows", type=positive, nargs="+", default=[1, 2, 4, 8, 16, 32], help="rows of a step (default: %(default)s)")
    add("--rounds", type=positive, default=3, help="of all three measurements (default: %(default)s)")
    add_json_option(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    return exit_status("cpu_linear", lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
