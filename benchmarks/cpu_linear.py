"""The linear layers of a model on the CPU: this package's kernel, torch's, and the limits of the machine.

    python -m benchmarks.cpu_linear [--model qwen3-0.6b] [--dtype bfloat16] [--rows 1 8 2048] [--output-json FILE]

For each projection of the model and each number of rows, the following take turns: the kernel of csrc/cpu_linear,
F.linear in the same dtype, F.linear in fp32, and torch.sum over as much memory as the weights take: with one call for
all ("of read"), and with one call for each product ("each"), since a call takes time of its own.

With few rows, the weights are many copies of the projection, far more than the caches hold, and GB/s of weights compare
with reading. The kernel is then called without the checks of `cpu_kernels.cpu_linear`, as a decode step does, whose
products are called from C++: weights that stream through the caches evict Python's code, so those checks take up to 50
microseconds. With many rows, GFLOP/s of `cpu_linear` compare with the better of torch's. The kernel's weights are
interleaved, as those of a loaded model.

A round is one pass of each, over all copies; a figure is the median over the rounds, and a share the median of the
rounds' shares, since a machine's memory may read at half its rate for seconds. NANOVLLM_CPU_ISA and ONEDNN_MAX_CPU_ISA
restrict the kernels to older instruction sets. torch's threads wait without spinning, as in an
engine (`OMP_WAIT_POLICY`): otherwise they would take the cores from the kernels that follow.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import peaks
from benchmarks.options import Parser, add_json_option, positive
from benchmarks.other_load import OtherLoad
from benchmarks.report import machine_facts, print_other_load, write_json
from benchmarks.shapes import Shape, open_shape
from benchmarks.timing import Spread
from nanovllm.layers.linear import GatedMLP
from nanovllm.models.decoder import Decoder
from nanovllm.ops import _cpu_kernels, cpu_kernels

MANY_ROWS = 64  # with at least this many, a pass takes one copy of the weights, since it is limited by computing


@dataclass(frozen=True, slots=True)
class Result:
    """One projection on some rows. Seconds are of one product; GB are 1e9 bytes, GFLOP 1e9 operations."""

    projection: str
    in_features: int
    out_features: int
    rows: int
    kernel_seconds: Spread
    torch_seconds: Spread
    torch_fp32_seconds: Spread
    read_gb_s: Spread
    of_read: float  # the kernel's rate of reading weights, relative to that of torch.sum
    of_each_read: float  # the same, relative to torch.sum with one call for each product
    of_torch: float  # speed relative to the better of torch's two
    weight_bytes: int

    @property
    def kernel_gb_s(self) -> float:
        """Rate at which the kernel reads the weights."""
        return self.weight_bytes / self.kernel_seconds.median / 1e9

    @property
    def kernel_gflop_s(self) -> float:
        """A multiply-add is two operations."""
        return 2.0 * self.rows * self.in_features * self.out_features / self.kernel_seconds.median / 1e9


def projections(shape: Shape) -> dict[str, tuple[int, int]]:
    """(out_features, in_features) of the products that a decode step takes."""
    decoder = Decoder(shape.spec, shape.dtype, torch.device("meta"))
    layer = decoder.layers[0]
    assert isinstance(layer.mlp, GatedMLP), "shapes with experts are not among those measured"
    weights = {"qkv": layer.qkv, "o": layer.o, "gate_up": layer.mlp.gate_up, "down": layer.mlp.down}
    found = {name: (sum(linear.parts.values()), linear.in_features) for name, linear in weights.items()}
    return found | {"lm_head": (shape.spec.vocab_size, shape.spec.hidden_size)}


def measure(shape: Shape, rows: Sequence[int], rounds: int) -> Iterator[Result]:
    """All projections on all numbers of rows."""
    for name, (out_features, in_features) in projections(shape).items():
        size = out_features * in_features * shape.dtype.itemsize
        for count in rows:
            copies = max(1, peaks.BUFFER_BYTES // size) if count < MANY_ROWS else 1
            weights = in_huge_pages(torch.randn(copies, out_features, in_features).to(shape.dtype))
            narrow = torch.randn(count, in_features).to(shape.dtype)
            wide = in_huge_pages(weights[: max(1, copies // 2)].float())  # as many bytes
            own = in_huge_pages(weights)
            interleaved = cpu_kernels.can_interleave(own[0])
            if interleaved:  # as the engine does when it has loaded a model
                for weight in own:
                    cpu_kernels.interleave_(weight)
            memory = in_huge_pages(torch.ones(copies, size // 4))
            works = (
                kernel_pass(narrow, own, interleaved),
                partial(pass_over, F.linear, narrow, weights),
                partial(pass_over, F.linear, narrow.float(), wide),
                memory.sum,
                partial(read_each, memory),
            )
            taken = [[seconds(work) for work in works] for _ in range(1 + rounds)][1:]
            products = (copies, copies, len(wide), copies, copies)
            kernel, same, fp32, read, each = ([turn[i] / n for turn in taken] for i, n in enumerate(products))
            yield Result(
                name, in_features, out_features, count,
                known(kernel), known(same), known(fp32), known(size / 1e9 / there for there in read),
                of_read=median(there / here for here, there in zip(kernel, read, strict=True)),
                of_each_read=median(there / here for here, there in zip(kernel, each, strict=True)),
                of_torch=median(min(others) / here for here, *others in zip(kernel, same, fp32, strict=True)),
                weight_bytes=size,
            )  # fmt: skip


def in_huge_pages(tensor: Tensor) -> Tensor:
    """A copy, in memory like that of a loaded model's weights."""
    copy = torch.empty_like(tensor)
    cpu_kernels.use_huge_pages(copy)
    return copy.copy_(tensor)


def known(values: Iterable[float]) -> Spread:
    spread = Spread.of(values)
    assert spread is not None, "there is a round"
    return spread


def pass_over(linear: Callable[[Tensor, Tensor], Tensor], x: Tensor, weights: Tensor) -> None:
    """The products of x [rows, in] with all of `weights` [copies, out, in]."""
    for weight in weights:
        linear(x, weight)


def _isa(dtype: torch.dtype) -> str:
    return cpu_kernels.choose(None, f"linear.{cpu_kernels.dtype_name(dtype)}")


def kernel_pass(x: Tensor, weights: Tensor, interleaved: bool) -> Callable[[], object]:
    """Our products of x [rows, in] with all of `weights` [copies, out, in]."""
    rows = len(x)
    (_, out_features, in_features) = weights.shape
    if rows >= MANY_ROWS:
        return partial(pass_over, partial(cpu_kernels.cpu_linear, interleaved=interleaved), x, weights)
    y = x.new_empty(rows, out_features)
    calls = [
        partial(
            _cpu_kernels.linear, isa=_isa(x.dtype), dtype=cpu_kernels.dtype_name(x.dtype), x=x.data_ptr(),
            x_stride=in_features, weight=weight.data_ptr(), bias=0, y=y.data_ptr(), y_stride=out_features, rows=rows,
            in_features=in_features, out_features=out_features, interleaved=interleaved,
            threads=torch.get_num_threads(),
        )
        for weight in weights
    ]  # fmt: skip

    kept = x, weights, y  # the calls have their addresses only

    def run_all() -> Tensor:
        for call in calls:
            call()
        return kept[-1]

    assert torch.equal(run_all(), cpu_kernels.cpu_linear(x, weights[-1], interleaved=interleaved)), "another product"
    return run_all


def read_each(memory: Tensor) -> None:
    for part in memory:
        part.sum()


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def print_result(result: Result) -> None:
    shape = f"{result.in_features} x {result.out_features}"
    read = result.read_gb_s.median
    rates = f"{result.kernel_gb_s:8.1f} {result.of_read:7.0%} {result.of_each_read:5.0%} {result.kernel_gflop_s:9.1f}"
    torchs = [2.0 * result.rows * result.in_features * result.out_features / spread.median / 1e9
              for spread in (result.torch_seconds, result.torch_fp32_seconds)]  # fmt: skip
    others = " ".join(f"{rate:9.1f}" for rate in torchs)
    print(f"{result.projection:<8} {shape:>15} {result.rows:>5} {read:>6.1f} {rates} {others} {result.of_torch:9.2f}",
          flush=True)  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Measure, print, and write JSON if requested."""
    with open_shape(args.model, 1, args.dtype) as shape:
        facts = machine_facts("cpu")
        load = OtherLoad()
        isa = _isa(shape.dtype)
        machine = f"{facts['cpu']}, {facts['threads']} threads, {isa}"
        print(f"{shape.name} in {args.dtype}; {machine}; medians of {args.rounds} rounds")
        print(f"{'in x out':>24} {'rows':>5} {'read':>6} {'GB/s':>8} {'of read':>7} {'each':>5} {'GFLOP/s':>9}"
              f" {'torch':>9} {'in fp32':>9} {'of torch':>9}")  # fmt: skip
        results = []
        for result in measure(shape, args.rows, args.rounds):
            print_result(result)
            results.append(result)
        other_load = load.share()
        print_other_load(other_load)
        write_json(args.output_json, args, facts, model=shape.facts(), isa=isa, results=results, other_load=other_load)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="cpu_linear", description="Speed of a model's linear layers on the CPU.")
    add = parser.add_argument
    add("--model", default="qwen3-0.6b", help="a published name, or a directory with a config.json")
    add("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    add("--rows", type=positive, nargs="+", default=[1, 2, 4, 8, 2048], help="rows of a step (default: %(default)s)")
    add("--rounds", type=positive, default=15, help="of all four (default: %(default)s)")
    add_json_option(parser)
    return parser.run(argv, run)


if __name__ == "__main__":
    sys.exit(main())
