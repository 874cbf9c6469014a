"""Strided copies compared with contiguous ones and with torch's, over the link or, without a GPU, within the host.

    python -m benchmarks.copy_bandwidth [--mib 256] [--row-bytes 65536 1048576] [--output-json FILE]

The host side is strided: every second row of a buffer of twice the size, like one layer of every block of a host pool.
All ways to copy the same bytes take turns, and the result of each is checked once. GB are 1e9 bytes.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.engine import device_name
from benchmarks.options import Parser, add_device_option, add_json_option, positive
from benchmarks.other_load import OtherLoad
from benchmarks.peaks import synchronize
from benchmarks.report import machine_facts, print_other_load, print_row, write_json
from benchmarks.timing import Spread
from nanovllm.comm import memcpy_2d_async
from nanovllm.errors import ConfigError

MOST_CALLS = 8192  # of ways with one call per row
CONTIGUOUS = "contiguous"


@dataclass(frozen=True, slots=True)
class Result:
    """One way to copy."""

    kind: str
    way: str
    row_bytes: int
    gb_s: Spread
    of_contiguous: Spread  # in the same round


class Buffers:
    """`rows` rows of `row_bytes`: contiguous in `near`, and every second row of `far`, which is on the host."""

    def __init__(self, device: str, kind: str, rows: int, row_bytes: int) -> None:
        pin = device == "cuda"
        self.kind = kind
        self.rows = rows
        self.row_bytes = row_bytes
        self.size = rows * row_bytes
        self.far = torch.empty(rows, 2, row_bytes, dtype=torch.uint8, pin_memory=pin)
        self.packed = torch.empty(self.size, dtype=torch.uint8, pin_memory=pin)
        self.near = torch.empty(rows, row_bytes, dtype=torch.uint8, device=device)
        self.stream = torch.cuda.Stream() if pin else None

    def ways(self) -> dict[str, Callable[[], object]]:
        """The call of each way, by name; the contiguous copy first."""
        width = self.row_bytes
        rows = self.rows
        size = self.size
        stream: Any = self.stream or 0
        near_pitch = width
        far_pitch = 2 * width
        dst, src = (self.far, self.near) if self.kind == "d2h" else (self.near, self.far)
        dpitch, spitch = (far_pitch, near_pitch) if self.kind == "d2h" else (near_pitch, far_pitch)
        to, at = (self.packed, self.near) if self.kind == "d2h" else (self.near, self.packed)
        torch_to, torch_at = (self.far[:, 0], self.near) if self.kind == "d2h" else (self.near, self.far[:, 0])
        flat_dst = dst.view(-1)
        flat_src = src.view(-1)
        dsts = [flat_dst[row * dpitch :] for row in range(rows)] if rows <= MOST_CALLS else []
        srcs = [flat_src[row * spitch :] for row in range(rows)] if rows <= MOST_CALLS else []

        def one_by_one() -> None:
            for row_dst, row_src in zip(dsts, srcs, strict=True):
                memcpy_2d_async(row_dst, row_src, width, width, width, 1, self.kind, stream)

        calls: dict[str, Callable[[], object]] = {
            CONTIGUOUS: lambda: memcpy_2d_async(to, at, size, size, size, 1, self.kind, stream),
            "strided": lambda: memcpy_2d_async(dst, src, dpitch, spitch, width, rows, self.kind, stream),
            "torch, strided": lambda: torch_to.copy_(torch_at, non_blocking=True),
        }
        if dsts:
            calls["row by row"] = one_by_one
        return calls

    def check(self, way: str, call: Callable[[], object]) -> None:
        """Copy once and compare with torch's copy. Raises AssertionError if a byte differs."""
        side = self.packed.view_as(self.near) if way == CONTIGUOUS else self.far[:, 0]
        dst, src = (side, self.near) if self.kind == "d2h" else (self.near, side)
        src.copy_(torch.randint(0, 256, src.shape, dtype=torch.uint8))
        dst.zero_()
        self.run(call)
        assert torch.equal(dst.cpu(), src.cpu()), f"{way} moved the wrong bytes"

    def run(self, call: Callable[[], object]) -> float:
        """Seconds until the copy is complete."""
        device = "cpu" if self.stream is None else "cuda"
        synchronize(device)
        with nullcontext() if self.stream is None else torch.cuda.stream(self.stream):
            start = time.perf_counter()
            call()
            synchronize(device)
            return time.perf_counter() - start


def measure(device: str, kind: str, size: int, row_bytes: int, rounds: int) -> list[Result]:
    buffers = Buffers(device, kind, size // row_bytes, row_bytes)
    ways = buffers.ways()
    for way, call in ways.items():
        buffers.check(way, call)
    rates: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, call in ways.items():
            rates[way].append(buffers.size / buffers.run(call) / 1e9)
    results = []
    for way, values in rates.items():
        gb_s = Spread.of(values)
        share = Spread.of(value / contiguous for value, contiguous in zip(values, rates[CONTIGUOUS], strict=True))
        assert gb_s is not None and share is not None
        results.append(Result(kind, way, row_bytes, gb_s, share))
    return results


def run(args: argparse.Namespace) -> int:
    device = device_name(args.device)
    size = args.mib << 20
    if any(size % row_bytes for row_bytes in args.row_bytes):
        raise ConfigError(f"--row-bytes {args.row_bytes}: each must divide {size} bytes")
    load = OtherLoad()
    results: list[Result] = []
    for kind in ("h2d", "d2h") if device == "cuda" else ("h2h",):
        for row_bytes in args.row_bytes:
            print(f"{kind}, {args.mib} MiB in rows of {row_bytes:,} bytes")
            for result in measure(device, kind, size, row_bytes, args.repeats):
                results.append(result)
                print_row(result.way, f"{result.gb_s.median:,.2f} GB/s", f"{result.of_contiguous.median:.1%}")
            print()
    other_load = load.share()
    print_other_load(other_load)
    write_json(args.output_json, args, machine_facts(device), results=results, other_load=other_load)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    prog = "python -m benchmarks.copy_bandwidth"
    parser = Parser(prog=prog, description="Strided copies compared with contiguous ones and torch's.")
    add = parser.add_argument
    add("--mib", type=positive, default=256, help="MiB in each copy (default: %(default)s)")
    add("--row-bytes", type=positive, nargs="+", default=[1 << 16, 1 << 20], help="of a row (default: %(default)s)")
    add("--repeats", type=positive, default=10, help="rounds that count (default: %(default)s)")
    add_device_option(parser)
    add_json_option(parser)
    return parser.run(argv, run)


if __name__ == "__main__":
    sys.exit(main())
