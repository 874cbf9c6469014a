"""Settings for a machine by name, `--preset h200`: those of the full table and of the GPU check.

Other options override those of the preset.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import torch

# Llama-3.1-8B as published; KV of 4 GiB and 16 GiB. One prompt at a time, so that prefill and decode do not overlap.
# The longer prompt and its output fit the model's 131,072 positions.
PROMPT_32K, PROMPT_128K = 32768, 130048
NETWORK: Mapping[str, Any] = {
    "model": "llama-3.1-8b",
    "num_layers": None,
    "prompt_len": [PROMPT_32K, PROMPT_128K],
    "output_len": 33,
    "max_num_batched_tokens": 16384,
    "warmup": 1,
    "repeats": 3,
}
RESIDENT: Mapping[str, Any] = {**NETWORK, "device": "cuda", "block_size": 1024}
OFFLOAD: Mapping[str, Any] = {**RESIDENT, "device_share": Fraction(1, 8), "decode_steps": 8}
FOR_A_GPU = ("device", "model", "prompt_len")  # options that need a large GPU


def parse_with_preset(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None, h200: Mapping[str, Any]
) -> argparse.Namespace:
    """The arguments, with the defaults of `h200` if --preset selects it.

    Exits with a message if there is no CUDA device, unless all options that need one are overridden.
    """
    told = f"h200 is {' '.join(as_options(h200))}; other options override it"
    parser.add_argument("--preset", choices=("h200",), help=told)
    args = parser.parse_args(argv)
    if args.preset is None:
        return args
    parser.set_defaults(**h200)
    args = parser.parse_args(argv)
    left = {name: h200[name] for name in FOR_A_GPU if name in h200 and getattr(args, name) == h200[name]}
    if left and not torch.cuda.is_available():
        parser.error(
            f"--preset {args.preset} needs a CUDA device, and torch sees none: run it on one, or override"
            f" {' '.join(as_options(left))} as well"
        )
    return args


def as_options(settings: Mapping[str, Any]) -> list[str]:
    """As they are written on a command line."""
    words = []
    for name, value in settings.items():
        values = value if isinstance(value, list) else ["all" if value is None else value]
        words += [f"--{name.replace('_', '-')}", *map(str, values)]
    return words
