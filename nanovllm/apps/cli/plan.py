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
from nanovllm.config import EngineConfig
from nanovllm.errors import ConfigError, unknown_name_message

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
    says = (
        f"Says {summary}, from a model's config alone. If the prompt does not fit, it says what would have to happen, "
        "and gives the numbers as if it had. Exit status 0: it fits; 1: it does not; 2: the command was refused."
    )
    parser = add_command(subparsers, "plan", summary, says)
    parser.set_defaults(run=run)
    add = parser.add_argument
    names = ", ".join(sorted(CONFIGS))
    add_model(
        parser, f"a model directory, a config file, a GGUF file, a hub name, or one of these, in any case: {names}"
    )
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

    num_bytes = planner.parse_bytes
    rate = planner.parse_byte_rate
    seconds = planner.parse_seconds
    add("--gpu", planner.find_card, "NAME", 'a card, such as "RTX 4090", H100 or L40S')
    add("--gpu-mem", num_bytes, "80GB", "memory of the device")
    add("--host-mem", num_bytes, "256GB", "host memory that is free for the KV cache")
    link = 'between host and device, each way; or "PCIe 4"'
    add("--link", lambda text: planner.find_link(text) or rate(text), "50GB/s", link)
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
    card = args.gpu
    if card is not None:
        for name in ("gpu_mem", "compute", "device_bandwidth", "link"):
            if getattr(args, name) is None:
                setattr(args, name, getattr(card, name))
    name = args.model
    given = engine_arguments(args)
    check_offload_flags(args.enable_cpu_offload, given)
    wanted = (args.prompt_len, args.output_len, args.enable_cpu_offload, args.gpu_mem, args.host_mem)
    more = {"rates": _rates(args), "measure": args.measure, "acceptance": args.acceptance}
    asked = planner.PlanRequest(_config_of(name), given, *wanted, **more)
    outlook = planner.outlook_of(asked, _machine(args), CONFIGS)
    if args.json:
        print(json.dumps(planner.plan_json(outlook, args.output_len), indent=2, allow_nan=False))
        return 0 if outlook.fits else 1
    print(planner.page(outlook, name, args.output_len, as_flags))
    if args.gpu_mem is None:
        print(planner.cpu_kernels_line(), end="")
    if outlook.can_run:
        plan = outlook.plan
        room = max(1, outlook.plan.kv.max_model_len - outlook.prompt_len)
        arguments = {**outlook.arguments, **planner.running_arguments(plan, outlook.prompt_len, args.output_len)}
        print(f"\nTo run it{'' if outlook.fits else ' so'}\n  {_command(name, arguments, min(args.output_len, room))}")
    return 0 if outlook.fits else 1


def _config_of(name: str) -> str:
    """The model to read: a file or directory, or the config of a published model, whose name is known in any case."""
    known = CONFIGS.get(name.lower())
    if known is not None and not Path(name).exists():
        return known
    if not Path(name).exists() and "/" not in name:
        says = unknown_name_message("model", name, CONFIGS)
        raise ConfigError(f"{says}; a directory with a config.json and a name on the hub, OWNER/NAME, are taken too")
    return name


def _machine(args: argparse.Namespace) -> str:
    """What the plan is for, such as `RTX 4090 (24.0 GB), 64.0 GB of host memory`."""
    if args.gpu_mem is None:
        return "this machine"
    size = planner.show_bytes(args.gpu_mem)
    device = f"a device of {size}" if args.gpu is None else f"{args.gpu.name} ({size})"
    return device if args.host_mem is None else f"{device} with {planner.show_bytes(args.host_mem)} of host memory"


def _command(model: str, arguments: dict[str, Any], output_len: int) -> str:
    """The command line that runs a prompt with these engine arguments, without those that are defaults."""
    if model.lower() in CONFIGS or (Path(model).is_file() and Path(model).suffix == ".json"):
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
