"""The command line in little address space."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from cli_helpers import GREEDY

MANY = ("--max-num-seqs", "40000")  # of 1,024 tokens, which could use 20 GiB of KV cache


@pytest.fixture(scope="module")
def known(model: str) -> list[int]:
    """The answer without limits."""
    return answer(run(model, ulimit="-v unlimited"))


def run(model: str, *options: str, ulimit: str) -> subprocess.CompletedProcess[str]:
    """`nanovllm generate` on a question, in a shell that sets limits first."""
    start = [sys.executable, "-m", "nanovllm", "generate"]
    command = [*start, "--model", model, "a known question", "--json", *GREEDY, *options]
    shell = f'ulimit {ulimit} && exec "$@"'
    return subprocess.run(["sh", "-c", shell, "sh", *command], capture_output=True, text=True, timeout=600)


def answer(finished: subprocess.CompletedProcess[str]) -> list[int]:
    assert finished.returncode == 0, finished.stderr
    (result,) = (json.loads(line) for line in finished.stdout.splitlines())
    tokens: list[int] = result["outputs"][0]["token_ids"]
    return tokens


def refused(finished: subprocess.CompletedProcess[str]) -> str:
    """The one sentence on standard error."""
    assert finished.returncode == 2, finished.stderr
    (sentence,) = finished.stderr.splitlines()
    assert sentence.startswith("nanovllm generate: error: ") and finished.stdout == ""
    return sentence


@pytest.mark.slow
def test_default_sizes_respect_the_address_space(model: str, known: list[int]) -> None:
    """6 GB on a machine with more: sizes from the machine's memory ended with a traceback."""
    assert answer(run(model, *MANY, ulimit="-v 6000000")) == known


@pytest.mark.slow
@pytest.mark.parametrize("ulimit", ["-v 1200000", "-v 1000000", "-d 500000"])
def test_too_little_is_refused_in_one_sentence(ulimit: str, model: str) -> None:
    assert "GiB" in refused(run(model, ulimit=ulimit))
