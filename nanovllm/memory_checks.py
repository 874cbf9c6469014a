"""The one place where a size is held against what there is, in whole numbers, before anything is allocated."""

from __future__ import annotations

from nanovllm.errors import ConfigError

LARGE = 4 << 20  # bytes from which an allocation is checked by itself


def check_fits(what: str, num_bytes: int, free: int, where: str, remedy: str) -> None:
    """Raise ConfigError if `num_bytes` are more than `free` bytes.

    what: what takes them, such as "num_gpu_blocks=8: that is". where: "the host has". remedy: what to do.
    """
    if num_bytes > free:
        raise ConfigError(f"{what} {gib(num_bytes)} and {where} {gib(max(free, 0))} free; {remedy}")


def gib(num_bytes: int) -> str:
    """For messages, whatever the size: "1.50 GiB"."""
    hundredths = num_bytes * 100 // 2**30  # in whole numbers: a size in a file may be beyond what a float holds
    return f"{hundredths // 100}.{hundredths % 100:02d} GiB" if num_bytes >= 0 else f"-{gib(-num_bytes)}"
