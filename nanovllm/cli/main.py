"""`nanovllm COMMAND ...`: each command is a module with `add_parser`, whose parser's `run` returns the exit status.

0: done. 1: something failed while it ran. 2: refused before anything ran. 130: interrupted. 141: nobody reads the
output any more.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import io
import os
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

from nanovllm.errors import ConfigError, EngineError, ModelError, RequestError

COMMANDS = {  # each a module beside this one, imported when it is called for: torch takes seconds
    "generate": "answer prompts from arguments, files, JSON lines or standard input",
    "chat": "talk to a model in the terminal, about a document if you like",
    "plan": "what fits, what moves and how long it takes, before anything runs",
    "bench": "measure prefill and decode",
}
INTERRUPTED = 130
OUTPUT_CLOSED = 141


class Parser(argparse.ArgumentParser):
    """A wrong argument costs one sentence, without the usage lines before it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: the command's own, or after one sentence that of what went wrong."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")  # results are UTF-8, whatever the terminal's locale
    try:
        args = _parse(arguments)
        status = int(args.run(args))
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        _discard_output()
        return OUTPUT_CLOSED
    except KeyboardInterrupt:
        return _complain(arguments, "interrupted", INTERRUPTED)
    except (ConfigError, ModelError, RequestError) as error:
        return _complain(arguments, f"error: {error}", 2)
    except (EngineError, OSError) as error:
        return _complain(arguments, f"error: {error}", 1)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(prog="nanovllm", description="Runs prompts whose KV cache is larger than device memory, exactly.")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    named = _command(arguments)
    known = parser
    for command, summary in COMMANDS.items():
        if command == named:
            known = importlib.import_module(f"nanovllm.cli.{command}").add_parser(subparsers, summary)
        else:
            subparsers.add_parser(command, help=summary)
    args, unknown = parser.parse_known_args(arguments)
    if hasattr(args, "prompts") and not any(word.startswith("-") for word in unknown):
        args.prompts += unknown  # argparse takes the first ones that stand side by side
    elif unknown:
        known.error(f"unknown argument {unknown[0]!r}{_nearest(unknown[0], known)}")
    return args


def _command(arguments: Sequence[str]) -> str | None:
    return next((word for word in arguments if not word.startswith("-")), None)


def _nearest(word: str, parser: argparse.ArgumentParser) -> str:
    """A hint at the option that was meant, where there is one."""
    options = re.findall(r"--[\w-]+", parser.format_help())
    near = difflib.get_close_matches(word.partition("=")[0], options, n=1)
    return f": did you mean {near[0]}?" if near else f": see {parser.prog} --help"


def _complain(arguments: Sequence[str], sentence: str, status: int) -> int:
    print(f"nanovllm {_command(arguments)}: {sentence}", file=sys.stderr)
    return status


def _discard_output() -> None:
    """What is still buffered has no reader: Python's own flush at exit must not complain about that."""
    with suppress(OSError, ValueError):  # not a file of the system
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
