"""`nanovllm COMMAND ...`: each command is a module with `add_parser`, whose parser's `run` returns the exit status.

Exit statuses: 0 success, 1 failure while running, 2 refused before running, 130 interrupted, 141 output closed by its
reader.
"""

from __future__ import annotations

import argparse
import importlib
import io
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

from nanovllm import __version__
from nanovllm.apps.cli.arguments import resolve_model
from nanovllm.apps.cli.boundary import LONGEST, Boundary, discard, say
from nanovllm.errors import ConfigError, ModelError, RequestError, one_line, unknown_name_message

COMMANDS = {  # modules of this package, imported on use: importing torch takes seconds
    "generate": "answer prompts from arguments, files, JSON lines or standard input",
    "chat": "talk to a model in the terminal, about a document if you like",
    "serve": "serve a model over HTTP, with the API of OpenAI",
    "batch": "answer the rows of JSON-lines or Parquet files, on this machine or over a cluster",
    "plan": "what fits, what moves and how long it takes, before anything runs",
    "cache": "list, check or delete the KV blocks of a directory",
}
INTERRUPTED = 130
OUTPUT_CLOSED = 141


class Parser(argparse.ArgumentParser):
    """Reports a wrong argument in one sentence, without usage lines."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {one_line(message, LONGEST)}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status. An error is reported in one sentence."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    verbose = "--verbose" in arguments
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")  # results are UTF-8 in every locale
    try:
        with _log_to_stderr(verbose):
            args = _parse(arguments)
            status = int(args.run(args))
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        discard(sys.stdout)
        return OUTPUT_CLOSED
    except KeyboardInterrupt:
        return _complain(arguments, "interrupted", INTERRUPTED)
    except Exception as error:
        try:
            sys.stdout.flush()
        except (OSError, ValueError):
            discard(sys.stdout)
        refused = isinstance(error, (ConfigError, ModelError, RequestError))
        return _complain(arguments, f"error: {Boundary(verbose).sentence(error)}", 2 if refused else 1)


@contextmanager
def _log_to_stderr(verbose: bool) -> Iterator[None]:
    """Log warnings to standard error, and all that is said of the engine if `verbose`.

    A calling program that has configured logging keeps its settings.
    """
    logger = logging.getLogger("nanovllm")
    handler = _Handler(verbose)
    if logger.hasHandlers():
        yield
        return
    level = logger.level
    logger.addHandler(handler)
    if verbose:
        logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


class _Handler(logging.Handler):
    """Writes to standard error: plain messages, and tracebacks only if `verbose`."""

    def __init__(self, verbose: bool) -> None:
        super().__init__()
        self._verbose = verbose

    def emit(self, record: logging.LogRecord) -> None:
        say(self.format(record) if self._verbose else record.getMessage())


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(prog="nanovllm", description="Runs prompts whose KV cache is larger than device memory, exactly.")
    parser.add_argument("--version", action="version", version=f"nanovllm {__version__}", help="show the version")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    named = _command(arguments)
    known = parser
    for command, summary in COMMANDS.items():
        if command == named:
            known = importlib.import_module(f"nanovllm.apps.cli.{command}").add_parser(subparsers, summary)
        else:
            subparsers.add_parser(command, help=summary)
    if known is not parser:
        known.add_argument("--verbose", action="store_true", help="log what the engine holds and where, and tracebacks")
    args, unknown = parser.parse_known_args(arguments)
    if args.command is None:
        parser.error(f"no command is given: name one of {', '.join(COMMANDS)}, or see {parser.prog} --help")
    if hasattr(args, "prompts") and not any(word.startswith("-") for word in unknown):
        args.prompts += unknown  # argparse takes only the first consecutive prompts
    elif unknown:
        flag = unknown[0].partition("=")[0]
        see = f"see {known.prog} --help"
        known.error(unknown_name_message("argument", flag, known._option_string_actions, otherwise=see))
    if hasattr(args, "model"):
        resolve_model(args)
    return args


def _command(arguments: Sequence[str]) -> str | None:
    return next((word for word in arguments if not word.startswith("-")), None)


def _complain(arguments: Sequence[str], sentence: str, status: int) -> int:
    say(f"nanovllm {_command(arguments)}: {sentence}")
    return status
