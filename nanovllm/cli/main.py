"""`nanovllm COMMAND ...`: each command is a module with `add_parser`, whose parser's `run` returns the exit status.

0: done. 1: something failed while it ran. 2: refused before anything ran. 130: interrupted. 141: nobody reads the
output any more.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import io
import logging
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

from nanovllm.cli.boundary import Boundary, discard, one_line, open_closed_streams, say
from nanovllm.errors import ConfigError, ModelError, RequestError, quoted

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
        self.exit(2, f"{self.prog}: error: {one_line(message)}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: the command's own, or after one sentence that of what went wrong."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    verbose = "--verbose" in arguments
    open_closed_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")  # results are UTF-8, whatever the terminal's locale
    try:
        with _log_to_stderr(verbose):
            args = _parse(arguments)
            _check_stdout(args)
            status = int(args.run(args))
        if sys.stdout is not None:
            sys.stdout.flush()
        return status
    except BrokenPipeError:
        discard(sys.stdout)
        return OUTPUT_CLOSED
    except KeyboardInterrupt:
        return _complain(arguments, "interrupted", INTERRUPTED)
    except Exception as error:
        _drop_what_cannot_be_written()
        refused = isinstance(error, (ConfigError, ModelError, RequestError))
        return _complain(arguments, f"error: {Boundary(verbose).sentence(error)}", 2 if refused else 1)


def _drop_what_cannot_be_written() -> None:
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except (OSError, ValueError):
        discard(sys.stdout)


def _check_stdout(args: argparse.Namespace) -> None:
    if sys.stdout is None and getattr(args, "output", None) is None:
        raise ConfigError("standard output is closed, and results go there: redirect it to a file")


@contextmanager
def _log_to_stderr(verbose: bool) -> Iterator[None]:
    """Warnings as lines on standard error, unless the program that calls `main` logs in a way of its own."""
    logger, handler = logging.getLogger("nanovllm"), logging.StreamHandler()
    handler.setFormatter(_LineFormatter(verbose))
    if logger.hasHandlers():
        yield
        return
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


class _LineFormatter(logging.Formatter):
    """Messages as they are; tracebacks only if `verbose`."""

    def __init__(self, verbose: bool) -> None:
        super().__init__()
        self._verbose = verbose

    def format(self, record: logging.LogRecord) -> str:
        return super().format(record) if self._verbose else record.getMessage()


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
    known.add_argument("--verbose", action="store_true", help="show the tracebacks of errors")
    args, unknown = parser.parse_known_args(arguments)
    if hasattr(args, "prompts") and not any(word.startswith("-") for word in unknown):
        args.prompts += unknown  # argparse takes the first ones that stand side by side
    elif unknown:
        known.error(f"unknown argument {quoted(unknown[0])}{_nearest(unknown[0], known)}")
    return args


def _command(arguments: Sequence[str]) -> str | None:
    return next((word for word in arguments if not word.startswith("-")), None)


def _nearest(word: str, parser: argparse.ArgumentParser) -> str:
    """A hint at the option that was meant, where there is one."""
    options = re.findall(r"--[\w-]+", parser.format_help())
    near = difflib.get_close_matches(word.partition("=")[0][:100], options, n=1)
    return f": did you mean {near[0]}?" if near else f": see {parser.prog} --help"


def _complain(arguments: Sequence[str], sentence: str, status: int) -> int:
    say(f"nanovllm {_command(arguments)}: {sentence}")
    return status
