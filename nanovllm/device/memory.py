"""How much memory this machine has and this process uses, in bytes. Linux only, as the engine is."""

from __future__ import annotations

import ctypes
import os
import re
from pathlib import Path

from nanovllm.device.memory_limits import memory_limits

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
