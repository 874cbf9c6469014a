"""The real command line with a standard output that is full."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from cli_helpers import GREEDY, SMALL_CACHE


def shell(line: str, *arguments: str, stdin: Any = subprocess.DEVNULL) -> subprocess.CompletedProcess[str]:
    """The real command line with redirections: `line` is shell, in which "$@" is nanovllm with `arguments`."""
    command = ["sh", "-c", line, "sh", sys.executable, "-m", "nanovllm", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, stdin=stdin)


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--stream"], ["--json"]])
def test_a_full_disk_costs_a_sentence(model: str, options: list[str]) -> None:
    done = shell('"$@" >/dev/full', "generate", "--model", model, *SMALL_CACHE, *GREEDY, "one", *options)
    assert done.returncode == 1
    assert done.stderr == "nanovllm generate: error: No space left on device\n"
