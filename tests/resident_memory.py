"""Resident memory of the test's process, as Linux reports it."""

from __future__ import annotations

import os
import re
from pathlib import Path


def rss_bytes() -> int:
    """Current resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def peak_rss_bytes() -> int:
    """Peak resident memory of this process.

    The kernel counts pages per processor, in batches: a later peak may be read as some pages less than an earlier one,
    or than resident memory was before.
    """
    match = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(match.group(1)) * 1024 if match else rss_bytes()
