"""What bounds this process's memory besides the machine: its cgroups, of either version, and its resource limits."""

from __future__ import annotations

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
