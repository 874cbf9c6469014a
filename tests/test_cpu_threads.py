"""The threads of the CPU kernels: each piece of work is done once, and results are those of one thread."""

from __future__ import annotations

import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from nanovllm.ops.cpu_kernels import cpu_linear

REPOSITORY = Path(__file__).parent.parent
AFTER_FORK = """
import os, torch
from nanovllm.ops.cpu_kernels import cpu_linear
x, weight = torch.randn(3, 512), torch.randn(1024, 512)
expected = cpu_linear(x, weight, num_threads=2)
child = os.fork()
if child == 0:
    os._exit(0 if torch.equal(cpu_linear(x, weight, num_threads=2), expected) else 1)
assert os.waitpid(child, 0)[1] == 0
"""
# There is no room for a thread's stack.
WITHOUT_MORE_THREADS = """
import resource, torch
from nanovllm.ops.cpu_kernels import cpu_linear
x, weight = torch.randn(3, 512), torch.randn(1024, 512)
expected = cpu_linear(x, weight, num_threads=1)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 20), resource.RLIM_INFINITY))
assert torch.equal(cpu_linear(x, weight, num_threads=64), expected)
"""


def test_callers_at_the_same_time_get_what_one_thread_computes() -> None:
    x = torch.randn(40, 512)
    weight = torch.randn(1000, 512)
    expected = cpu_linear(x, weight, num_threads=1)

    def matches(seed: int) -> bool:
        rows = 1 + seed * 7 % 40
        threads = 1 + seed % 5
        return torch.equal(cpu_linear(x[:rows], weight, num_threads=threads), expected[:rows])

    with ThreadPoolExecutor(6) as callers:
        assert all(callers.map(matches, range(300)))


def test_more_threads_than_pieces_or_cores() -> None:
    x = torch.randn(1, 256)
    weight = torch.randn(272, 256)
    expected = cpu_linear(x, weight, num_threads=1)
    assert torch.equal(cpu_linear(x, weight, num_threads=1000), expected)


@pytest.mark.slow
def test_a_forked_process_has_threads_of_its_own() -> None:
    subprocess.run([sys.executable, "-W", "ignore", "-c", AFTER_FORK], check=True, cwd=REPOSITORY, timeout=120)


@pytest.mark.slow
def test_where_the_system_gives_no_more_threads_one_does_the_work() -> None:
    subprocess.run([sys.executable, "-c", WITHOUT_MORE_THREADS], check=True, cwd=REPOSITORY, timeout=120)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++ to build with")
def test_every_piece_is_done_once_and_nothing_races(tmp_path: Path) -> None:
    sources = [str(REPOSITORY / "tests" / "cpu_threads.cpp"), str(REPOSITORY / "csrc" / "cpu_threads.cpp")]
    flags = ["-std=c++17", "-O1", "-g1", "-pthread", "-fsanitize=thread", f"-I{REPOSITORY / 'csrc'}"]
    program = str(tmp_path / "cpu_threads")
    subprocess.run(["g++", *flags, *sources, "-o", program], check=True)
    # Without randomised addresses, which older sanitizers cannot place their shadow beside.
    command = ["setarch", "-R", program] if shutil.which("setarch") else [program]
    result = subprocess.run([*command, "3", "2000"], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr[-3000:]
