"""Comparison of sizes with the memory that is available, in integers, before anything is allocated."""

from __future__ import annotations

from nanovllm.errors import ConfigError

LARGE = 4 << 20  # bytes; allocations of at least this size are checked individually


def check_fits(what: str, num_bytes: int, free: int, where: str, remedy: str) -> None:
    """Raise ConfigError if `num_bytes` are more than `free` bytes.

    what: begins the message, such as "num_gpu_blocks=8: that is". where: such as "the host has". remedy: what to do.
    """
    if num_bytes > free:
        raise ConfigError(f"{what} {gib(num_bytes)} and {where} {gib(max(free, 0))} free; {remedy}")


def gib(num_bytes: int) -> str:
    """The size for messages: "1.50 GiB"."""
    hundredths = num_bytes * 100 // 2**30  # integers, since a size in a file may exceed the range of floats
    return f"{hundredths // 100}.{hundredths % 100:02d} GiB" if num_bytes >= 0 else f"-{gib(-num_bytes)}"
