"""The cost of offload: the same prompt with its KV cache on the device and with most of it on the host.

    python bench_offload.py [--prompt-len 4096 8192] [--device-share 1/8] [--output-json FILE]

Engines with the same weights take turns in one process. The order is reversed in every second round, so that other load
on the machine affects all of them alike:

    on device  no offload
    resident   offload with every block on the device: the code path of offload with nothing to copy
    offload    --device-share of the blocks on the device, the others on the host

With --kv-cache-dtype, offload also takes turns with itself with K and V in the model's dtype.

The last one runs twice: prefilled in the order that the planner chooses, and chunk by chunk. Ratios compare runs of the
same round. A traced run then measures how much of the copies computation hid and what computation waited for. On a GPU,
a run under torch's profiler measures the time in which no kernel ran. Unless --decode-steps is 0, decode follows by the
share of host blocks that the CPU attends to (`benchmarks/decode_by_share.py`). Exit status 1 if outputs differ, or if
counted bytes and copies differ from the formula.
The defaults take less than three minutes on one core.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.engine import engine_facts
from benchmarks.offload import OTHERS, Ceilings, Result, measure, show
from benchmarks.options import (
    Parser,
    add_device_option,
    add_engine_options,
    add_model_options,
    add_run_options,
    add_trace_option,
    add_weights_option,
    not_negative,
    positive,
    share,
)
from benchmarks.report import mib, peak_device_bytes, peak_rss_bytes, print_facts, print_row, write_json
from benchmarks.shapes import Shape, open_shape
from nanovllm.config import KV_CACHE_DTYPES


def is_right(result: Result, device: str, cpu_attention: bool) -> bool:
    """Whether outputs are equal and transfers are as predicted.

    With a GPU, the CPU's partial state is merged last, so that outputs may differ where two tokens are almost equally
    likely.
    """
    by_share = result.by_share
    cpu_attention_is_last = device != "cpu"
    return (
        result.as_predicted
        and (result.outputs_equal or (cpu_attention_is_last and cpu_attention))
        and (by_share is None or (by_share.as_predicted and (by_share.outputs_equal or cpu_attention_is_last)))
    )


def run(args: argparse.Namespace) -> int:
    with (
        open_shape(args.model, args.num_layers, args.dtype, args.load_format, args.stored) as shape,
        TemporaryDirectory(prefix="nanovllm-bench-") as directory,
    ):
        return run_all(args, shape, Path(directory) / "trace.json")


def run_all(args: argparse.Namespace, shape: Shape, trace: Path) -> int:
    """All prompt lengths, the longest last. The file is written after each, so that an interrupted run keeps some."""
    facts = engine_facts(shape, args.device)
    device = facts["device"]
    print_facts(facts, shape.facts())
    ceilings = Ceilings.now(shape, device)
    results: list[Result] = []
    for prompt_len in sorted(set(args.prompt_len)):
        print(f"{prompt_len:,} tokens in, {args.output_len:,} out, {args.repeats} rounds\n", flush=True)
        results.append(measure(args, shape, prompt_len, device, trace))
        show(results[-1], ceilings)
        memory = {"peak_rss_bytes": peak_rss_bytes(), "peak_device_bytes": peak_device_bytes(device)}
        parts = {"model": shape.facts(), "ceilings": ceilings, **memory, "results": results}
        write_json(args.output_json, args, facts, **parts)
    for way, peak in ceilings.copy_gb_s.items():
        print_row(f"a lone large copy, {way}", f"{peak:,.2f} GB/s")
    print_row("torch.mm", f"{ceilings.matmul_gflop_s:,.0f} GFLOP/s")
    for what, num_bytes in (("process", peak_rss_bytes()), ("device", peak_device_bytes(device))):
        if num_bytes is not None:
            print_row(f"peak {what} memory", mib(num_bytes), "of all engines together")
    if args.trace is not None:
        shutil.copyfile(trace, args.trace)
    return 0 if all(is_right(result, device, not args.no_cpu_attention) for result in results) else 1


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="bench_offload.py", description="What offload costs, against the KV cache on the device.")
    add_model_options(parser, num_layers=2)
    add_weights_option(parser)
    add = parser.add_argument
    add("--prompt-len", type=positive, nargs="+", default=[4096, 8192], help="tokens; several are run in turn")
    no_cpu = "all host blocks of a decode step go over the link; decode by share is left out"
    add("--no-cpu-attention", action="store_true", help=no_cpu)
    stored = "K and V of all engines but model-dtype, which is compared with in addition (default: %(default)s)"
    add("--kv-cache-dtype", choices=KV_CACHE_DTYPES, default="auto", help=stored)
    add("--device-share", type=share, default=Fraction(1, 8), help="KV blocks on the device (default: %(default)s)")
    add("--against", nargs="+", choices=OTHERS, default=list(OTHERS), help="what to compare with (default: all)")
    add_run_options(parser, output_len=17, repeats=2)
    add("--decode-steps", type=not_negative, default=8, help="tokens of a share and round (default: %(default)s)")
    add_engine_options(parser, block_size=128, max_batched=4096)
    add_device_option(parser)
    add_trace_option(parser, "one more run of the longest prompt under offload")
    return parser.run(argv, run)


if __name__ == "__main__":
    sys.exit(main())
