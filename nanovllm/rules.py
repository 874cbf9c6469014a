"""What the value of an argument must be: one rule for each field of `EngineConfig` and `SamplingParams`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from nanovllm.errors import quoted

MOST_COUNT = 2**31 - 1  # tokens, sequences, blocks: more than any machine has, and small enough for integer tensors


@dataclass(frozen=True, slots=True)
class Rule:
    """holds: whether a value keeps the rule, which `text` puts into words. most: the largest number that does."""

    holds: Callable[[Any], bool]
    text: str
    most: float | None = None

    def check(self, name: str, value: Any, error: type[Exception]) -> None:
        """Raise `error` with the name, the value and the rule if the value breaks it."""
        if not self.holds(value):
            raise refusal(error, name, value, self.text)
        if self.most is not None and value is not None and value > self.most:
            raise refusal(error, name, value, f"must be at most {self.most:,}")


def refusal(error: type[Exception], name: str, value: object, text: str) -> Exception:
    """The error about a value."""
    return error(f"{name}={quoted(value)}: {text}")


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
