"""What weights cost that stream from host memory, against the same weights on the device.

    python -m benchmarks.streamed_weights [--model qwen3-0.6b] [--weights 25%] [--prompt-len 4096] [--output-json FILE]
                                          [--host-weights 50% --weights-dir DIR]

Two engines with the same weights and the same KV memory take turns in one process, in reverse order in every second
round: one with all weights on the device, and one with --weights of them, the others in host memory. Ratios compare
runs of the same round. Decode is also compared with the least time in which link and host together read what a token
copied and multiplied with: at the rates of a lone large copy, and of a sum over host memory if the host multiplies.
With --host-weights, what is more than that is read from disk, whose rate is that of a lone large read.
Exit status 1 if tokens differ on the CPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from benchmarks.engine import Work, engine_facts
from benchmarks.offload import Ratios, Variant, take_turns
from benchmarks.options import (
    Parser,
    add_device_option,
    add_engine_options,
    add_model_options,
    add_run_options,
    add_weights_option,
    positive,
    share,
)
from benchmarks.other_load import OtherLoad
from benchmarks.peaks import copy_gb_s, file_gb_s, read_gb_s
from benchmarks.report import mib, print_facts, print_other_load, print_rates, print_row, print_spread, write_json
from benchmarks.shapes import Shape, open_shape
from benchmarks.timing import Rates
from nanovllm import LLM
from nanovllm.data.network import ExpertSpec
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.features.streamed_weights.stream import WeightStream
from nanovllm.memory.weights import WeightPlan

RESIDENT = "resident"
STREAMED = "streamed"


@dataclass(frozen=True, slots=True)
class Result:
    """One prompt length. `ratios` are those of streamed over resident; bytes are those of weights that were copied."""

    prompt_len: int
    output_len: int
    rates: dict[str, Rates]
    ratios: Ratios
    streamed_layers: int
    device_bytes: int  # of weights and their slots
    prefill_bytes: int
    decode_bytes: int  # of a token
    decode_host_bytes: int  # of a token, with which the host multiplies
    decode_formula_bytes: int  # of a token, copied or multiplied with
    decode_share: float | None  # the least time in which link and host read these bytes, of the time that a token took
    disk_bytes: int  # of weights in the file
    prefill_read_bytes: int  # from there
    decode_read_bytes: int  # of a token
    decode_read_formula_bytes: int
    decode_disk_share: float | None  # the least time in which a token's bytes are read, of the time that it took
    outputs_equal: bool
    other_load: float


def stream_of(llm: LLM) -> WeightStream:
    """Of the engine whose weights stream."""
    assert isinstance(llm._runner, ModelRunner)
    stream = llm._runner.model.layer_weights
    assert isinstance(stream, WeightStream), "all weights fit the device: give --weights less"
    return stream


class LoneRates(NamedTuple):
    """Rates of large copies and reads with nothing beside them, in GB/s."""

    link: float
    host: float
    disk: float | None

    def of(self, plan: WeightPlan) -> float:
        """At which a token's weights are read that are not on the device."""
        if plan.in_place:
            return self.host
        return self.link + self.host if plan.host_products else self.link


def needed_bytes(plan: WeightPlan, experts: ExpertSpec | None) -> int:
    """What a token needs of the weights that are not on the device: it is copied, or the host multiplies with it."""
    loaded = plan.loaded_bytes(1, experts)
    multiplied = plan.multiplied_bytes(1, experts)
    return max(loaded, multiplied) if experts is None else loaded + multiplied


def measure(args: argparse.Namespace, shape: Shape, prompt_len: int, rates_gb_s: LoneRates) -> Result:
    work = Work.of(shape, args, prompt_len, args.output_len)
    (prompt,) = shape.prompts(1, prompt_len, args.seed)
    placement = work.resident() if args.device_share == 1 else work.offloaded(args.device_share)
    with ExitStack() as stack:
        variants = {}
        host = {"host_weights_bytes": args.host_weights, "weights_dir": args.weights_dir}
        for name, memory in (
            (RESIDENT, {"weights_memory_bytes": "100%"}),
            (STREAMED, {"weights_memory_bytes": args.weights, **host}),
        ):
            llm = stack.enter_context(work.open(**placement, **memory))
            layerwise = llm.kv_stats().layerwise_memory
            variants[name] = Variant(llm, layerwise, work.kv_cache_dtype, list(llm.engine.scheduler.hooks))
        load = OtherLoad()
        take_turns(variants, prompt, args)
        other_load = load.share()
        streamed = variants[STREAMED]
        stream = stream_of(streamed.llm)
        moved = []
        for output_len in (1, args.output_len):
            before = stream.loaded_bytes, stream.host_bytes, stream.read_bytes
            streamed.run(prompt, output_len, counts=False)
            after = stream.loaded_bytes, stream.host_bytes, stream.read_bytes
            moved.append([count - earlier for count, earlier in zip(after, before, strict=True)])
        plan = streamed.llm._runner.sizing.weights
        assert plan is not None
    prefill, _, prefill_read = moved[0]
    num_tokens = max(1, args.output_len - 1)
    loaded, multiplied, read = ((both - first) // num_tokens for first, both in zip(*moved, strict=True))
    rates = {name: Rates.of(variant.runs) for name, variant in variants.items()}
    tpot = rates[STREAMED].tpot_s
    seconds = None if tpot is None else tpot.median
    return Result(
        prompt_len=prompt_len,
        output_len=args.output_len,
        rates=rates,
        ratios=Ratios.of(streamed, variants[RESIDENT]),
        streamed_layers=len(plan.streamed),
        device_bytes=plan.device_bytes,
        prefill_bytes=prefill,
        decode_bytes=loaded,
        decode_host_bytes=multiplied,
        decode_formula_bytes=needed_bytes(plan, shape.network.experts),
        decode_share=_share(loaded + multiplied, rates_gb_s.of(plan), seconds),
        disk_bytes=plan.disk_bytes,
        prefill_read_bytes=prefill_read,
        decode_read_bytes=read,
        decode_read_formula_bytes=plan.read_bytes(1, shape.network.experts),
        decode_disk_share=_share(read, rates_gb_s.disk, seconds),
        outputs_equal=all(tokens == streamed.tokens[0] for v in variants.values() for tokens in v.tokens),
        other_load=other_load,
    )


def _share(num_bytes: int, gb_s: float | None, seconds: float | None) -> float | None:
    return None if gb_s is None or seconds is None else num_bytes / (gb_s * 1e9) / seconds


def show(result: Result, rates_gb_s: LoneRates) -> None:
    for name, rates in result.rates.items():
        print(name)
        print_rates(rates)
        print()
    print_row("layers that stream", f"{result.streamed_layers}", f"{mib(result.device_bytes)} on the device")
    print_spread("streamed / resident: prefill", result.ratios.prefill, "{:.3f}")
    print_spread("streamed / resident: decode", result.ratios.decode, "{:.3f}")
    print_row("copied for the prompt", mib(result.prefill_bytes))
    print_row("copied for a token", mib(result.decode_bytes))
    formula = f"by the formula {mib(result.decode_formula_bytes)} copied or multiplied with"
    print_row("multiplied with on the host", mib(result.decode_host_bytes), formula)
    if result.decode_share is not None:
        lone = f"of what link ({rates_gb_s.link:,.1f} GB/s) and host ({rates_gb_s.host:,.1f} GB/s) allow"
        print_row("decode", f"{result.decode_share:.1%}", lone)
    if result.disk_bytes:
        print_row("on disk", mib(result.disk_bytes), f"{mib(result.prefill_read_bytes)} of it read for the prompt")
        formula = f"by the formula {mib(result.decode_read_formula_bytes)}"
        print_row("read for a token", mib(result.decode_read_bytes), formula)
    if result.disk_bytes and result.decode_disk_share is not None:
        lone = f"of a lone large read's {rates_gb_s.disk:,.2f} GB/s"
        print_row("decode", f"{result.decode_disk_share:.1%}", lone)
    print_row("outputs", "equal" if result.outputs_equal else "DIFFERENT", f"{result.output_len} tokens of every run")
    print_other_load(result.other_load)
    print()


def run(args: argparse.Namespace) -> int:
    with open_shape(args.model, args.num_layers, args.dtype, args.load_format, args.stored) as shape:
        facts = engine_facts(shape, args.device)
        device = facts["device"]
        print_facts(facts, shape.facts())
        disk_gb_s = None if args.weights_dir is None else file_gb_s(args.weights_dir)
        rates_gb_s = LoneRates(copy_gb_s(device, "h2d"), read_gb_s(), disk_gb_s)
        results: list[Result] = []
        for prompt_len in sorted(set(args.prompt_len)):
            print(f"{prompt_len:,} tokens in, {args.output_len:,} out, {args.repeats} rounds\n", flush=True)
            results.append(measure(args, shape, prompt_len, rates_gb_s))
            show(results[-1], rates_gb_s)
            write_json(
                args.output_json,
                args,
                facts,
                model=shape.facts(),
                link_gb_s=rates_gb_s.link,
                host_gb_s=rates_gb_s.host,
                disk_gb_s=rates_gb_s.disk,
                results=results,
            )
    return 0 if device != "cpu" or all(result.outputs_equal for result in results) else 1


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m benchmarks.streamed_weights", description="What weights cost that stream.")
    add_model_options(parser, num_layers=None)
    add_weights_option(parser)
    add = parser.add_argument
    add("--prompt-len", type=positive, nargs="+", default=[4096], help="tokens; several are run in turn")
    add("--weights", default="25%", help="weights_memory_bytes of the engine that streams (default: %(default)s)")
    add("--host-weights", help="host_weights_bytes of the engine that streams (default: all that streams)")
    add("--weights-dir", help="weights_dir of the engine that streams: what the host may not have is read from there")
    told = "KV blocks on the device, in both engines (default: all)"
    add("--device-share", type=share, default=Fraction(1), help=told)
    add_run_options(parser, output_len=17, repeats=2)
    add_engine_options(parser, block_size=256, max_batched=4096)
    add_device_option(parser)
    return parser.run(argv, run)


if __name__ == "__main__":
    sys.exit(main())
