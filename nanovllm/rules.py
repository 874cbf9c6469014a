"""The rules of arguments and parameters: one for each field of a dataclass, checked once, when an object is made."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from decimal import Decimal
from typing import Any, NamedTuple

from nanovllm.errors import quoted

UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
MOST_COUNT = 2**31 - 1  # tokens, sequences, blocks: more than any machine has, and small enough for integer tensors


@dataclass(frozen=True, slots=True)
class Rule:
    """What a value must be."""

    holds: Callable[[Any], bool]
    text: str  # the rule in words
    most: float | None = None  # the largest number that keeps it

    def check(self, name: str, value: Any, error: Callable[[str], Exception]) -> None:
        """Raise `error` with the name, the value and the rule if the value breaks it."""
        if not self.holds(value):
            raise refusal(error, name, value, self.text)
        if self.most is not None and value is not None and value > self.most:
            raise refusal(error, name, value, f"must be at most {self.most:,}")


def refusal(error: Callable[[str], Exception], name: str, value: object, text: str) -> Exception:
    """The error about a value."""
    return error(f"{name}={quoted(value)}: {text}")


def check_fields(values: Any, error: Callable[[str], Exception]) -> None:
    """Check each field of a dataclass that has a rule. Raises `error` with the field, the value and the rule."""
    for described in fields(values):
        if "rule" in described.metadata:
            described.metadata["rule"].check(described.name, getattr(values, described.name), error)


def check_together(
    values: Any, contradictions: Iterable[tuple[str, bool, str]], error: Callable[[str], Exception]
) -> None:
    """Check fields that are right by themselves: (the field, whether it is wrong beside the others, the rule)."""
    for name, is_wrong, rule in contradictions:
        if is_wrong:
            raise refusal(error, name, getattr(values, name), rule)


def argument(default: Any, rule: Rule, meaning: str, off: tuple[Any, ...] = ()) -> Any:
    """A field of a dataclass with its rule and its meaning in one line, which --help and the documentation show.

    off: of a parameter that beam search does without, the values that change nothing.
    """
    metadata = {"rule": rule, "help": meaning, "off": off}
    if isinstance(default, dict):
        return field(default_factory=dict, metadata=metadata)
    return field(default=default, metadata=metadata)


def is_whole(value: object) -> bool:
    """Whether the value is a whole number; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Whether the value is a finite number; True and False are none."""
    # A NaN fails every comparison; an int can be too large for a float.
    real = isinstance(value, int | float) and not isinstance(value, bool)
    return real and abs(value) <= sys.float_info.max  # type: ignore[arg-type]


def one_of(*values: Any) -> Rule:
    """One of these values."""
    text = f"must be one of {', '.join(map(str, values))}"
    return Rule(lambda value: any(isinstance(value, type(one)) and value == one for one in values), text)


def whole(least: int, other: str = "", also: tuple[Any, ...] = (), most: int | None = MOST_COUNT) -> Rule:
    """A whole number from least to most, or one of the values `also`, which `other` puts into words."""

    def holds(value: Any) -> bool:
        return (is_whole(value) and (value >= least or value in also)) or (value is None and None in also)

    none = "None or " if None in also and "None" not in other else ""
    return Rule(holds, f"must be {none}a whole number of at least {least}{other}", most)


def number(text: str, holds: Callable[[float], bool] = is_number, none: bool = False) -> Rule:
    """A finite number for which `holds` is true. none: or None."""
    return Rule(lambda value: (is_number(value) and holds(value)) or (none and value is None), text)


FLAG = Rule(lambda value: isinstance(value, bool), "must be True or False")
TEXT = Rule(lambda value: isinstance(value, str), "must be text")
TEXT_OR_NONE = Rule(lambda value: value is None or isinstance(value, str), "must be None or text")


# ---- numbers with units, and sizes


def with_unit(text: str) -> int:
    """A whole number, such as 4096, -1, 32K, 1.5m, 32Ki or 32KiB, which are 32K. Raises ValueError."""
    count = r"[-+]?\d{1,30}|\d{1,12}\.\d{1,12}(?=[kmgtKMGT])"
    unit = r"[kmgt]|[KMGT](?:iB?)?|[kmg]iB?"
    match = re.fullmatch(f"({count})({unit})?", text.strip())
    if match is None:
        raise ValueError(text)
    suffix = match[2] or ""
    value = Decimal(match[1]) * UNITS[suffix[0].upper() if "i" in suffix else suffix]
    if value != int(value):
        raise ValueError(text)
    return int(value)


class Share(NamedTuple):
    """A share of the KV cache of a sequence."""

    part: float
    tokens: int | None  # length of the sequence; None for the longest that the engine takes


def share(value: object) -> Share | None:
    """The share that text such as "10%" or "10% of 32K" stands for; None if it stands for none."""
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?) ?%(?: of (\w{1,12}))?", value) if isinstance(value, str) else None
    if match is None:
        return None
    try:
        read = Share(float(match[1]) / 100, None if match[2] is None else with_unit(match[2]))
    except ValueError:
        return None
    return read if read.part > 0 and read.tokens != 0 else None


def share_of(value: Any, tokens: int) -> Any:
    """The value of an argument; a share that names no tokens becomes one of so many."""
    read = share(value)
    return value if read is None or read.tokens is not None else f"{value} of {tokens}"


def num_bytes(value: Any, unit: int) -> int | None:
    """The bytes of a size: a number of `unit` bytes, or text with a unit of its own, such as "7M"; None for others."""
    if isinstance(value, str):
        try:
            return with_unit(value) if value and not value[-1].isdigit() else None
        except ValueError:
            return None
    return int(value * unit) if is_number(value) else None


def size(text: str, unit: int, most: int, *, least: int = 1, shares: bool = False) -> Rule:
    """None, or a size from `least` to `most` bytes; see `num_bytes`. shares: or a share."""

    def holds(value: Any) -> bool:
        if value is None or (shares and share(value) is not None):
            return True
        count = num_bytes(value, unit)
        return count is not None and least <= count <= most and (unit > 1 or isinstance(value, int | str))

    return Rule(holds, text)
