"""`python -m nanovllm`: the command line."""

from __future__ import annotations

import sys

from nanovllm.apps.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
