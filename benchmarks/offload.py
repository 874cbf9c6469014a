"""One prompt length of bench_offload.py: the same prompt in several engines in turns, with transfers and times."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.decode_by_share import ByShare, measure_by_share, show_by_share
from benchmarks.engine import Work, generate, timing_of
from benchmarks.other_load import OtherLoad
from benchmarks.peaks import copy_gb_s, matmul_gflop_s
from benchmarks.report import mib, print_other_load, print_rates, print_row, print_spread
from benchmarks.shapes import Shape
from benchmarks.timeline import Gaps, Overlap, Timeline, kernel_gaps, overlaps
from benchmarks.timing import Rates, RunTiming, Spread
from benchmarks.transfers import predict_request
from nanovllm import LLM
from nanovllm.engine.layerwise_scheduler import LayerwiseScheduler
from nanovllm.engine.step_hook import StepHook
from nanovllm.kvcache.base import KVStats
from nanovllm.memory.budget import TransferCount
from nanovllm.memory.layerwise import NO_LAYERWISE, LayerwiseMemory, prefill_steps
from nanovllm.memory.layout import KVLayout

TRANSFER_FIELDS = ("h2d_bytes", "h2d_copies", "d2h_bytes", "d2h_copies")
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)  # of host blocks, for the CPU
OFFLOAD = "offload"
CHUNK_MAJOR = "offload, chunk-major"
MODEL_DTYPE = "offload, KV in the model's dtype"
OTHERS = {
    "on-device": "on device",
    "resident": "resident",
    "chunk-major": CHUNK_MAJOR,
    "model-dtype": MODEL_DTYPE,
}  # as in the options


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The machine's peak rates, in 1e9 operations and bytes per second."""

    matmul_gflop_s: float
    copy_gb_s: dict[str, float]  # each way: one large copy on one thread or stream

    @classmethod
    def now(cls, shape: Shape, device: str) -> Ceilings:
        copies = {way: copy_gb_s(device, way) for way in ("h2d", "d2h")}
        return cls(matmul_gflop_s(shape.dtype, device), copies)


@dataclass
class Variant:
    """One engine with its order of prefill and the results of its counted runs."""

    llm: LLM
    layerwise_memory: LayerwiseMemory  # for layer-by-layer prefill
    kv_cache_dtype: str
    hooks: Sequence[StepHook]  # the engine's own
    runs: list[RunTiming] = field(default_factory=list)
    moved: list[TransferCount] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)

    def prepare(self) -> None:
        is_used = self.layerwise_memory != NO_LAYERWISE
        hooks = [hook for hook in self.hooks if is_used or not isinstance(hook, LayerwiseScheduler)]
        self.llm.engine.scheduler.hooks[:] = hooks

    def run(self, prompt: list[int], output_len: int, *, counts: bool) -> None:
        self.prepare()
        before = self.llm.kv_stats().transfers
        outputs = generate(self.llm, [prompt], output_len)
        if counts:
            self.runs.append(timing_of(outputs))
            self.moved.append(self.llm.kv_stats().transfers - before)
            self.tokens.append(outputs[0].outputs[0].token_ids)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Copies of one request, prefill and decode apart; rates in 1e9 bytes per second of that phase.

    The formula is for a CPU that attends to nothing. CPU attention must account for the difference, which counts as
    decode's.
    """

    counted: TransferCount
    prefill: TransferCount  # by the formula
    decode: TransferCount
    prefill_h2d_gb_s: float
    prefill_d2h_gb_s: float
    decode_h2d_gb_s: float | None
    decode_d2h_gb_s: float | None

    @property
    def predicted(self) -> TransferCount:
        return self.prefill + self.decode


@dataclass(frozen=True, slots=True)
class Ratios:
    """Speed with offload over the speed of another engine in the same round; above 1, offload is faster."""

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
    """Warm up, then run every variant in every round, in reverse order in every second round."""
    for round_index in range(args.warmup + args.repeats):
        order = list(variants.values())
        for variant in order if round_index % 2 == 0 else reversed(order):
            variant.run(prompt, args.output_len, counts=round_index >= args.warmup)


def traffic_of(offload: Variant, work: Work) -> Traffic:
    """The transfers of the last run, their prediction, and their rates."""
    stats = offload.llm.kv_stats()
    network = work.shape.network
    sizes = (network.num_layers, *network.kv_heads[0], stats.block_size, work.shape.dtype.itemsize)
    layout = KVLayout.of(offload.kv_cache_dtype, *sizes)
    resident = stats.resident_blocks
    chunk = work.max_num_batched_tokens
    memory = offload.layerwise_memory
    steps = prefill_steps(stats.block_size, resident, work.prompt_len, chunk, memory)

    def predict(output_len: int) -> TransferCount:
        return predict_request(layout, resident, work.prompt_len, output_len, chunk, prefill=steps)

    prefill = predict(1)
    decode = predict(work.output_len) - predict(1)
    counted = offload.moved[-1]
    decode_h2d = max(0, decode.h2d_bytes - counted.cpu_attention_bytes)
    prefill_s = offload.runs[-1].prefill_seconds
    decode_s = offload.runs[-1].decode_seconds
    return Traffic(
        counted=counted,
        prefill=prefill,
        decode=decode,
        prefill_h2d_gb_s=prefill.h2d_bytes / prefill_s / 1e9,
        prefill_d2h_gb_s=prefill.d2h_bytes / prefill_s / 1e9,
        decode_h2d_gb_s=decode_h2d / decode_s / 1e9 if work.output_len > 1 else None,
        decode_d2h_gb_s=decode.d2h_bytes / decode_s / 1e9 if work.output_len > 1 else None,
    )


@dataclass(frozen=True, slots=True)
class Result:
    """One prompt length. The keys of mappings are engines or phases."""

    prompt_len: int
    output_len: int
    rates: dict[str, Rates]
    ratios: dict[str, Ratios]  # of "offload" over each other engine
    kv: dict[str, KVStats]
    traffic: dict[str, Traffic]
    prefill_gflop_s: float  # of "offload"
    overlap: dict[str, Overlap]  # of an additional, traced run of "offload"
    kernel_gaps: dict[str, Gaps | None] | None  # of an additional run on a GPU
    outputs_equal: bool
    as_predicted: bool
    by_share: ByShare | None
    other_load: float


def measure(args: argparse.Namespace, shape: Shape, prompt_len: int, device: str, trace: Path) -> Result:
    """Run everything. The traced run writes its trace to `trace`."""
    work = Work.of(shape, args, prompt_len, args.output_len)
    (prompt,) = shape.prompts(1, prompt_len, args.seed)
    placement = work.offloaded(args.device_share) | {"cpu_attention": not args.no_cpu_attention}
    with ExitStack() as stack:
        variants = open_variants(stack, work, placement, args.against)
        load = OtherLoad()
        take_turns(variants, prompt, args)
        other_load = load.share()
        offload = variants[OFFLOAD]
        kv = {name: variant.llm.kv_stats() for name, variant in variants.items()}
        traffic = {name: traffic_of(v, work) for name, v in variants.items() if name.startswith(OFFLOAD)}
        offload.prepare()
        gaps = kernel_gaps(offload.llm, prompt, args.output_len) if device == "cuda" else None
    with work.open(**placement, trace=trace) as llm:
        generate(llm, [prompt], args.output_len)
    rates = {name: Rates.of(variant.runs) for name, variant in variants.items()}
    prefill = rates[OFFLOAD].prefill_tok_s
    assert prefill is not None, "every run has a prefill"
    return Result(
        prompt_len=prompt_len,
        output_len=args.output_len,
        rates=rates,
        ratios={name: Ratios.of(offload, other) for name, other in variants.items() if other is not offload},
        kv=kv,
        traffic=traffic,
        prefill_gflop_s=shape.prefill_operations(prompt_len) / prompt_len * prefill.median / 1e9,
        overlap=overlaps(Timeline.read(trace), args.output_len - 1),
        kernel_gaps=gaps,
        outputs_equal=all(
            tokens == offload.tokens[0]
            for v in variants.values()
            if v.kv_cache_dtype == offload.kv_cache_dtype
            for tokens in v.tokens
        ),
        as_predicted=all(
            moved.without_cpu_attention == traffic[name].predicted for name in traffic for moved in variants[name].moved
        ),
        by_share=decode_by_share(args, work),
        other_load=other_load,
    )


def open_variants(
    stack: ExitStack, work: Work, placement: Mapping[str, Any], against: Collection[str]
) -> dict[str, Variant]:
    """Engines with the same weights, open until `stack` closes; `placement` is the offloaded one's."""
    names = {OTHERS[name] for name in against}
    placements = {
        "on device": work.on_device(),
        "resident": work.resident(),
        OFFLOAD: placement,
        MODEL_DTYPE: {**placement, "kv_cache_dtype": "auto"},
    }
    if work.kv_cache_dtype == "auto":
        names -= {MODEL_DTYPE}  # is the same engine
    variants = {}
    for name, arguments in placements.items():
        if name in {*names, OFFLOAD}:
            llm = stack.enter_context(work.open(**arguments))
            kv_cache_dtype = arguments.get("kv_cache_dtype", work.kv_cache_dtype)
            memory = llm.kv_stats().layerwise_memory
            variants[name] = Variant(llm, memory, kv_cache_dtype, list(llm.engine.scheduler.hooks))
    if CHUNK_MAJOR in names:
        variants[CHUNK_MAJOR] = replace(variants[OFFLOAD], layerwise_memory=NO_LAYERWISE, runs=[], moved=[], tokens=[])
    return variants


def decode_by_share(args: argparse.Namespace, work: Work) -> ByShare | None:
    if not args.decode_steps or args.no_cpu_attention:
        return None
    return measure_by_share(work, args.device_share, SHARES, args.decode_steps, args.repeats)


# ---- text


def show(result: Result, ceilings: Ceilings) -> None:
    """Print one prompt length: engines, ratios, traffic, overlap, and decode by share."""
    for name, stats in result.kv.items():
        show_engine(name, stats, result.rates[name])
    for other, ratio in result.ratios.items():
        print_spread(f"offload / {other}: prefill", ratio.prefill, "{:.3f}")
        print_spread(f"offload / {other}: decode", ratio.decode, "{:.3f}")
    print()
    for name, moved in result.traffic.items():
        show_traffic(name, moved, ceilings)
    share = result.prefill_gflop_s / ceilings.matmul_gflop_s
    print_row("prefill computes", f"{result.prefill_gflop_s:,.0f} GFLOP/s", f"{share:.0%} of torch.mm")
    for phase, overlap in result.overlap.items():
        show_overlap(phase, overlap, (result.kernel_gaps or {}).get(phase))
    print_row("outputs", "equal" if result.outputs_equal else "DIFFERENT", f"{result.output_len} tokens of every run")
    print_other_load(result.other_load)
    if result.by_share is not None:
        show_by_share(result.by_share)
    print()


def show_engine(name: str, stats: KVStats, rates: Rates) -> None:
    """Print one engine's memory and speeds."""
    print(f"{name}")
    print_row("KV blocks on the device", f"{stats.num_gpu_blocks:,}", f"{mib(stats.device_bytes)}, ring included")
    print_row("KV blocks on the host", f"{stats.num_cpu_blocks:,}", mib(stats.host_bytes))
    print_row("host blocks for swapping", f"{stats.num_swap_blocks:,}", mib(stats.swap_bytes))
    print_row("layer buffer", f"{stats.layerwise_memory.buffer_blocks:,}", mib(stats.layer_buffer_bytes))
    print_rates(rates)
    print()


def show_traffic(name: str, traffic: Traffic, ceilings: Ceilings) -> None:
    """Print counts with the formula's, and rates with the copy peak."""
    print(name)
    for name in TRANSFER_FIELDS:
        count = getattr(traffic.counted, name)
        formula = getattr(traffic.predicted, name)
        spared = getattr(traffic.counted.without_cpu_attention, name) - count
        show = mib if name.endswith("bytes") else "{:,}".format
        left = f", {show(spared)} of it left to the CPU" if spared else ""
        differs = "" if count + spared == formula else f"  DIFFERS by {count + spared - formula:,}"
        way, what = name.split("_")
        print_row(f"{what} {way}", show(count), f"predicted {show(formula)}{left}{differs}")
    for phase in ("prefill", "decode"):
        for way, peak in ceilings.copy_gb_s.items():
            rate = getattr(traffic, f"{phase}_{way}_gb_s")
            if rate is not None:
                print_row(f"{phase} {way}", f"{rate:,.2f} GB/s", f"{rate / peak:.1%} of a lone large copy")


def show_overlap(phase: str, overlap: Overlap, gaps: Gaps | None) -> None:
    """Print how much of a phase's copies was hidden, and how much of its time was lost."""
    hidden = overlap.hidden_share
    copies = f"of {overlap.copies_s:,.3f} s in which copies ran"
    if overlap.copies_s:
        copies += f", at {overlap.copied_bytes / overlap.copies_s / 1e9:,.2f} GB/s"
    print_row(f"{phase}: copies overlapped", "-" if hidden is None else f"{hidden:.1%}", copies)
    waits = f"{overlap.waits_s / overlap.steps_s:.1%} of the steps' {overlap.steps_s:,.3f} s"
    print_row(f"{phase}: computation waits", f"{overlap.waits_s * 1e3:,.1f} ms", waits)
    if gaps is not None:
        idle = f"{gaps.idle_s / gaps.span_s:.1%} of {gaps.span_s:,.3f} s, {gaps.kernels:,} kernels"
        print_row(f"{phase}: between kernels", f"{gaps.idle_s * 1e3:,.1f} ms", idle)
