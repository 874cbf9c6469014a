"""Memory of this machine, this container and this process, in bytes. Linux only."""

from __future__ import annotations

import ctypes
import os
import re
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SYSTEM_ROOT = Path("/")  # tests replace it
# Later threads need a stack each, and malloc maps 64 MiB for some of them.
ADDRESS_SPACE_RESERVE = 512 << 20
# the kernel throttles above memory.high
_V2_LIMITS = ("memory.max", "memory.high")
_V2_USAGE = "memory.current"
_V1_LIMITS = ("memory.limit_in_bytes",)
_V1_USAGE = "memory.usage_in_bytes"


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """A limit in bytes, the bytes in use, and the name of what sets the limit."""

    name: str
    limit: int
    used: int

    @property
    def left(self) -> int:
        return max(0, self.limit - self.used)


def memory_limits() -> list[MemoryLimit]:
    """Every limit on this process."""
    return [*_cgroup_limits(SYSTEM_ROOT), *_resource_limits()]


def address_space_left() -> int | None:
    """Bytes that may still be mapped; None without a limit of `ulimit -v`."""
    return min((limit.left for limit in _resource_limits() if limit.name == "ulimit -v"), default=None)


# ---- resource limits


def _resource_limits() -> Iterator[MemoryLimit]:
    """`ulimit -v` and `ulimit -d`; the reserve for later threads counts as used."""
    mapped, data = _statm()
    for name, number, used in (("ulimit -v", resource.RLIMIT_AS, mapped), ("ulimit -d", resource.RLIMIT_DATA, data)):
        limit, _ = resource.getrlimit(number)
        if limit != resource.RLIM_INFINITY:
            yield MemoryLimit(name, limit, used + ADDRESS_SPACE_RESERVE)


def _statm() -> tuple[int, int]:
    """Mapped bytes of address space, and the bytes of data and stack among them."""
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[0]) * resource.getpagesize(), int(fields[5]) * resource.getpagesize()


# ---- cgroups


def _cgroup_limits(root: Path) -> Iterator[MemoryLimit]:
    """The limits of this process's memory cgroups and of all their ancestors, each of which applies."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    for line in [*lines, "0::/", "0:memory:/"]:  # a container may see its cgroup as the root
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
    """The limits of one cgroup. File pages that the kernel can drop do not count as used."""
    for name in limit_files:
        limit = _number(directory / name)
        used = _number(directory / usage_file)
        if limit is not None and used is not None:
            yield MemoryLimit(f"cgroup {name}", limit, max(0, used - _droppable(directory / "memory.stat")))


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # absent, or "max"
        return None


def _droppable(stat_file: Path) -> int:
    """Inactive file pages. Version 1 has a `total_` field for a cgroup with its descendants."""
    try:
        text = stat_file.read_text()
    except OSError:
        return 0
    for name in ("total_inactive_file", "inactive_file"):
        if match := re.search(rf"^{name} (\d+)", text, re.MULTILINE):
            return int(match.group(1))
    return 0


# Parameters of glibc's mallopt (<malloc.h>) and the values that `keep_freed_memory` sets.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
MAPPED_BYTES = 256 << 20  # the attention state of 16K tokens with 32 heads of 128
KEPT_BYTES = 512 << 20
_MALLOC_SETTINGS = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """Make malloc keep up to KEPT_BYTES of freed memory in this process; return whether it does.

    Each layer of a step allocates buffers of the size that the previous layer freed. By default malloc returns them to
    the system each time, and page faults cost 3 to 6% of a prefill of 1,024 tokens or more. Allocations of MAPPED_BYTES
    or more, such as KV pools, still return to the system. Settings of malloc in the environment take precedence; other
    allocators than glibc's are left as they are.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or any(name in os.environ for name in _MALLOC_SETTINGS):
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, MAPPED_BYTES) and mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES))


def total_bytes() -> int:
    """Memory of the machine, or the smallest limit of cgroups and resource limits if that is less."""
    return min([_meminfo("MemTotal"), *(limit.limit for limit in memory_limits())])


def available_bytes() -> int:
    """Memory that can be allocated now without swapping, within the limits of this process."""
    return min([_meminfo("MemAvailable"), *(limit.left for limit in memory_limits())])


def container_free_bytes() -> int | None:
    """Memory that cgroups and resource limits leave; the kernel kills processes beyond it. None without a limit."""
    return min((limit.left for limit in memory_limits()), default=None)


def _meminfo(field: str) -> int:
    match = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    if match is None:
        raise OSError(f"/proc/meminfo has no {field}")
    return int(match.group(1)) * 1024
