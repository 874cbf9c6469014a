"""The command line under limits of the system: little address space, a container's memory, few files, no home."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cli_helpers import GREEDY, write_jsonl

GIB = 1 << 30
QUESTION = {"messages": [{"role": "user", "content": "a known question"}]}
MANY = ("--max-num-seqs", "40000")  # of 1,024 tokens, which could use 20 GiB of KV cache
# The command line with another root directory instead of the system's, in which it looks for cgroups.
CONTAINED = """
import sys
from pathlib import Path
from nanovllm.device import memory
memory.SYSTEM_ROOT = Path(sys.argv.pop(1))
from nanovllm.apps.cli.main import main
sys.exit(main())
"""


@pytest.fixture(scope="module")
def question(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Chat, so that the process that renders templates is started under the limits too."""
    return write_jsonl(tmp_path_factory.mktemp("question") / "in.jsonl", QUESTION)


@pytest.fixture(scope="module")
def known(model: str, question: str) -> list[int]:
    """The answer without limits."""
    return answer(run(model, question))


def run(
    model: str, question: str, *options: str, ulimit: str = "", root: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """`nanovllm generate` on the question, in a shell that sets limits first."""
    start = ["-m", "nanovllm"] if root is None else ["-c", CONTAINED, str(root)]
    command = [sys.executable, *start, "generate", "--model", model, "--jsonl", question, "--json", *GREEDY, *options]
    shell = f'{f"ulimit {ulimit} && " if ulimit else ""}exec "$@"'
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


def write_cgroup(root: Path, version: int, limit: int, usage: int) -> Path:
    """A root in which this process's cgroup, a service in a slice, is in one with a limit."""
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if version == 1 else ("memory.max", "memory.current")
    slice_ = root / "sys/fs/cgroup" / ("memory" if version == 1 else "") / "a.slice"
    (slice_ / "b.service").mkdir(parents=True)
    (slice_ / names[0]).write_text(f"{limit}\n")
    (slice_ / names[1]).write_text(f"{usage}\n")
    (root / "proc/self").mkdir(parents=True)
    line = "4:memory:/a.slice/b.service" if version == 1 else "0::/a.slice/b.service"
    (root / "proc/self/cgroup").write_text(f"{line}\n")
    return root


@pytest.mark.slow
def test_default_sizes_respect_the_address_space(model: str, question: str, known: list[int]) -> None:
    """6 GB on a machine with more: sizes from the machine's memory ended with a traceback."""
    assert answer(run(model, question, *MANY, ulimit="-v 6000000")) == known


@pytest.mark.slow
def test_default_sizes_respect_the_containers_memory(model: str, question: str, tmp_path: Path) -> None:
    root = write_cgroup(tmp_path, 2, GIB, GIB - (1 << 16))
    assert "0.00 GiB free" in refused(run(model, question, root=root))


@pytest.mark.slow
@pytest.mark.parametrize("version", [1, 2])
def test_a_container_with_room_is_used(
    version: int, model: str, question: str, known: list[int], tmp_path: Path
) -> None:
    assert answer(run(model, question, *MANY, root=write_cgroup(tmp_path, version, 3 * GIB, GIB))) == known


@pytest.mark.slow
def test_few_files_and_no_home_suffice(model: str, question: str, known: list[int]) -> None:
    """Nothing can be written under /proc, by root either."""
    nowhere: dict[str, Any] = dict.fromkeys(("HOME", "HF_HOME", "XDG_CACHE_HOME", "TMPDIR"), "/proc/none")
    assert answer(run(model, question, ulimit="-n 12", **nowhere)) == known


@pytest.mark.slow
@pytest.mark.parametrize("ulimit", ["-v 1200000", "-v 1000000", "-d 500000"])
def test_too_little_is_refused_in_one_sentence(ulimit: str, model: str, question: str) -> None:
    assert "GiB" in refused(run(model, question, ulimit=ulimit))
