"""The real command line with standard streams that are closed or full, and bytes that are no text at a terminal."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from cli_helpers import GREEDY, SMALL_CACHE

from nanovllm import LLM, SamplingParams


@pytest.fixture(scope="module")
def expected(model: str) -> str:
    with LLM(model, kvcache_block_size=16, num_gpu_blocks=80) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
        return llm.generate("one", params, use_tqdm=False)[0].outputs[0].text


def shell(line: str, *arguments: str, stdin: Any = subprocess.DEVNULL) -> subprocess.CompletedProcess[str]:
    """The real command line with redirections: `line` is shell, in which "$@" is nanovllm with `arguments`."""
    command = ["sh", "-c", line, "sh", sys.executable, "-m", "nanovllm", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, stdin=stdin)


@pytest.mark.slow
def test_streams_that_are_closed_and_not_needed(model: str, expected: str, tmp_path: Path) -> None:
    output = tmp_path / "out.txt"
    arguments = ["generate", "--model", model, *SMALL_CACHE, *GREEDY, "one", "", "--output", str(output)]
    done = shell('"$@" >&- <&- 2>&-', *arguments)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", ""), "the empty prompt failed"
    assert output.read_text() == f"{expected}\n\n"


SLOW = pytest.mark.slow


@pytest.mark.parametrize("options", [[], pytest.param(["--stream"], marks=SLOW), pytest.param(["--json"], marks=SLOW)])
def test_a_full_disk_costs_a_sentence(model: str, options: list[str]) -> None:
    done = shell('"$@" >/dev/full', "generate", "--model", model, *SMALL_CACHE, *GREEDY, "one", *options)
    assert done.returncode == 1
    assert done.stderr == "nanovllm generate: error: No space left on device\n"


@SLOW
def test_messages_that_cannot_be_written_cost_no_result(model: str, expected: str) -> None:
    arguments = ["generate", "--model", model, *SMALL_CACHE, *GREEDY, "one", "", "--progress"]
    done = shell('"$@" 2>/dev/full', *arguments)
    assert (done.returncode, done.stdout, done.stderr) == (1, f"{expected}\n\n", "")


@pytest.mark.slow
def test_a_byte_that_is_no_text_ends_no_conversation(model: str) -> None:
    """Typed at a terminal, in a locale in which Python takes such bytes for half characters."""
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "nanovllm", "chat", "--model", model, *SMALL_CACHE, "--max-tokens", "4"]
    environment = {**os.environ, "LC_ALL": "C.UTF-8", "TERM": "dumb"}
    with subprocess.Popen(command, stdin=slave, stdout=slave, stderr=subprocess.PIPE, env=environment) as process:
        assert process.stderr is not None
        os.close(slave)
        for typed in (b"one\n", b"\xff\n", b"t\xffo\n", b"three\n", b"/quit\n"):
            os.write(master, typed)
            time.sleep(0.05)
        told = process.stderr.read().decode()
        drain(master)
    os.close(master)
    assert process.returncode == 0, told
    assert told.count("nanovllm chat: error: the question is not UTF-8") == 2
    assert told.count("4 generated") == 2, "of one and three"


def drain(descriptor: int) -> None:
    """Read what the process has written, so that it can end."""
    while True:
        try:
            if not os.read(descriptor, 4096):
                return
        except OSError:  # the other side is closed
            return
