"""Memory limits of the machine, the container and the process, as Linux reports them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nanovllm.device import memory

# Bytes of page faults in the median of seven rounds of allocations, and what a large piece leaves resident.
REUSE = """
import resource, statistics, torch
from nanovllm.device import memory
from resident_memory import rss_bytes
assert memory.keep_freed_memory() == {keeps}
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def layer():
    before = faults()
    pieces = [torch.ones(8 << 20, dtype=torch.uint8) for _ in range(12)]
    return faults() - before
again = statistics.median(layer() for _ in range(7))
before = rss_bytes()
pool = torch.ones(memory.MAPPED_BYTES, dtype=torch.uint8)
del pool
print(again * resource.getpagesize(), rss_bytes() - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize("keeps", [True, False])
def test_what_a_layer_freed_is_there_for_the_next_one(keeps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the environment says otherwise; a KV pool goes back to the system in any case."""
    for name in memory._MALLOC_SETTINGS:
        monkeypatch.delenv(name, raising=False)
    if not keeps:
        monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "131072")
    command = [sys.executable, "-c", REUSE.format(keeps=keeps)]
    tests = {"PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | tests)
    faulted, left = (int(field) for field in run.stdout.split())
    assert (faulted < 4 << 20) == keeps, faulted
    assert left < 16 << 20


GIB = 1 << 30
UNLIMITED = "9223372036854771712"  # as version 1 spells it


def write_cgroup(root: Path, path: str, version: int, limit: str, usage: int, stat: str | None = None) -> None:
    """The files of a memory cgroup under a root that stands for the system's."""
    directory = root / "sys/fs/cgroup" / ("memory" if version == 1 else "") / path
    directory.mkdir(parents=True, exist_ok=True)
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if version == 1 else ("memory.max", "memory.current")
    (directory / names[0]).write_text(f"{limit}\n")
    (directory / names[1]).write_text(f"{usage}\n")
    if stat is not None:
        (directory / "memory.stat").write_text(stat)


def write_membership(root: Path, *lines: str) -> None:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text("".join(f"{line}\n" for line in lines))


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(memory, "SYSTEM_ROOT", tmp_path)
    return tmp_path


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("limit", [None, UNLIMITED])
def test_without_a_container_limit_the_machine_counts(limit: str | None, version: int, root: Path) -> None:
    if limit is not None:
        write_cgroup(root, "", version, limit, 1_000_000)
    meminfo = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    assert memory.total_bytes() == int(meminfo["MemTotal"].split()[0]) * 1024
    assert 0.5 < memory.available_bytes() / (int(meminfo["MemAvailable"].split()[0]) * 1024) < 2


@pytest.mark.parametrize("version", [1, 2])
def test_every_cgroup_that_the_process_lies_in_counts(version: int, root: Path) -> None:
    """A service's own cgroup has a limit, and the slice around it a lower one, of which others use the most."""
    write_membership(root, "0::/a.slice/b.service", "4:memory:/a.slice/b.service", "5:cpu,cpuacct:/elsewhere")
    write_cgroup(root, "a.slice/b.service", version, str(400 << 20), 100 << 20)
    write_cgroup(root, "a.slice", version, str(350 << 20), 250 << 20)
    write_cgroup(root, "", version, UNLIMITED, 900 << 20)
    assert (memory.total_bytes(), memory.available_bytes()) == (350 << 20, 100 << 20)


def test_the_throttling_limit_counts_too(root: Path) -> None:
    write_cgroup(root, "", 2, str(300 << 20), 100 << 20)
    (root / "sys/fs/cgroup/memory.high").write_text(f"{250 << 20}\n")
    assert (memory.total_bytes(), memory.available_bytes()) == (250 << 20, 150 << 20)


@pytest.mark.parametrize("version", [1, 2])
def test_file_pages_that_would_be_dropped_are_not_taken(version: int, root: Path) -> None:
    prefix = "total_" if version == 1 else ""
    stat = f"anon 1\nfile 9\n{prefix}inactive_file {60 << 20}\nactive_file 7\n"
    write_cgroup(root, "", version, str(300 << 20), 100 << 20, stat)
    assert memory.available_bytes() == 260 << 20
    write_cgroup(root, "", version, str(300 << 20), 380 << 20, stat)
    assert memory.available_bytes() == 0


LIMITED = """
import resource
from nanovllm.device import memory
resource.setrlimit(resource.{limit}, ({size}, {size}))
print(memory.total_bytes(), memory.available_bytes(), memory._statm()[0])
"""


@pytest.mark.slow
@pytest.mark.parametrize("limit", ["RLIMIT_AS", "RLIMIT_DATA"])
def test_resource_limits_count(limit: str) -> None:
    """Address space that is mapped already, and what threads will map, is not there any more."""
    code = LIMITED.format(limit=limit, size=6 * GIB)
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    total, available, mapped = map(int, run.stdout.split())
    assert total == 6 * GIB
    assert 6 * GIB - mapped - memory.ADDRESS_SPACE_RESERVE <= available < 6 * GIB
    if limit == "RLIMIT_AS":
        assert available < 6 * GIB - mapped + (64 << 20)
