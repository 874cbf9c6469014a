"""What CPU attention beside a GPU rests on: small copies, mapped memory, host tasks and rates, while the link is busy.

    python -m benchmarks.probe [--device cuda] [--dry] [--output-json FILE]

Each number of hardware queues (CUDA_DEVICE_MAX_CONNECTIONS) is a process of its own, since CUDA reads it once. Times
are medians in microseconds, by the device's clock, with the link idle and beside four loads of 16 MiB, on one stream
and on four. A round trip is that of a layer of CPU attention without attention: a kernel writes the queries to host
memory, a host task runs, a kernel reads the result. The task runs on a thread of the driver, or on one that polls
(NANOVLLM_POLLED_CALLS). Then CPU attention for each number of threads, and the link, in 1e9 bytes per second.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.engine import device_name
from benchmarks.options import Parser, add_device_option, add_json_option, positive
from benchmarks.report import ROOT, machine_facts, python_path, write_json
from nanovllm.device import Device, PitchedCopy, create_device
from nanovllm.device.cuda import CONNECTIONS, POLLED_CALLS
from nanovllm.features.cpu_attention.bandwidth import Probe
from nanovllm.kvcache.base import AttentionGeometry
from nanovllm.kvcache.offload_engine import OffloadEngine
from nanovllm.memory.budget import DeviceSplit
from nanovllm.memory.layout import KVLayout
from nanovllm.ops import select_cpu_backend
from nanovllm.ops.cpu_attention import empty_task
from nanovllm.ops.merge import merge_attention_outputs

SMALL = 16 << 10  # bytes: about a partial state of 32 heads of 128
LOADS = 4
HEADS = 32
KV_HEADS = 8
HEAD_DIM = 128
STATE_HEADS = 31  # whose outputs and LSEs fit into SMALL
ROUNDS = 20
DRY_ROUNDS = 2


class Link:
    """Small work on the device, alone and beside loads."""

    def __init__(self, device: Device, load_bytes: int, rounds: int, matrix: int) -> None:
        """matrix: of a product that takes longer than submitting some kernels."""
        self.device = device
        self._rounds = rounds
        self._loads = [device.new_stream(f"load-{index}") for index in range(LOADS)]
        self._small = device.new_stream("small")
        self._there = device.new_event()
        self._back = device.new_event()
        self._from = device.empty_host("loads", (LOADS, load_bytes), torch.uint8)
        self._to = device.empty("loads", (LOADS, load_bytes), torch.uint8)
        self._host = device.empty_host("small", (SMALL // 4,), torch.float32)
        self._on_device = device.empty("small", (SMALL // 4,), torch.float32)
        self._host.zero_()
        mapped = device.mapped(self._host)
        self._mapped: Tensor = self._host if mapped is None else mapped
        self.is_mapped = mapped is not None
        with device.compute():
            self._matrix = torch.ones(matrix, matrix, dtype=torch.bfloat16, device=device.torch_device)
            self._out = torch.zeros(1, STATE_HEADS, HEAD_DIM, device=device.torch_device)
            self._lse = torch.zeros(STATE_HEADS, 1, device=device.torch_device)

    def times(self) -> dict[str, dict[str, float]]:
        """Of each kind of work, by how the link is busy."""
        works: dict[str, Callable[[], float]] = {
            "16 KB copy h2d": lambda: self._copy(self._on_device, self._host, "h2d"),
            "16 KB copy d2h": lambda: self._copy(self._host, self._on_device, "d2h"),
        }
        if self.is_mapped:
            works |= {
                "mapped write": lambda: self._kernel(lambda: torch.mul(self._on_device, 1, out=self._mapped)),
                "mapped merge": lambda: self._kernel(lambda: self._merge(self._mapped)),
                "merge on the device": lambda: self._kernel(lambda: self._merge(self._on_device)),
            }
            for name, polled in (("round trip, driver", False), ("round trip, polled", True)):
                with suppress(RuntimeError), calls_polled(polled):
                    calls = self.device.new_call_stream("calls")
                    works[name] = lambda calls=calls: self._kernel(lambda: self._round_trip(calls))  # type: ignore[misc]
        busy = {"idle": 0, "one stream": 1, "four streams": LOADS}
        return {
            name: {how: self._median(work, streams) for how, streams in busy.items()} for name, work in works.items()
        }

    def _median(self, work: Callable[[], float], streams: int) -> float:
        """Microseconds of the work beside loads on so many streams."""
        times = []
        for _ in range(self._rounds + 1):
            for index in range(LOADS if streams else 0):
                stream = self._loads[index % streams]
                size = self._from[index].nbytes
                copy = PitchedCopy(self._to[index], self._from[index], size, size, size, 1, "h2d")
                self.device.copy_2d(copy, stream)
            times.append(work() * 1e6)
            for stream in self._loads:
                stream.synchronize()
        return median(times[1:])

    def _copy(self, dst: Tensor, src: Tensor, kind: Any) -> float:
        begin = self._small.mark()
        self.device.copy_2d(PitchedCopy(dst, src, SMALL, SMALL, SMALL, 1, kind), self._small)
        end = self._small.mark()
        self._small.synchronize()
        return (end.seconds() or 0.0) - (begin.seconds() or 0.0)

    def _kernel(self, submit: Callable[[], object]) -> float:
        """Submitted behind a product, so that its submission takes no part of the time."""
        compute = self.device.compute_stream
        with self.device.compute():
            torch.mm(self._matrix, self._matrix)
            begin = compute.mark()
            submit()
            end = compute.mark()
            compute.synchronize()
        return (end.seconds() or 0.0) - (begin.seconds() or 0.0)

    def _merge(self, partial: Tensor) -> None:
        rows = STATE_HEADS * HEAD_DIM
        out = partial[:rows].view(self._out.shape)
        lse = partial[rows : rows + STATE_HEADS].view(self._lse.shape)
        merge_attention_outputs(self._out, self._lse, out, lse)

    def _round_trip(self, calls: Any) -> None:
        compute = self.device.compute_stream
        torch.mul(self._on_device, 1, out=self._mapped)
        compute.record(self._there)
        calls.wait(self._there)
        calls.launch(empty_task())
        calls.record(self._back)
        compute.wait(self._back)
        torch.mul(self._mapped, 1, out=self._on_device)


@contextmanager
def calls_polled(polled: bool) -> Iterator[None]:
    """In this context a polling thread runs the tasks of new streams, or the driver's."""
    before = os.environ.get(POLLED_CALLS)
    os.environ[POLLED_CALLS] = "1" if polled else "0"
    try:
        yield
    finally:
        del os.environ[POLLED_CALLS]
        if before is not None:
            os.environ[POLLED_CALLS] = before


def rates_by_threads(device: Device, threads: Sequence[int], block_size: int, blocks: int) -> list[dict[str, float]]:
    """CPU attention over the host pool of an engine with Llama-3.1-8B's heads, and the link, in GB/s."""
    layout = KVLayout(2, KV_HEADS, HEAD_DIM, block_size, 2)
    dtype = torch.bfloat16
    geometry = AttentionGeometry(HEAD_DIM**-0.5, HEADS, dtype)
    engine = OffloadEngine(device, layout, dtype, DeviceSplit(16, 2), blocks)
    engine.host.fill_(0.5)
    rows = []
    for count in threads:
        probe = Probe(engine, geometry)
        rates = {"CPU attention": probe.host_rate(select_cpu_backend(HEAD_DIM, count)), "link": probe.link_rate()}
        rows.append({"threads": count} | {name: rate / 1e9 for name, rate in rates.items()})
    return rows


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """In this process."""
    with closing(create_device(device_name(args.device))) as device:
        sizes = (64 << 10, DRY_ROUNDS, 64) if args.dry else (16 << 20, ROUNDS, 4096)
        link = Link(device, *sizes)
        times = link.times()
        rates = []
        if args.rates:
            with device.compute():
                rates = rates_by_threads(device, args.threads, *((16, 4) if args.dry else (1024, 32)))
    return {"mapped": link.is_mapped, "times_us": times, "rates_gb_s": rates}


def in_process(args: argparse.Namespace, connections: int, rates: bool) -> dict[str, Any]:
    """`measure` in a process with so many hardware queues."""
    with tempfile.TemporaryDirectory(prefix="nanovllm-probe-") as directory:
        path = Path(directory) / "measured.json"
        command = [sys.executable, "-m", "benchmarks.probe", "--here", str(path), "--device", device_name(args.device)]
        command += ["--threads", *map(str, args.threads), *(["--dry"] if args.dry else [])]
        command += ["--rates"] if rates else []
        environment = os.environ | {CONNECTIONS: str(connections), "PYTHONPATH": python_path()}
        subprocess.run(command, cwd=ROOT, env=environment, check=True)
        measured: dict[str, Any] = json.loads(path.read_text())
    return {"connections": connections, **measured}


def show(report: dict[str, Any]) -> None:
    print(f"{report['connections']} hardware queues; host memory is {'' if report['mapped'] else 'not '}mapped")
    for name, times in report["times_us"].items():
        print(f"{name:<24}" + "".join(f"{how:>14} {time:9.1f} us" for how, time in times.items()), flush=True)
    for rates in report["rates_gb_s"]:
        told = (f"{name} {rate:.1f}" for name, rate in rates.items() if name != "threads")
        print(f"{rates['threads']:3} threads, GB/s: " + ", ".join(told), flush=True)


def run(args: argparse.Namespace) -> int:
    if args.here is not None:
        logging.basicConfig(level=logging.WARNING)
        args.here.write_text(json.dumps(measure(args)))
        return 0
    results = []
    for index, connections in enumerate(args.connections):
        results.append(in_process(args, connections, rates=index == 0))  # rates do not depend on the queues
        show(results[-1])
    write_json(args.output_json, args, machine_facts(device_name(args.device)), results=results)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m benchmarks.probe", description="Small copies, host tasks and rates beside loads.")
    add = parser.add_argument
    add("--connections", nargs="+", type=positive, default=[8, 32], help="hardware queues (default: 8 32)")
    add("--threads", nargs="+", type=positive, default=[4, 8, 12, 14], help="of CPU attention (default: 4 8 12 14)")
    add("--dry", action="store_true", help="tiny sizes")
    add("--rates", action="store_true", help=argparse.SUPPRESS)
    add("--here", type=Path, help=argparse.SUPPRESS)
    add_device_option(parser)
    add_json_option(parser)
    return parser.run(argv, run)


if __name__ == "__main__":
    sys.exit(main())
