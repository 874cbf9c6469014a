"""`nanovllm plan`: memory, transfers and time of a prompt, predicted from a config without loading weights."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any, TypeVar

from nanovllm.cli.arguments import TOKENS, add_engine_group, add_model, as_flags, positive_tokens
from nanovllm.planner.units import parse_byte_rate, parse_bytes, parse_compute_rate, parse_seconds

T = TypeVar("T")
ENGINE_OPTIONS = (  # engine arguments that are flags of this command
    "dtype",
    "hf_overrides",
    "kv_cache_dtype",
    "kvcache_block_size",
    "max_model_len",
    "max_num_batched_tokens",
    "max_num_seqs",
    "num_gpu_blocks",
    "num_cpu_blocks",
    "cpu_attention",
    "gpu_memory_utilization",
    "enable_lora",
    "max_loras",
    "max_lora_rank",
    "max_cpu_loras",
    "tensor_parallel_size",
)


def add_parser(subparsers: Any, summary: str) -> argparse.ArgumentParser:
    """The command's options."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "plan",
        help=summary,
        description=f"Says {summary}, from a model's config alone. Exit status 1 if the prompt does not fit.",
    )
    parser.set_defaults(run=run)
    add = parser.add_argument
    add_model(parser, "a model directory, a config file, a GGUF file, or a hub name")
    add("--prompt-len", type=positive_tokens, metavar="N", help=f"tokens, {TOKENS} (default: the longest that fits)")
    add("--output-len", type=positive_tokens, metavar="N", default=128, help="tokens (default: %(default)s)")
    add("--json", action="store_true", help="everything as one JSON object")
    add_engine_group(parser, ENGINE_OPTIONS).add_argument(
        "--enable-cpu-offload", action=argparse.BooleanOptionalAction, help="default: if the prompt needs it"
    )
    _add_machine_options(
        parser.add_argument_group(
            "machine",
            "With --gpu-mem, the plan is for another machine, and rates that are not given are unknown. Without it, "
            "the plan is for this machine, and rates that are not given are measured in a few seconds.",
        )
    )
    return parser


def _add_machine_options(group: Any) -> None:
    add = group.add_argument
    add("--gpu-mem", type=_quantity(parse_bytes), metavar="80GB", help="memory of the device")
    add("--host-mem", type=_quantity(parse_bytes), metavar="256GB", help="host memory that is free for the KV cache")
    add("--link", type=_quantity(parse_byte_rate), metavar="50GB/s", help="between host and device, each way")
    add("--compute", type=_quantity(parse_compute_rate), metavar="400TFLOPS", help="of matrix products and attention")
    rank = "bytes that a tensor-parallel rank receives from the others"
    add("--interconnect", type=_quantity(parse_byte_rate), metavar="400GB/s", help=rank)
    add("--all-reduce", type=_quantity(parse_seconds), metavar="10us", help="time of a sum of few bytes over the ranks")
    add("--device-bandwidth", type=_quantity(parse_byte_rate), metavar="3TB/s", help="of reading device memory")
    add("--host-bandwidth", type=_quantity(parse_byte_rate), metavar="100GB/s", help="of CPU attention in host memory")
    add("--layer-overhead", type=_quantity(parse_seconds), metavar="20us", help="fixed cost of a layer in a step")
    add("--measure", action=argparse.BooleanOptionalAction, default=True, help="this machine's rates")


def run(args: argparse.Namespace) -> int:
    """Print the plan; the exit status says whether the prompt fits."""
    from nanovllm.cli.planning import cpu_kernels_line, plan_of  # imports torch, which takes seconds
    from nanovllm.planner.report import plan_json, plan_table

    plan = plan_of(args)
    prompt_len = args.prompt_len or plan.kv.max_model_len
    if args.json:
        print(json.dumps(plan_json(plan, prompt_len, args.output_len), indent=2, allow_nan=False))
    else:
        print(plan_table(plan, prompt_len, args.output_len))
        print(cpu_kernels_line(args), end="")
        for change in plan.changes_for(prompt_len)[:1] if not plan.fits(prompt_len) else ():
            print(as_flags(change))
        if not plan.fits(prompt_len) and args.gpu_mem is not None and args.host_mem is None:
            print("  --host-mem is not given, so no host memory counts")
    return 0 if plan.fits(prompt_len) else 1


# ---- options


def _quantity(parse: Callable[[str], T]) -> Callable[[str], T]:
    """A parser for argparse that keeps the message of a ValueError."""

    def parse_option(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse_option
