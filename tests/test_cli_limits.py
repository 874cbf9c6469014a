"""The command line under limits of the system: little address space, few files, no home."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from cli_helpers import GREEDY, write_jsonl

QUESTION = {"messages": [{"role": "user", "content": "a known question"}]}
MANY = ("--max-num-seqs", "40000")  # of 1,024 tokens, which could use 20 GiB of KV cache


@pytest.fixture(scope="module")
def question(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Chat, so that the process that renders templates is started under the limits too."""
    return write_jsonl(tmp_path_factory.mktemp("question") / "in.jsonl", QUESTION)


@pytest.fixture(scope="module")
def known(model: str, question: str) -> list[int]:
    """The answer without limits."""
    return answer(run(model, question, ulimit="-v unlimited"))


def run(model: str, question: str, *options: str, ulimit: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`nanovllm generate` on the question, in a shell that sets limits first."""
    start = [sys.executable, "-m", "nanovllm", "generate"]
    command = [*start, "--model", model, "--jsonl", question, "--json", *GREEDY, *options]
    shell = f'ulimit {ulimit} && exec "$@"'
    return subprocess.run(
        ["sh", "-c", shell, "sh", *command], capture_output=True, text=True, env=os.environ | environment, timeout=600
    )


def answer(finished: subprocess.CompletedProcess[str]) -> list[int]:
    assert finished.returncode == 0, finished.stderr
    (result,) = (json.loads(line) for line in finished.stdout.splitlines())
    tokens: list[int] = result["outputs"][0]["token_ids"]
    return tokens


def refused(finished: subprocess.CompletedProcess[str]) -> str:
    """The one sentence on standard error, which flags that help may follow."""
    assert finished.returncode == 2, finished.stderr
    sentence, *flags = finished.stderr.splitlines()
    assert sentence.startswith("nanovllm generate: error: ") and finished.stdout == ""
    assert all(line.startswith("--") for line in flags), flags
    return sentence


@pytest.mark.slow
def test_default_sizes_respect_the_address_space(model: str, question: str, known: list[int]) -> None:
    """6 GB on a machine with more: sizes from the machine's memory ended with a traceback."""
    assert answer(run(model, question, *MANY, ulimit="-v 6000000")) == known


@pytest.mark.slow
def test_few_files_and_no_home_suffice(model: str, question: str, known: list[int]) -> None:
    """Nothing can be written under /proc, by root either."""
    nowhere: dict[str, Any] = dict.fromkeys(("HOME", "HF_HOME", "XDG_CACHE_HOME", "TMPDIR"), "/proc/none")
    assert answer(run(model, question, ulimit="-n 12", **nowhere)) == known


@pytest.mark.slow
@pytest.mark.parametrize("ulimit", ["-v 1200000", "-v 1000000", "-d 500000"])
def test_too_little_is_refused_in_one_sentence(ulimit: str, model: str, question: str) -> None:
    assert "GiB" in refused(run(model, question, ulimit=ulimit))
