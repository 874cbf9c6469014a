"""Transfer streams for groups of ring slots, or one for each direction: the same passes through the ring with both.

    python -m benchmarks.transfer_streams [--model llama-3.1-8b] [--blocks 8] [--output-json FILE]

A pass reads every host block of every layer, as a step does. Scenarios: loads alone; loads with every block stored
again; loads while the compute stream is busy. The two layouts take turns. GB are 1e9 bytes of all copies of a pass.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass

import torch

from benchmarks.engine import device_name
from benchmarks.options import Parser, add_device_option, add_json_option, add_model_options, positive
from benchmarks.other_load import OtherLoad
from benchmarks.peaks import copy_gb_s
from benchmarks.report import machine_facts, print_other_load, print_row, print_spread, write_json
from benchmarks.shapes import open_shape
from benchmarks.shared_streams import SharedStreams
from benchmarks.timing import Spread
from nanovllm.device import Device, create_device
from nanovllm.features.planner.measure import in_groups
from nanovllm.kvcache.offload_engine import BlockTokens, OffloadEngine
from nanovllm.memory.budget import DeviceSplit, split_device
from nanovllm.memory.layout import KVLayout

LAYOUTS = {"streams for groups of slots": False, "a stream for each direction": True}
MATRIX = {"cpu": 512, "cuda": 4096}


@dataclass(frozen=True, slots=True)
class Result:
    scenario: str
    streams: str
    gb_s: Spread


class Ring:
    """An engine's KV memory and its copies, without an engine."""

    def __init__(self, device: Device, layout: KVLayout, dtype: torch.dtype, blocks: int) -> None:
        self.device = device
        ring_slots = split_device(0, layout.num_layers, layout.block_layer_bytes).ring_slots
        split = DeviceSplit(ring_slots, resident_blocks=1)
        self.engine = OffloadEngine(device, layout, dtype, split, blocks)
        self.engine.host.zero_()
        size = MATRIX[device.name]
        with device.compute():
            self._matrix = torch.ones(size, size, dtype=dtype, device=device.torch_device)

    def run(self, stores: bool, computes: bool) -> float:
        """One pass; 1e9 bytes per second."""
        engine, layout = self.engine, self.engine.layout
        first = engine.split.resident_blocks
        loaded = [BlockTokens(block, layout.block_size, 0) for block in range(first, first + engine.num_host_blocks)]
        blocks = in_groups(loaded, engine.group_slots)
        runs = [(layer, uses) for layer in range(layout.num_layers) for uses in blocks]
        engine.synchronize()
        before, start = engine.transfers, time.perf_counter()
        with self.device.compute():
            engine.begin(runs)
            for index, (layer, uses) in enumerate(runs):
                engine.acquire(layer, uses[0].physical_id)
                for _ in uses if computes else ():
                    torch.mm(self._matrix, self._matrix)
                if stores:  # all tokens, though the blocks were loaded with all of theirs
                    written = [BlockTokens(use.physical_id, 0, layout.block_size) for use in uses]
                    engine.offload_slot_layer(index % (engine.split.ring_slots // engine.group_slots), layer, written)
                engine.release()
        engine.synchronize()
        moved = engine.transfers - before
        return (moved.h2d_bytes + moved.d2h_bytes) / (time.perf_counter() - start) / 1e9


SCENARIOS: dict[str, Callable[[Ring], float]] = {
    "loads": lambda ring: ring.run(stores=False, computes=False),
    "loads and stores": lambda ring: ring.run(stores=True, computes=False),
    "loads while computing": lambda ring: ring.run(stores=False, computes=True),
}


def measure(rings: dict[str, Ring], scenario: str, repeats: int) -> list[Result]:
    """Every layout in every round, after one round that does not count."""
    rates: dict[str, list[float]] = {streams: [] for streams in rings}
    for round_index in range(repeats + 1):
        for streams, ring in rings.items():
            rate = SCENARIOS[scenario](ring)
            if round_index:
                rates[streams].append(rate)
    spreads = {streams: Spread.of(values) for streams, values in rates.items()}
    return [Result(scenario, streams, spread) for streams, spread in spreads.items() if spread is not None]


def run(args: argparse.Namespace) -> int:
    device = device_name(args.device)
    with open_shape(args.model, args.num_layers, args.dtype) as shape, ExitStack() as stack:
        spec = shape.spec
        layout = KVLayout(spec.num_layers, spec.num_kv_heads, spec.head_dim, args.block_size, shape.dtype.itemsize)
        rings = {}
        for streams, shared in LAYOUTS.items():
            opened = stack.enter_context(closing(create_device(device)))
            rings[streams] = Ring(SharedStreams(opened) if shared else opened, layout, shape.dtype, args.blocks)
        print(f"{args.blocks} host blocks of {layout.num_layers} x {layout.block_layer_bytes:,} bytes")
        load = OtherLoad()
        results = []
        for scenario in SCENARIOS:
            print(scenario)
            for result in measure(rings, scenario, args.repeats):
                results.append(result)
                print_spread(result.streams, result.gb_s, "{:,.2f}", "GB/s")
        other_load = load.share()
        peaks = {kind: copy_gb_s(device, kind) for kind in ("h2d", "d2h")}
    for kind, peak in peaks.items():
        print_row(f"a lone large copy, {kind}", f"{peak:,.2f} GB/s")
    print_other_load(other_load)
    parts = {"results": results, "copy_peak_gb_s": peaks, "other_load": other_load}
    write_json(args.output_json, args, machine_facts(device), model=shape.facts(), **parts)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    prog = "python -m benchmarks.transfer_streams"
    parser = Parser(prog=prog, description="Transfer streams for groups of slots against one for each direction.")
    add_model_options(parser, num_layers=4)
    add = parser.add_argument
    add("--blocks", type=positive, default=8, help="blocks on the host (default: %(default)s)")
    add("--block-size", type=positive, default=1024, help="tokens in a block (default: %(default)s)")
    add("--repeats", type=positive, default=5, help="rounds that count (default: %(default)s)")
    add_device_option(parser)
    add_json_option(parser)
    return parser.run(argv, run)


if __name__ == "__main__":
    sys.exit(main())
