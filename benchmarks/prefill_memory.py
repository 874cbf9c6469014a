"""Peak memory of one prefill in a separate process, apart from weights and KV cache.

    python -m benchmarks.prefill_memory [--prompt-len 32768] [--device-share 1/8] [--output-json FILE]

The KV memory has exactly the prompt's size. The rest of the peak is the interpreter with its libraries, which is
measured at start, and the activations and temporary buffers of the steps.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from benchmarks.engine import Work, engine_facts, generate, timing_of
from benchmarks.options import (
    Parser,
    add_device_option,
    add_engine_options,
    add_json_option,
    add_model_options,
    exit_status,
    not_negative,
    positive,
    share,
)
from benchmarks.other_load import OtherLoad
from benchmarks.report import mib, peak_rss_bytes, print_facts, print_other_load, print_row, write_json
from benchmarks.shapes import open_shape
from nanovllm.device.memory import rss_bytes


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of resident memory. `peak_before` and `before` are of the loaded engine, before its first step."""

    at_start: int  # interpreter and libraries
    before: int
    peak_before: int
    peak: int
    weights: int
    kv_device: int
    kv_host: int
    layer_buffer: int  # for layer-by-layer prefill; part of the step, as far as it was touched

    @property
    def beyond(self) -> int:
        """The part of the peak that is neither weights nor KV cache."""
        return self.peak - self.weights - self.kv_device - self.kv_host

    @property
    def of_the_step(self) -> int:
        return self.beyond - self.at_start


def measure(work: Work, device_share: Fraction | None) -> tuple[Memory, float]:
    """The memory, and the prefill's tokens per second."""
    at_start = rss_bytes()
    (prompt,) = work.shape.prompts(1, work.prompt_len, work.seed)
    placement = work.on_device() if device_share is None else work.offloaded(device_share)
    with work.open(**placement) as llm:
        before = rss_bytes()
        peak_before = max(before, peak_rss_bytes())  # the kernel may count some pages of a peak late
        timing = timing_of(generate(llm, [prompt], work.output_len))
        stats = llm.kv_stats()
    memory = Memory(
        at_start=at_start,
        before=before,
        peak_before=peak_before,
        peak=max(peak_before, peak_rss_bytes()),
        weights=work.shape.weight_bytes,
        kv_device=stats.device_bytes,
        kv_host=stats.host_bytes,
        layer_buffer=stats.layer_buffer_bytes,
    )
    return memory, timing.prefill_rate


def show(memory: Memory, prefill_rate: float) -> None:
    """Print where the peak went."""
    print_row("peak process memory", mib(memory.peak))
    print_row("weights", mib(memory.weights))
    print_row("KV cache on the device", mib(memory.kv_device))
    print_row("KV cache on the host", mib(memory.kv_host))
    print_row("beyond weights and KV cache", mib(memory.beyond))
    print_row("  interpreter and libraries", mib(memory.at_start))
    print_row("  the step", mib(memory.of_the_step), f"with a layer buffer of {mib(memory.layer_buffer)}")
    print_row("peak before the prefill", mib(memory.peak_before))
    print_row("prefill", f"{prefill_rate:,.1f} tok/s")


def run(args: argparse.Namespace) -> int:
    with open_shape(args.model, args.num_layers, args.dtype) as shape:
        work = Work.of(shape, args, args.prompt_len, output_len=1)
        facts = engine_facts(shape, args.device)
        print_facts(facts, shape.facts())
        print(f"{args.prompt_len:,} tokens in, {args.max_num_batched_tokens:,} in a step\n", flush=True)
        load = OtherLoad()
        memory, prefill_rate = measure(work, args.device_share)
        other_load = load.share()
        show(memory, prefill_rate)
        print_other_load(other_load)
        derived = {"beyond_weights_and_kv": memory.beyond, "of_the_step": memory.of_the_step}
        parts = {"memory": memory, **derived, "prefill_tok_s": prefill_rate, "other_load": other_load}
        write_json(args.output_json, args, facts, model=shape.facts(), **parts)
    return 0


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="python -m benchmarks.prefill_memory", description="Peak memory of one prefill.")
    add_model_options(parser, num_layers=None)
    add = parser.add_argument
    add("--prompt-len", type=positive, default=32768, help="tokens (default: %(default)s)")
    add("--device-share", type=share, help="KV blocks on the device, as 1/8; without it there is no offload")
    add("--seed", type=not_negative, default=0, help="of weights and prompt")
    add_engine_options(parser, block_size=1024, max_batched=16384)
    add_device_option(parser)
    add_json_option(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    return exit_status("python -m benchmarks.prefill_memory", lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
