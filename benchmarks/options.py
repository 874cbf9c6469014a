"""Command-line options that the benchmarks share. A wrong one gives a one-sentence error and exit status 2."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import NoReturn

from nanovllm.apps.cli.arguments import not_negative as not_negative
from nanovllm.apps.cli.arguments import positive as positive
from nanovllm.config import DEVICES, DTYPES
from nanovllm.errors import ConfigError, ModelError, RequestError

STORED_FORMS = ("int4", "fp8", "q4_k_m")  # of `stored_shapes`


class Parser(argparse.ArgumentParser):
    """Reports errors without usage lines."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")

    def run(self, argv: Sequence[str] | None, work: Callable[[argparse.Namespace], int]) -> int:
        """The exit status of `work` with the parsed arguments; 2, after one sentence, if the engine refuses them."""
        args = self.parse_args(argv)
        try:
            return work(args)
        except (ConfigError, ModelError, RequestError) as error:
            print(f"{self.prog}: error: {error}", file=sys.stderr)
            return 2


def add_model_options(parser: argparse.ArgumentParser, *, num_layers: int | None) -> None:
    """Options of the network and its dtype."""
    add = parser.add_argument
    add("--model", default="qwen3-0.6b", help="a published name, or a directory with a config.json")
    kept = "all" if num_layers is None else str(num_layers)
    add("--num-layers", type=layers, default=num_layers, help=f"layers to keep, or all (default: {kept})")
    add("--dtype", choices=DTYPES, default="auto", help="of weights and KV cache (default: the config's)")


def add_weights_option(parser: argparse.ArgumentParser) -> None:
    told = "dummy: random weights; auto: those of the checkpoint in --model, with all its layers (default: %(default)s)"
    parser.add_argument("--load-format", choices=("dummy", "auto"), default="dummy", help=told)
    form = "form in which random weights are stored (default: as the config says)"
    parser.add_argument("--stored", choices=STORED_FORMS, help=form)


def add_engine_options(parser: argparse.ArgumentParser, *, block_size: int | None, max_batched: int) -> None:
    """Options of the engine."""
    add = parser.add_argument
    add("--max-num-batched-tokens", type=positive, default=max_batched, help="tokens in a step (default: %(default)s)")
    add("--block-size", type=positive, default=block_size, help="tokens in a KV block (default: %(default)s)")


def add_device_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=DEVICES, help="else CUDA where there is one")


def add_trace_option(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument("--trace", type=new_file, help=f"file for a timeline of {what}, as a Chrome trace")


def add_run_options(parser: argparse.ArgumentParser, *, output_len: int, repeats: int) -> None:
    """Options of output length, repeats and the report."""
    add = parser.add_argument
    add("--output-len", type=positive, default=output_len, help="tokens to generate (default: %(default)s)")
    add("--repeats", type=positive, default=repeats, help="runs that count (default: %(default)s)")
    add("--warmup", type=not_negative, default=1, help="runs before them that do not (default: %(default)s)")
    add("--seed", type=not_negative, default=0, help="of weights and prompts")
    add_json_option(parser)


def add_json_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output-json", type=new_file, help="file to write all figures to")


def layers(text: str) -> int | None:
    """How many to keep; None for "all"."""
    return None if text == "all" else positive(text)


def share(text: str) -> Fraction:
    """A share between 0 and 1, as 1/8 or 0.125."""
    try:
        value = Fraction(text)
    except (ValueError, ZeroDivisionError):
        value = Fraction(0)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share above 0 and at most 1, such as 1/8 or 0.125")
    return value


def new_file(text: str) -> Path:
    """A path that can be written, checked before the work begins."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written: give a file in a directory that exists")
    return path
