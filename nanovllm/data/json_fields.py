"""Reading the JSON files of a model directory, which are not trusted: sizes are bounded and every field is checked.

A mapping from names to `Field`s describes a file. A value that breaks its field's rule raises a ModelError with file,
field, value and rule.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanovllm.errors import MOST_QUOTED, ModelError, one_line, quoted, told

MAX_JSON_BYTES = 64 << 20  # an index of 100,000 tensors has 10 MiB
MAX_SIZE = 2**31 - 1  # of counts: the product of two still fits 64 bits
MAX_NESTING = 64


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises ModelError for anything else, also for very large or deeply nested files."""
    try:
        if not path.is_file():
            raise ModelError(f"{path} is not a file.")
        if (size := path.stat().st_size) > MAX_JSON_BYTES:
            raise ModelError(f"{path} has {size} bytes; a JSON file of a model has at most {MAX_JSON_BYTES}.")
        content = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise ModelError(f"{path} cannot be read as JSON: it is nested too deeply.") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise ModelError(f"{path} cannot be read as JSON: {told(error)}.") from error
    if _is_nested_beyond(content, MAX_NESTING):
        raise ModelError(f"{path} cannot be read as JSON: it is nested too deeply.")
    if not isinstance(content, dict):
        raise ModelError(f"{path} must hold a JSON object, but it holds a {type(content).__name__}.")
    return content


def _is_nested_beyond(content: Any, most: int) -> bool:
    """Whether containers are nested more than `most` deep. Python's own limit differs by version."""
    level = [content]
    for _ in range(most):
        members = (item.values() if isinstance(item, dict) else item for item in level if isinstance(item, dict | list))
        level = [inner for item in members for inner in item if isinstance(inner, dict | list)]
        if not level:
            return False
    return True


@dataclass(frozen=True, slots=True)
class Field:
    """A rule for a value. `rule` completes the sentence "must be ..."."""

    rule: str
    holds: Callable[[Any], bool]

    def __or__(self, other: Field) -> Field:
        return Field(f"{self.rule} or {other.rule}", lambda value: self.holds(value) or other.holds(value))


def integer(low: int, high: int = MAX_SIZE) -> Field:
    """A whole number in [low, high]."""
    return Field(
        f"a whole number from {low} to {high}",
        lambda value: isinstance(value, int) and not isinstance(value, bool) and low <= value <= high,
    )


def number(low: float, high: float = math.inf, *, above: bool = False) -> Field:
    """A finite number in [low, high], or in (low, high] if `above`."""
    least = f"above {low:g}" if above else f"of at least {low:g}"
    most = "" if high == math.inf else f" and at most {high:g}"

    def holds(value: Any) -> bool:
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
            return False  # NaN too; a whole number can be too large for a float
        return (low < value if above else low <= value) and value <= high

    return Field(f"a number {least}{most}", holds)


def list_of(element: Field, most: int) -> Field:
    """A list of at most `most` values."""
    return Field(
        f"a list of at most {most}, each {element.rule}",
        lambda value: isinstance(value, list) and len(value) <= most and all(map(element.holds, value)),
    )


def one_of(choices: Collection[str]) -> Field:
    return Field(f"one of {', '.join(choices)}", lambda value: isinstance(value, str) and value in choices)


def only(*allowed: Any) -> Field:
    """One of these values; no other is supported."""
    rule = f"{' or '.join(map(quoted, allowed))}; others are not supported"
    return Field(rule, lambda value: any(type(value) is type(one) and value == one for one in allowed))


FLAG = Field("true or false", lambda value: isinstance(value, bool))
TEXT = Field("text", lambda value: isinstance(value, str))
OBJECT = Field("an object", lambda value: isinstance(value, dict))
LIST = Field("a list", lambda value: isinstance(value, list))
NULL = Field("null", lambda value: value is None)


def checked_fields(where: object, content: Mapping[str, Any], fields: Mapping[str, Field]) -> dict[str, Any]:
    """The values of the known fields in `content`; other names are left out.

    where: begins the message, such as the file. Raises ModelError for the first value that breaks its rule.
    """
    for name, field in fields.items():
        if name in content and not field.holds(content[name]):
            raise ModelError(f"{where}: {one_line(name, MOST_QUOTED)}={quoted(content[name])}: must be {field.rule}.")
    return {name: content[name] for name in fields if name in content}
