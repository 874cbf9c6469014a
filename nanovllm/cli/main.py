"""`nanovllm COMMAND ...`: each command is a module with `add_parser` and the function that its parser's `run` is."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from nanovllm.cli import plan
from nanovllm.errors import ConfigError, EngineError, ModelError, RequestError

COMMANDS = (plan,)


class Parser(argparse.ArgumentParser):
    """A wrong argument costs one sentence, without the usage lines before it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: the command's own, or 2 after one sentence where something is refused."""
    parser = Parser(prog="nanovllm", description="Runs prompts whose KV cache is larger than device memory, exactly.")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_parser(subparsers)
    args = parser.parse_args(argv)
    try:
        return int(args.run(args))
    except (ConfigError, EngineError, ModelError, RequestError) as error:
        print(f"nanovllm {args.command}: error: {error}", file=sys.stderr)
        return 2
