"""What the machine and its container leave to this process, read from where Linux keeps it."""

from __future__ import annotations

import mmap
import subprocess
import sys
from pathlib import Path

import pytest

from nanovllm.device import memory

# Bytes of page faults in the median of seven rounds of allocations, and what a large piece leaves resident.
REUSE = """
import resource, statistics, torch
from nanovllm.device import memory
assert memory.keep_freed_memory() == {keeps}
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def layer():
    before = faults()
    pieces = [torch.ones(8 << 20, dtype=torch.uint8) for _ in range(12)]
    return faults() - before
again = statistics.median(layer() for _ in range(7))
before = memory.rss_bytes()
pool = torch.ones(memory.MAPPED_BYTES, dtype=torch.uint8)
del pool
print(again * resource.getpagesize(), memory.rss_bytes() - before)
"""


def test_resident_memory_is_of_this_process() -> None:
    before = memory.rss_bytes()
    with mmap.mmap(-1, 1 << 26) as held:
        held.write(bytes(len(held)))
        grown = memory.rss_bytes() - before
    assert 0.9 * (1 << 26) < grown < 2 * (1 << 26)
    assert memory.peak_rss_bytes() >= memory.rss_bytes()
    assert memory.peak_rss_bytes() < memory.total_bytes()


@pytest.mark.parametrize("keeps", [True, False])
def test_what_a_layer_freed_is_there_for_the_next_one(keeps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the environment says otherwise; a KV pool goes back to the system in any case."""
    for name in memory._MALLOC_SETTINGS:
        monkeypatch.delenv(name, raising=False)
    if not keeps:
        monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "131072")
    run = subprocess.run([sys.executable, "-c", REUSE.format(keeps=keeps)], capture_output=True, text=True, check=True)
    faulted, left = (int(field) for field in run.stdout.split())
    assert (faulted < 4 << 20) == keeps, faulted
    assert left < 16 << 20


def cgroup(tmp_path: Path, limit: str | None, usage: str, stat: str | None = None) -> tuple[str, str, str]:
    files = tmp_path / "limit", tmp_path / "usage", tmp_path / "stat"
    if limit is not None:
        files[0].write_text(limit + "\n")
        files[1].write_text(usage + "\n")
    if stat is not None:
        files[2].write_text(stat)
    return str(files[0]), str(files[1]), str(files[2])


@pytest.mark.parametrize("limit", [None, "max", "9223372036854771712"])
def test_without_a_container_limit_the_machine_counts(
    limit: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_CGROUP_FILES", (cgroup(tmp_path, limit, "1000000"),))
    meminfo = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    assert memory.total_bytes() == int(meminfo["MemTotal"].split()[0]) * 1024
    assert 0.5 < memory.available_bytes() / (int(meminfo["MemAvailable"].split()[0]) * 1024) < 2


def test_a_container_limit_counts_when_it_is_lower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = cgroup(tmp_path, str(300 << 20), str(100 << 20))
    absent = (str(tmp_path / "absent"),) * 3
    for variants in ((files, absent), (absent, files)):  # version 2, version 1
        monkeypatch.setattr(memory, "_CGROUP_FILES", variants)
        assert (memory.total_bytes(), memory.available_bytes()) == (300 << 20, 200 << 20)


@pytest.mark.parametrize("prefix", ["", "total_"])  # version 2, version 1
def test_file_pages_that_would_be_dropped_are_not_taken(
    prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stat = f"anon 1\nfile 9\n{prefix}inactive_file {60 << 20}\nactive_file 7\n"
    files = cgroup(tmp_path, str(300 << 20), str(100 << 20), stat)
    monkeypatch.setattr(memory, "_CGROUP_FILES", (files,))
    assert memory.available_bytes() == 260 << 20


def test_a_container_above_its_limit_has_nothing_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_CGROUP_FILES", (cgroup(tmp_path, str(300 << 20), str(310 << 20)),))
    assert memory.available_bytes() == 0
