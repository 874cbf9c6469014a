"""How much memory this machine, this container and this process have, in bytes. Linux only."""

from __future__ import annotations

import ctypes
import os
import re
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SYSTEM_ROOT = Path("/")  # tests put files of their own in its place
# Threads that start later take a stack each, and malloc maps 64 MiB for some of them.
ADDRESS_SPACE_RESERVE = 512 << 20
_V2_LIMITS, _V2_USAGE = ("memory.max", "memory.high"), "memory.current"  # above memory.high the process is throttled
_V1_LIMITS, _V1_USAGE = ("memory.limit_in_bytes",), "memory.usage_in_bytes"


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """A bound on bytes, and how many of them are taken. `name` says what sets it."""

    name: str
    limit: int
    used: int

    @property
    def left(self) -> int:
        return max(0, self.limit - self.used)


def memory_limits() -> list[MemoryLimit]:
    """Every limit that holds for this process."""
    return [*_cgroup_limits(SYSTEM_ROOT), *_resource_limits()]


def mapped_bytes() -> int:
    """Address space that this process has mapped, resident or not."""
    return _statm()[0]


def address_space_left() -> int | None:
    """Bytes that may still be mapped; None where `ulimit -v` sets no bound."""
    return min((limit.left for limit in _resource_limits() if limit.name == "ulimit -v"), default=None)


# ---- resource limits


def _resource_limits() -> Iterator[MemoryLimit]:
    """`ulimit -v` and `ulimit -d`, less what threads will map."""
    mapped, data = _statm()
    for name, number, used in (("ulimit -v", resource.RLIMIT_AS, mapped), ("ulimit -d", resource.RLIMIT_DATA, data)):
        limit, _ = resource.getrlimit(number)
        if limit != resource.RLIM_INFINITY:
            yield MemoryLimit(name, limit, used + ADDRESS_SPACE_RESERVE)


def _statm() -> tuple[int, int]:
    """Bytes of address space that are mapped, and those of them that are data or stack."""
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[0]) * resource.getpagesize(), int(fields[5]) * resource.getpagesize()


# ---- cgroups


def _cgroup_limits(root: Path) -> Iterator[MemoryLimit]:
    """The limits of this process's memory cgroups and of all that they lie in, of which each holds."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    for line in [*lines, "0::/", "0:memory:/"]:  # a container may see its own cgroup as the root, whatever its path
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers == "":
            yield from _up_to(root / "sys/fs/cgroup", path, _V2_LIMITS, _V2_USAGE)
        elif "memory" in controllers.split(","):
            yield from _up_to(root / "sys/fs/cgroup/memory", path, _V1_LIMITS, _V1_USAGE)


def _up_to(mount: Path, path: str, limit_files: tuple[str, ...], usage_file: str) -> Iterator[MemoryLimit]:
    parts = [part for part in path.split("/") if part not in ("", ".", "..")]
    for depth in range(len(parts), -1, -1):
        yield from _limits_of(mount.joinpath(*parts[:depth]), limit_files, usage_file)


def _limits_of(directory: Path, limit_files: tuple[str, ...], usage_file: str) -> Iterator[MemoryLimit]:
    """The limits that are set here. File pages that would be dropped when needed are not counted as used."""
    for name in limit_files:
        limit, used = _number(directory / name), _number(directory / usage_file)
        if limit is not None and used is not None:
            yield MemoryLimit(f"cgroup {name}", limit, max(0, used - _droppable(directory / "memory.stat")))


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # absent, or "max"
        return None


def _droppable(stat_file: Path) -> int:
    """Version 1 says `total_` of a cgroup and all within it."""
    try:
        text = stat_file.read_text()
    except OSError:
        return 0
    for name in ("total_inactive_file", "inactive_file"):
        if match := re.search(rf"^{name} (\d+)", text, re.MULTILINE):
            return int(match.group(1))
    return 0


# glibc's mallopt: parameters of <malloc.h>, and what `keep_freed_memory` sets them to.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
MAPPED_BYTES = 256 << 20  # the attention state of 16K tokens with 32 heads of 128 has as many
KEPT_BYTES = 512 << 20
_MALLOC_SETTINGS = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """Have malloc keep up to KEPT_BYTES that were freed, for the whole process, and say whether it does.

    Each layer of a step allocates what the one before has freed. By default malloc hands buffers of that size back to
    the system each time, and page faults then cost 3 to 6% of a prefill of 1,024 tokens or more. Memory in one piece of
    MAPPED_BYTES or more, as KV pools are, still goes back when it is freed. Settings of malloc in the environment have
    precedence, and where malloc is not glibc's nothing is changed.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or any(name in os.environ for name in _MALLOC_SETTINGS):
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, MAPPED_BYTES) and mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES))


def total_bytes() -> int:
    """Memory of the machine, or what cgroups and resource limits let this process have if that is less."""
    return min([_meminfo("MemTotal"), *(limit.limit for limit in memory_limits())])


def available_bytes() -> int:
    """Memory that could be allocated now without swapping, within the limits of this process."""
    return min([_meminfo("MemAvailable"), *(limit.left for limit in memory_limits())])


def container_free_bytes() -> int | None:
    """Memory that cgroups and resource limits leave, beyond which the kernel kills; None without a limit."""
    return min((limit.left for limit in memory_limits()), default=None)


def rss_bytes() -> int:
    """Resident memory of this process now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def peak_rss_bytes() -> int:
    """Most resident memory that this process ever had."""
    match = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(match.group(1)) * 1024 if match else rss_bytes()


def _meminfo(field: str) -> int:
    match = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    if match is None:
        raise OSError(f"/proc/meminfo has no {field}")
    return int(match.group(1)) * 1024
