"""`nanovllm plan`: memory, transfers and time of a prompt, predicted from a config without loading weights."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import nanovllm.features.planner as planner
from nanovllm.apps.cli.arguments import (
    TOKENS,
    add_command,
    add_engine_group,
    add_model,
    as_flags,
    check_offload_flags,
    engine_arguments,
    number_up_to,
    positive_tokens,
)
from nanovllm.apps.planner.cards import find_card, find_link
from nanovllm.config import EngineConfig

# Published models by name, whose config is part of the package.
CONFIGS = {path.stem: str(path) for path in (Path(__file__).parent.parent / "planner" / "configs").glob("*.json")}
ENGINE_OPTIONS = (  # engine arguments that are flags of this command
    *("dtype", "hf_overrides", "kv_cache_dtype", "kvcache_block_size", "max_model_len", "max_num_batched_tokens"),
    *("max_num_seqs", "num_gpu_blocks", "kv_cache_memory_bytes", "num_cpu_blocks", "kv_offloading_size"),
    *("cpu_attention", "gpu_memory_utilization", "enable_lora", "max_loras", "max_lora_rank", "max_cpu_loras"),
    *("tensor_parallel_size", "speculative_config"),
)


def add_parser(subparsers: Any, summary: str) -> argparse.ArgumentParser:
    """The command's options."""
    says = f"Says {summary}, from a model's config alone. Exit status 1 if the prompt does not fit."
    parser = add_command(subparsers, "plan", summary, says)
    parser.set_defaults(run=run)
    add = parser.add_argument
    names = ", ".join(sorted(CONFIGS))
    add_model(parser, f"a model directory, a config file, a GGUF file, a hub name, or one of {names}")
    add("--prompt-len", type=positive_tokens, metavar="N", help=f"tokens, {TOKENS} (default: the longest that fits)")
    add("--output-len", type=positive_tokens, metavar="N", default=128, help="tokens (default: %(default)s)")
    told = "share of right drafts that --speculative-config is planned with (default: %(default)s)"
    add(
        "--acceptance",
        type=number_up_to(1, "a share from 0 to 1, such as 0.7"),
        metavar="SHARE",
        default=planner.ACCEPTANCE,
        help=told,
    )
    add("--json", action="store_true", help="everything as one JSON object")
    add_engine_group(parser, ENGINE_OPTIONS).add_argument(
        "--enable-cpu-offload", action=argparse.BooleanOptionalAction, help="default: if the prompt needs it"
    )
    _add_machine_options(
        parser.add_argument_group(
            "machine",
            "With --gpu-mem, the plan is for another machine, and rates that are not given are unknown. Without it, "
            "the plan is for this machine, and rates that are not given are measured in a few seconds. --gpu names a "
            "card whose data sheet gives --gpu-mem, --compute, --device-bandwidth and --link; those that are given "
            "themselves come first. Sizes: 80GB, 80G and 80 are 80 * 10^9 bytes, 80GiB is 80 * 2^30.",
        )
    )
    return parser


def _add_machine_options(group: Any) -> None:
    def add(flag: str, parse: Callable[[str], object], example: str, meaning: str) -> None:
        def parse_option(text: str) -> object:
            try:
                return parse(text)
            except ValueError as error:  # argparse would leave its message out
                raise argparse.ArgumentTypeError(str(error)) from None

        group.add_argument(flag, type=parse_option, metavar=example, help=meaning)

    num_bytes, rate, seconds = planner.parse_bytes, planner.parse_byte_rate, planner.parse_seconds
    add("--gpu", find_card, "NAME", 'a card, such as "RTX 4090", H100 or L40S')
    add("--gpu-mem", num_bytes, "80GB", "memory of the device")
    add("--host-mem", num_bytes, "256GB", "host memory that is free for the KV cache")
    link = 'between host and device, each way; or "PCIe 4"'
    add("--link", lambda text: find_link(text) or rate(text), "50GB/s", link)
    add("--compute", planner.parse_compute_rate, "400TFLOPS", "of matrix products and attention")
    add("--interconnect", rate, "400GB/s", "bytes that a tensor-parallel rank receives from the others")
    add("--all-reduce", seconds, "10us", "time of a sum of few bytes over the ranks")
    add("--device-bandwidth", rate, "3TB/s", "of reading device memory")
    add("--host-bandwidth", rate, "100GB/s", "of CPU attention in host memory")
    add("--disk-bandwidth", rate, "2GB/s", "of reading KV blocks from kv_cache_dir; not measured")
    add("--layer-overhead", seconds, "20us", "fixed cost of a layer in a step")
    measured = "this machine's rates"
    group.add_argument("--measure", action=argparse.BooleanOptionalAction, default=True, help=measured)


def run(args: argparse.Namespace) -> int:
    """Print the plan; the exit status says whether the prompt fits."""
    if args.gpu is not None:
        for name in ("gpu_mem", "compute", "device_bandwidth", "link"):
            if getattr(args, name) is None:
                setattr(args, name, getattr(args.gpu, name))
    named, given = args.model, engine_arguments(args)
    check_offload_flags(args.enable_cpu_offload, given)
    wanted = (args.prompt_len, args.output_len, args.enable_cpu_offload, args.gpu_mem, args.host_mem)
    model = CONFIGS.get(named, named)
    plan = planner.plan_of(
        planner.PlanRequest(model, given, *wanted, rates=_rates(args), measure=args.measure, acceptance=args.acceptance)
    )
    prompt_len = args.prompt_len or plan.kv.max_model_len
    if args.json:
        print(json.dumps(planner.plan_json(plan, prompt_len, args.output_len), indent=2, allow_nan=False))
    else:
        print(planner.plan_table(plan, prompt_len, args.output_len))
        if args.gpu_mem is None:
            print(planner.cpu_kernels_line(), end="")
        if plan.fits(prompt_len):
            room = max(1, plan.kv.max_model_len - prompt_len)
            arguments = given | planner.running_arguments(plan, prompt_len, args.output_len)
            print(f"\nTo run it\n  {_command(named, arguments, min(args.output_len, room))}")
        else:
            _say_what_would_fit(plan, prompt_len, args)
    return 0 if plan.fits(prompt_len) else 1


def _say_what_would_fit(plan: planner.Plan, prompt_len: int, args: argparse.Namespace) -> None:
    """Every obstacle with the flags that lift it, and flags that lift all of them."""
    print("\nWhat is in the way, and what to add")
    for obstacle in plan.sizing.obstacles(prompt_len):
        print(f"  {obstacle.text}")
        for change in obstacle.changes:
            print(f"    {as_flags(change)}")
    size = plan.sizing.host_memory_for(prompt_len)
    if size is not None and size > (args.host_mem or 0):
        if args.host_mem is None:
            print("  --host-mem is not given, so no host memory counts")
        print("  with so much host memory its KV cache fits")
        print(f"    --enable-cpu-offload --host-mem {size // 10**9}GB")
    changes = plan.changes_for(prompt_len)
    if changes:
        print(f"Together:\n{as_flags(changes[0])}")


def _command(model: str, arguments: dict[str, Any], output_len: int) -> str:
    """The command line that runs a prompt with these engine arguments, without those that are defaults."""
    if model in CONFIGS or (Path(model).is_file() and Path(model).suffix == ".json"):
        model = str(Path(model).parent) if Path(model).name == "config.json" else "MODEL_DIR"
    defaults = {field.name: field.default for field in fields(EngineConfig)}
    changed = {name: value for name, value in arguments.items() if value != defaults[name]}
    words = f"nanovllm generate --model {shlex.quote(model)} --file PROMPT.txt --max-tokens {output_len}"
    return f"{words} {as_flags(changed)}".rstrip()


def _rates(args: argparse.Namespace) -> dict[str, Any]:
    """The rates that are given, by their names in `Rates`."""
    given = {name: getattr(args, option[2:].replace("-", "_")) for name, (option, _) in planner.RATES.items()}
    given |= {"all_reduce_seconds": args.all_reduce, "layer_seconds": args.layer_overhead}
    if args.link is not None:
        given["link"] = planner.Link(args.link, args.link)
    return {name: rate for name, rate in given.items() if rate is not None}
