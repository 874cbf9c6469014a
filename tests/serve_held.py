"""`nanovllm serve`, whose steps, after the first one, wait as long as the file that TEST_HELD names exists."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from nanovllm.apps.cli.main import main
from nanovllm.apps.server.async_llm import AsyncLLM

VARIABLE = "TEST_HELD"


class HeldLLM(AsyncLLM):
    """Waits before a step."""

    _is_first = True

    def _step(self) -> None:
        while not self._is_first and Path(os.environ[VARIABLE]).exists():
            time.sleep(0.01)
        self._is_first = False
        super()._step()


if __name__ == "__main__":
    from nanovllm.apps.server import async_llm

    async_llm.AsyncLLM = HeldLLM  # type: ignore[misc]
    sys.exit(main(["serve", *sys.argv[1:]]))
