"""What offload costs: the same prompt with its KV cache on the device and with most of it on the host, in one process.

    python bench_offload.py [--prompt-len 8192] [--device-share 1/8] [--output-json FILE]

Engines with the same weights take turns, in one order in odd rounds and in the other in even ones, so that
whatever else the machine does weighs on all alike:

    on device  no offload
    resident   offload, with room for every block on the device: its code path with nothing to copy
    offload    --device-share of the blocks on the device, the others on the host

The last runs twice: prefilled the way that the planner chooses, and chunk by chunk. Then decode by the share of host
blocks that the CPU attends to (`benchmarks/decode_by_share.py`), unless --decode-steps is 0. Ratios compare runs of the
same round. Exit status 1 if the outputs differ, or if the bytes and copies counted are not those that the formula
predicts. Defaults take about three minutes on two cores.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

from benchmarks.decode_by_share import ByShare, measure_by_share, show_by_share
from benchmarks.engine import Work, attention_backend, device_name, generate, timing_of
from benchmarks.options import (
    Parser,
    add_device_option,
    add_engine_options,
    add_model_options,
    add_run_options,
    add_trace_option,
    exit_status,
    not_negative,
    positive,
    share,
)
from benchmarks.other_load import OtherLoad
from benchmarks.peaks import copy_gb_s
from benchmarks.report import (
    machine_facts,
    mib,
    peak_device_bytes,
    peak_rss_bytes,
    print_facts,
    print_other_load,
    print_rates,
    print_row,
    print_spread,
    write_json,
)
from benchmarks.shapes import open_shape
from benchmarks.timing import Rates, RunTiming, Spread
from nanovllm import LLM
from nanovllm.kvcache.budget import TransferCount, predict_request
from nanovllm.kvcache.layout import KVLayout
from nanovllm.kvcache.prefill_plan import NO_SPANS, SpanMemory
from nanovllm.kvcache.room import KVStats

TRANSFER_FIELDS = ("h2d_bytes", "h2d_copies", "d2h_bytes", "d2h_copies")
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)  # of host blocks, for the CPU


@dataclass
class Variant:
    """One engine, the way it prefills, and what its counted runs gave."""

    llm: LLM
    spans: SpanMemory  # what prompts may go layer by layer
    runs: list[RunTiming] = field(default_factory=list)
    moved: list[TransferCount] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)

    def run(self, prompt: list[int], output_len: int, *, counts: bool) -> None:
        scheduler = self.llm.engine.scheduler
        scheduler.limits = replace(scheduler.limits, spans=self.spans)
        before = self.llm.kv_stats().transfers
        outputs = generate(self.llm, [prompt], output_len)
        if counts:
            self.runs.append(timing_of(outputs))
            self.moved.append(self.llm.kv_stats().transfers - before)
            self.tokens.append(outputs[0].outputs[0].token_ids)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Copies of one request, prefill and decode apart; rates in 1e9 bytes per second of that phase.

    The formula says what is copied when the CPU attends to nothing: what it attends to must make up the difference, and
    is taken to be decode's.
    """

    counted: TransferCount
    prefill: TransferCount  # by the formula
    decode: TransferCount
    prefill_h2d_gb_s: float
    prefill_d2h_gb_s: float
    decode_h2d_gb_s: float | None
    decode_d2h_gb_s: float | None
    copy_peak_gb_s: dict[str, float]  # each way: one large copy on one thread or stream, with nothing else running

    @property
    def predicted(self) -> TransferCount:
        return self.prefill + self.decode


@dataclass(frozen=True, slots=True)
class Ratios:
    """Speed under offload over the speed of another engine in the same round; above 1 offload is faster."""

    prefill: Spread | None
    decode: Spread | None

    @classmethod
    def of(cls, offload: Variant, other: Variant) -> Ratios:
        pairs = list(zip(offload.runs, other.runs, strict=True))
        decodes = [(a.decode_rate, b.decode_rate) for a, b in pairs]
        return cls(
            prefill=Spread.of(a.prefill_rate / b.prefill_rate for a, b in pairs),
            decode=Spread.of(a / b for a, b in decodes if a is not None and b is not None),
        )


def take_turns(variants: dict[str, Variant], prompt: list[int], args: argparse.Namespace) -> None:
    """Warm up, then run every variant in every round, each second round backwards."""
    for round_index in range(args.warmup + args.repeats):
        order = list(variants.values())
        for variant in order if round_index % 2 == 0 else reversed(order):
            variant.run(prompt, args.output_len, counts=round_index >= args.warmup)


def traffic_of(offload: Variant, work: Work, copy_peak: dict[str, float]) -> Traffic:
    """What the last run moved beside the formula, and how fast."""
    stats, spec = offload.llm.kv_stats(), work.shape.spec
    layout = KVLayout(spec.num_layers, spec.num_kv_heads, spec.head_dim, stats.block_size, work.shape.dtype.itemsize)

    def predict(output_len: int) -> TransferCount:
        chunk, spans = work.max_num_batched_tokens, offload.spans
        return predict_request(layout, stats.resident_blocks, work.prompt_len, output_len, chunk, spans=spans)

    prefill, decode = predict(1), predict(work.output_len) - predict(1)
    counted = offload.moved[-1]
    decode_h2d = max(0, decode.h2d_bytes - counted.arm_bytes)
    prefill_s, decode_s = offload.runs[-1].prefill_seconds, offload.runs[-1].decode_seconds
    return Traffic(
        counted=counted,
        prefill=prefill,
        decode=decode,
        prefill_h2d_gb_s=prefill.h2d_bytes / prefill_s / 1e9,
        prefill_d2h_gb_s=prefill.d2h_bytes / prefill_s / 1e9,
        decode_h2d_gb_s=decode_h2d / decode_s / 1e9 if work.output_len > 1 else None,
        decode_d2h_gb_s=decode.d2h_bytes / decode_s / 1e9 if work.output_len > 1 else None,
        copy_peak_gb_s=copy_peak,
    )


def show_variant(name: str, stats: KVStats, rates: Rates) -> None:
    """Print one engine's memory and speeds."""
    print(f"{name}")
    print_row("KV blocks on the device", f"{stats.num_gpu_blocks:,}", f"{mib(stats.device_bytes)}, ring included")
    print_row("KV blocks on the host", f"{stats.num_cpu_blocks:,}", mib(stats.host_bytes))
    print_row("layer buffer", f"{stats.spans.buffer_blocks:,}", mib(stats.layer_buffer_bytes))
    print_rates(rates)
    print()


def show_ratios(ratios: dict[str, Ratios]) -> None:
    for other, ratio in ratios.items():
        print_spread(f"offload / {other}: prefill", ratio.prefill, "{:.3f}")
        print_spread(f"offload / {other}: decode", ratio.decode, "{:.3f}")
    print()


def show_traffic(name: str, traffic: Traffic) -> None:
    """Print counts beside the formula's, and rates beside the copy peak."""
    print(name)
    for name in TRANSFER_FIELDS:
        count, formula = getattr(traffic.counted, name), getattr(traffic.predicted, name)
        spared = getattr(traffic.counted.without_arm, name) - count
        show = mib if name.endswith("bytes") else "{:,}".format
        left = f", {show(spared)} of it left to the CPU" if spared else ""
        differs = "" if count + spared == formula else f"  DIFFERS by {count + spared - formula:,}"
        way, what = name.split("_")
        print_row(f"{what} {way}", show(count), f"predicted {show(formula)}{left}{differs}")
    for phase in ("prefill", "decode"):
        for way in ("h2d", "d2h"):
            rate = getattr(traffic, f"{phase}_{way}_gb_s")
            if rate is not None:
                note = f"{rate / traffic.copy_peak_gb_s[way]:.1%} of a lone large copy"
                print_row(f"{phase} {way}", f"{rate:,.2f} GB/s", note)
    for way, peak in traffic.copy_peak_gb_s.items():
        print_row(f"a lone large copy, {way}", f"{peak:,.2f} GB/s")


def measure(args: argparse.Namespace, work: Work, facts: dict[str, Any]) -> bool:
    """Run and show everything; returns whether outputs and transfers are as they must be."""
    placements = {
        "on device": work.on_device(),
        "resident": work.resident(),
        "offload": work.offloaded(args.device_share)
        | {"cpu_attention": not args.no_cpu_attention, "trace": args.trace},
    }
    (prompt,) = work.shape.prompts(1, args.prompt_len, args.seed)
    with ExitStack() as stack:
        opened = {name: stack.enter_context(work.open(**placement)) for name, placement in placements.items()}
        variants = {name: Variant(llm, llm.kv_stats().spans) for name, llm in opened.items()}
        variants["offload, chunk-major"] = Variant(opened["offload"], NO_SPANS)
        load = OtherLoad()
        take_turns(variants, prompt, args)
        other_load = load.share()
        stats = {name: variant.llm.kv_stats() for name, variant in variants.items()}
        offload = variants["offload"]
        copy_peak = {way: copy_gb_s(facts["device"], way) for way in ("h2d", "d2h")}
        traffic = {name: traffic_of(v, work, copy_peak) for name, v in variants.items() if name.startswith("offload")}
        device_peak = peak_device_bytes(facts["device"])
    rates = {name: Rates.of(variant.runs) for name, variant in variants.items()}
    ratios = {name: Ratios.of(offload, variant) for name, variant in variants.items() if variant is not offload}
    outputs_equal = all(tokens == offload.tokens[0] for v in variants.values() for tokens in v.tokens)
    for name in variants:
        show_variant(name, stats[name], rates[name])
    show_ratios(ratios)
    for name, moved in traffic.items():
        show_traffic(name, moved)
    print_row("outputs", "equal" if outputs_equal else "DIFFERENT", f"{args.output_len} tokens of every run")
    if device_peak is not None:
        print_row("peak device memory", mib(device_peak), "of all engines together")
    print_row("peak process memory", mib(peak_rss_bytes()), "of all engines together")
    print_other_load(other_load)
    by_share = decode_by_share(args, work)
    parts = {"ratios": ratios, "rates": rates, "kv": stats, "traffic": traffic, "outputs_equal": outputs_equal}
    memory_and_load = {
        "peak_rss_bytes": peak_rss_bytes(),
        "peak_device_bytes": device_peak,
        "other_load": other_load,
    }
    write_json(args.output_json, args, facts, model=work.shape.facts(), by_share=by_share, **memory_and_load, **parts)
    as_predicted = all(
        moved.without_arm == found.predicted for name, found in traffic.items() for moved in variants[name].moved
    )
    as_promised = outputs_equal or (facts["device"] != "cpu" and not args.no_cpu_attention)
    return as_promised and as_predicted and is_right(by_share, facts["device"])


def decode_by_share(args: argparse.Namespace, work: Work) -> ByShare | None:
    if not args.decode_steps:
        return None
    found = measure_by_share(work, args.device_share, SHARES, args.decode_steps, args.repeats)
    show_by_share(found)
    return found


def is_right(by_share: ByShare | None, device: str) -> bool:
    """Whether everything is as predicted.

    Beside a GPU the CPU's partial state is merged last, so that tokens may part where two are nearly as likely.
    """
    return by_share is None or (by_share.as_predicted and (by_share.outputs_equal or device != "cpu"))


def run(args: argparse.Namespace) -> int:
    with open_shape(args.model, args.num_layers, args.dtype) as shape:
        work = Work(
            shape=shape,
            prompt_len=args.prompt_len,
            output_len=args.output_len,
            num_prompts=1,
            block_size=args.block_size,
            max_num_batched_tokens=args.max_num_batched_tokens,
            device=args.device,
            seed=args.seed,
        )
        device = device_name(args.device)
        facts = machine_facts(device) | {"attention": attention_backend(shape, device)}
        print_facts(facts, shape.facts())
        print(f"{args.prompt_len:,} tokens in, {args.output_len:,} out, {args.repeats} rounds\n", flush=True)
        return 0 if measure(args, work, facts) else 1


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="bench_offload.py", description="What offload costs, against the KV cache on the device.")
    add_model_options(parser, num_layers=4)
    add = parser.add_argument
    add("--prompt-len", type=positive, default=8192, help="tokens (default: %(default)s)")
    add("--no-cpu-attention", action="store_true", help="all host blocks of a decode step go over the link")
    add("--device-share", type=share, default=Fraction(1, 8), help="KV blocks on the device (default: %(default)s)")
    add_run_options(parser, output_len=17, repeats=3)
    add("--decode-steps", type=not_negative, default=8, help="tokens of a share and round (default: %(default)s)")
    add_engine_options(parser, block_size=256, max_batched=4096)
    add_device_option(parser)
    add_trace_option(parser, "all runs of the third engine")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    return exit_status("bench_offload.py", lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
