"""Prefill and decode with all of the KV cache on the device: random weights, random prompts, no checkpoint needed.

    python bench.py [--model qwen3-0.6b] [--prompt-len 512 2048] [--output-json FILE]

Each prompt length is run --repeats times after --warmup runs that do not count. Figures are medians with extremes.
Shares are relative to torch.mm and torch.sum in the same run. The defaults take about a minute on two cores.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

from benchmarks.engine import Work, engine_facts, generate, timing_of
from benchmarks.options import Parser, add_device_option, add_trace_option, not_negative
from benchmarks.resident import Engine, add_options, report
from benchmarks.shapes import open_shape
from benchmarks.timeline import decode_kernels, kernel_output


def run(args: argparse.Namespace) -> int:
    """Measure all prompt lengths in one engine."""
    with ExitStack() as stack:
        shape = stack.enter_context(open_shape(args.model, args.num_layers, args.dtype, args.load_format, args.stored))
        output_len = max(args.output_len, kernel_output(args.kernel_steps) if args.kernel_steps else 0)
        work = Work.of(shape, args, max(args.prompt_len), output_len, args.num_prompts)

        def open_engine() -> Engine:
            llm = stack.enter_context(work.open(**work.on_device(), trace=args.trace))
            stats = llm.kv_stats()
            return Engine(
                run=lambda prompts: timing_of(generate(llm, prompts, args.output_len)),
                kv_device_bytes=stats.device_bytes,
                kv_host_bytes=stats.host_bytes + stats.swap_bytes,
                kernels=partial(decode_kernels, llm, steps=args.kernel_steps) if args.kernel_steps else None,
            )

        report(args, shape, engine_facts(shape, args.device), open_engine)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="bench.py", description="Prefill and decode with all of the KV cache on the device.")
    add_options(parser, block_size=256)
    add_device_option(parser)
    add_trace_option(parser, "all runs")
    told = "decode steps under torch's profiler, for the time of each kernel (default: %(default)s)"
    parser.add_argument("--kernel-steps", type=not_negative, default=0, help=told)
    return parser.run(argv, run)


if __name__ == "__main__":
    sys.exit(main())
