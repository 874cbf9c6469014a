"""`nanovllm plan`: memory, transfers and time of a prompt, predicted from a config without loading weights."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Callable
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
    positive_tokens,
)
from nanovllm.errors import ConfigError, unknown_name_message

# Published models by name, whose config is part of the package.
CONFIGS = {path.stem: str(path) for path in (Path(__file__).parent.parent / "planner" / "configs").glob("*.json")}
ENGINE_OPTIONS = (  # engine arguments that are flags of this command
    *("dtype", "hf_overrides", "kv_cache_dtype", "kvcache_block_size", "max_model_len", "max_num_batched_tokens"),
    *("max_num_seqs", "num_gpu_blocks", "kv_cache_memory_bytes", "num_cpu_blocks", "kv_offloading_size"),
    *("weights_memory_bytes", "host_weights_bytes", "weights_dir", "host_products"),
    *("cpu_attention", "gpu_memory_utilization", "tensor_parallel_size"),
    *("enable_lora", "max_loras", "max_lora_rank", "max_cpu_loras"),
)


def add_parser(subparsers: Any, summary: str) -> argparse.ArgumentParser:
    """The command's options."""
    says = (
        f"Says {summary}, from a model's config alone. If the prompt does not fit, it says what is in the way, and "
        "gives the numbers of the longest that fits. Exit status 0: it fits; 1: it does not; 2: the command was "
        "refused."
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
    add("--json", action="store_true", help="everything as one JSON object")
    add_engine_group(parser, ENGINE_OPTIONS).add_argument(
        "--enable-cpu-offload", action=argparse.BooleanOptionalAction, help="default: if the prompt needs it"
    )
    _add_machine_options(
        parser.add_argument_group(
            "machine",
            "With --gpu-mem, the plan is for another machine, and without it for this one. Times need rates: --gpu "
            "names a card whose data sheet gives --gpu-mem, --compute, --device-bandwidth and --link; those that are "
            "given themselves come first. Sizes: 80GB, 80G and 80 are 80 * 10^9 bytes, 80GiB is 80 * 2^30.",
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
    add("--gpu", planner.find_card, "NAME", 'a card, such as "RTX 4090", H100 or L40S')
    add("--gpu-mem", num_bytes, "80GB", "memory of the device")
    add("--host-mem", num_bytes, "256GB", "host memory that is free for the KV cache and for weights that stream")
    link = 'between host and device, each way; or "PCIe 4"'
    add("--link", lambda text: planner.find_link(text) or rate(text), "50GB/s", link)
    add("--compute", planner.parse_compute_rate, "400TFLOPS", "of matrix products and attention")
    add("--interconnect", rate, "400GB/s", "bytes that a tensor-parallel rank receives from the others")
    add("--all-reduce", planner.parse_seconds, "10us", "time of a sum of few bytes over the ranks")
    add("--device-bandwidth", rate, "3TB/s", "of reading device memory")
    add("--host-bandwidth", rate, "100GB/s", "of CPU attention in host memory")
    add("--disk-bandwidth", rate, "7GB/s", "of reading weights from disk")


def run(args: argparse.Namespace) -> int:
    """Print the plan; the exit status says whether the prompt fits."""
    card = args.gpu
    if card is not None:
        for name in ("gpu_mem", "compute", "device_bandwidth", "link"):
            if getattr(args, name) is None:
                setattr(args, name, getattr(card, name))
    given = engine_arguments(args)
    check_offload_flags(args.enable_cpu_offload, given)
    asked = planner.PlanRequest(
        _config_of(args.model),
        given,
        args.prompt_len,
        args.output_len,
        args.enable_cpu_offload,
        args.gpu_mem,
        args.host_mem,
        _rates(args),
    )
    machine = _machine(args)
    try:
        plan = planner.plan_of(asked)
    except planner.NoMemoryError as error:
        says = f"{args.model} does not fit on {machine}: {error}"
        print(json.dumps({"fits": False, "advice": says}) if args.json else says)
        return 1
    fits = args.prompt_len is None or plan.fits(args.prompt_len)
    if args.json:
        print(json.dumps(planner.plan_json(plan, args.prompt_len, args.output_len), indent=2, allow_nan=False))
        return 0 if fits else 1
    print(planner.page(plan, args.model, machine, args.prompt_len, args.output_len))
    if fits:
        offload = {"enable_cpu_offload": True} if plan.sizing.config.enable_cpu_offload else {}
        print(f"\nTo run it\n  {_command(args.model, given | offload, args.output_len)}")
    return 0 if fits else 1


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
    """The command line that runs a prompt with these engine arguments."""
    if model.lower() in CONFIGS or (Path(model).is_file() and Path(model).suffix == ".json"):
        model = str(Path(model).parent) if Path(model).name == "config.json" else "MODEL_DIR"
    words = f"nanovllm generate --model {shlex.quote(model)} --file PROMPT.txt --max-tokens {output_len}"
    return f"{words} {as_flags(arguments)}".rstrip()


def _rates(args: argparse.Namespace) -> planner.Rates:
    return planner.Rates(
        args.compute,
        args.device_bandwidth,
        args.host_bandwidth,
        args.link,
        args.interconnect,
        args.all_reduce or 0.0,
        args.disk_bandwidth,
    )
