"""The work of bench.py and bench_vllm.py for either engine: prompts of several lengths, all KV on the device."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.options import add_engine_options, add_model_options, add_run_options, add_weights_option, positive
from benchmarks.other_load import OtherLoad
from benchmarks.peaks import matmul_gflop_s, read_gb_s
from benchmarks.report import (
    mib,
    peak_device_bytes,
    peak_rss_bytes,
    print_facts,
    print_other_load,
    print_rates,
    print_row,
    write_json,
)
from benchmarks.shapes import Shape
from benchmarks.timing import DecodeKernels, Rates, RunTiming, repeat

SHOWN_KERNELS = 16


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine, loaded. `run` takes prompts as token ids and generates --output-len tokens for each."""

    run: Callable[[list[list[int]]], RunTiming]
    kv_device_bytes: int | None  # allocated, if the engine reports it
    kv_host_bytes: int | None  # the same; on a GPU all of it is pinned
    kernels: Callable[[list[list[int]]], DecodeKernels] | None = None  # of some decode steps, if they are asked for


@dataclass(frozen=True, slots=True)
class Peaks:
    """The machine's best, in 1e9 operations and 1e9 bytes per second."""

    matmul_gflop_s: float
    read_gb_s: float

    @classmethod
    def now(cls, shape: Shape, device: str) -> Peaks:
        return cls(matmul_gflop_s(shape.dtype, device), read_gb_s(device))

    def better_of(self, other: Peaks) -> Peaks:
        return Peaks(max(self.matmul_gflop_s, other.matmul_gflop_s), max(self.read_gb_s, other.read_gb_s))


@dataclass(frozen=True, slots=True)
class Result:
    """One prompt length. The bytes that decode reads are only known for one prompt at a time."""

    prompt_len: int
    output_len: int
    num_prompts: int
    rates: Rates
    kv_bytes: int  # of all sequences
    prefill_gflop_s: float
    decode_gb_s: float | None
    kernels: DecodeKernels | None  # of decode steps


def measure(args: argparse.Namespace, shape: Shape, engine: Engine, prompt_len: int) -> Result:
    """Run one prompt length."""
    prompts = shape.prompts(args.num_prompts, prompt_len, args.seed)
    rates = Rates.of(repeat(lambda: engine.run(prompts), args.warmup, args.repeats))
    assert rates.prefill_tok_s is not None, "every run has a prefill"
    decode_gb_s = None
    if args.num_prompts == 1 and rates.tpot_s is not None:
        decode_gb_s = shape.decode_bytes(prompt_len + args.output_len // 2) / rates.tpot_s.median / 1e9
    return Result(
        prompt_len=prompt_len,
        output_len=args.output_len,
        num_prompts=args.num_prompts,
        rates=rates,
        kv_bytes=args.num_prompts * (prompt_len + args.output_len - 1) * shape.kv_token_bytes,
        prefill_gflop_s=shape.prefill_operations(prompt_len) / prompt_len * rates.prefill_tok_s.median / 1e9,
        decode_gb_s=decode_gb_s,
        kernels=engine.kernels(prompts) if engine.kernels is not None else None,
    )


def show(result: Result, peaks: Peaks) -> None:
    """Print one prompt length, with shares of the peaks."""

    def share(value: float, peak: str, what: str) -> str:
        return f"{value / getattr(peaks, peak):.0%} of {what}"

    print(f"{result.num_prompts} x {result.prompt_len:,} tokens in, {result.output_len:,} out")
    print_rates(result.rates)
    rate = result.prefill_gflop_s
    print_row("prefill computes", f"{rate:,.0f} GFLOP/s", share(rate, "matmul_gflop_s", "torch.mm"))
    if result.decode_gb_s is not None:
        rate = result.decode_gb_s
        print_row("decode reads", f"{rate:,.1f} GB/s", share(rate, "read_gb_s", "torch.sum"))
    print_row("KV cache", mib(result.kv_bytes))
    if result.kernels is not None:
        show_kernels(result.kernels)
    print()


def show_kernels(decode: DecodeKernels) -> None:
    """Print what ran in a decode step, the longest first."""
    total = sum(kernel.seconds for kernel in decode.kernels)
    calls = sum(kernel.calls for kernel in decode.kernels)
    of_step = f"of {decode.step_s * 1e3:,.3f} ms a step with the profiler"
    print_row(f"{calls:,.0f} kernels a decode step", f"{total * 1e3:,.3f} ms", of_step)
    for kernel in decode.kernels[:SHOWN_KERNELS]:
        print_row(kernel.name[:29], f"{kernel.seconds * 1e6:,.1f} us", f"{kernel.calls:g} calls")


def report(args: argparse.Namespace, shape: Shape, facts: Mapping[str, Any], open_engine: Callable[[], Engine]) -> None:
    """Measure every prompt length, print, and write JSON.

    On the CPU, the peaks are measured before and after, and the better one counts. On a GPU they are measured after,
    when its memory is free again.
    """
    print_facts(facts, shape.facts())
    device = facts["device"]
    before = Peaks.now(shape, device) if device == "cpu" else None
    engine = open_engine()
    load = OtherLoad()
    results = [measure(args, shape, engine, prompt_len) for prompt_len in args.prompt_len]
    other_load = load.share()
    peak_rss = peak_rss_bytes()
    device_peak = peak_device_bytes(device)
    after = Peaks.now(shape, device)
    peaks = after if before is None else after.better_of(before)
    for result in results:
        show(result, peaks)
    print_row("torch.mm", f"{peaks.matmul_gflop_s:,.0f} GFLOP/s")
    print_row("torch.sum", f"{peaks.read_gb_s:,.1f} GB/s")
    if engine.kv_device_bytes is not None:
        print_row("KV memory on the device", mib(engine.kv_device_bytes))
    if engine.kv_host_bytes is not None:
        pinned = "pinned, for swapping" if device == "cuda" else "for swapping"
        print_row("KV memory on the host", mib(engine.kv_host_bytes), pinned)
    weights = f"{mib(shape.weight_bytes)} of it weights"
    if device_peak is not None:
        print_row("peak device memory", mib(device_peak), weights)
    print_row("peak process memory", mib(peak_rss), weights if device_peak is None else "")
    print_other_load(other_load)
    kv_memory = {"kv_device_bytes": engine.kv_device_bytes, "kv_host_bytes": engine.kv_host_bytes}
    memory = {"peak_rss_bytes": peak_rss, "peak_device_bytes": device_peak, **kv_memory}
    parts = {"peaks": peaks, "results": results, "other_load": other_load}
    write_json(args.output_json, args, facts, model=shape.facts(), **memory, **parts)


def add_options(parser: argparse.ArgumentParser, *, block_size: int | None) -> None:
    """Options of the work. `block_size` is the engine's default, or None if the engine chooses."""
    add_model_options(parser, num_layers=None)
    add_weights_option(parser)
    add = parser.add_argument
    add("--prompt-len", type=positive, nargs="+", default=[512, 2048], help="tokens; several are run in turn")
    add("--num-prompts", type=positive, default=1, help="requests at once (default: %(default)s)")
    add_run_options(parser, output_len=32, repeats=3)
    add_engine_options(parser, block_size=block_size, max_batched=16384)


def longest(prompt_lens: Sequence[int], output_len: int) -> int:
    """Tokens of the longest sequence."""
    return max(prompt_lens) + output_len
