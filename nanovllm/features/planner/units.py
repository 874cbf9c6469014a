"""Parsing and formatting of sizes, rates and times: 80GB, 16GiB, 50GB/s, 400TFLOPS, 20us."""

from __future__ import annotations

import math
import re

SI = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "p": 10**15}
BINARY = {f"{letter}i": 1024**power for power, letter in enumerate("kmgtp", start=1)}
SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
MOST_BARE_GB = 1e5  # above that, somebody means bytes
NUMBER = r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*"


def parse_bytes(text: str) -> int:
    """Bytes of a size: 80GB, 80G and 80 are 80 * 10^9, 80GiB and 80Gi are 80 * 2^30. All parsers raise ValueError."""
    example = "a size such as 80GB or 16GiB"
    number = re.fullmatch(NUMBER, text)
    if number and float(number[1]) >= MOST_BARE_GB:
        raise ValueError(f"{text!r} is not {example}: a number without a unit counts in GB")
    return int(_parse(f"{text}G" if number else text, r"([kmgtp]i?|(?=b))b?", SI | BINARY, example))


def parse_byte_rate(text: str) -> float:
    """Bytes per second."""
    return _parse(text, r"([kmgtp]i?)?b/s", SI | BINARY, "a rate such as 50GB/s")


def parse_compute_rate(text: str) -> float:
    """Operations per second; a multiply-add is two."""
    return _parse(text, r"([kmgtp])?flop(?:s|/s)", SI, "a rate such as 400TFLOPS")


def parse_seconds(text: str) -> float:
    return _parse(text, r"([mun]?s)", SECONDS, "a time such as 20us or 1.5ms", least=0.0)


def _parse(text: str, unit: str, scales: dict[str, float] | dict[str, int], example: str, least: float = 1.0) -> float:
    match = re.fullmatch(NUMBER + unit + r"\s*", text, re.IGNORECASE)
    value = float(match[1]) * scales[(match[2] or "").lower()] if match else math.nan
    if not least <= value < math.inf:
        raise ValueError(f"{text!r} is not {example}")
    return value


def show_bytes(size: float) -> str:
    """In the largest of GB, MB and KB, powers of 1,000, that gives at least 1, else in bytes."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if size >= scale:
            return f"{size / scale:,.1f} {unit}"
    return f"{size:,.0f} bytes"


def show_rate(rate: float, unit: str) -> str:
    """In the largest decimal unit that gives at least 1, such as 3.4 TB/s."""
    for letter, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if rate >= scale:
            return f"{rate / scale:,.1f} {letter}{unit}"
    return f"{rate:,.0f} {unit}"


def show_seconds(seconds: float) -> str:
    if seconds >= 7200:
        return f"{seconds / 3600:,.1f} h"
    if seconds >= 120:
        return f"{seconds / 60:,.1f} min"
    return f"{seconds:,.2f} s" if seconds >= 1 else f"{seconds * 1e3:,.2f} ms"
