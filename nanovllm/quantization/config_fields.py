"""Reading a `quantization_config`, which is not trusted: its fields, and the patterns that select modules."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from nanovllm.errors import ModelError, quoted, unknown_name_message
from nanovllm.model_files.json_fields import NULL, TEXT, Field, checked_fields, integer, list_of

WHERE = "quantization_config"
NAMES = list_of(TEXT, 1 << 16) | NULL
GROUP_SIZE = integer(-1, 1 << 20)  # -1: one group for all inputs
EMBEDDING, HEAD = "model.embed_tokens", "lm_head"

MAX_PATTERN = 256
_MAX_REPEATS = 4  # a match takes up to length^repeats steps
# What could make a match take exponential time, or look outside the name.
_UNSAFE = re.compile(r"\)\s*[*+?{]|\(\?|\\[0-9]|[*+?}][*+{]")


def read_fields(
    config: Mapping[str, Any], rules: Mapping[str, Field], without_effect: Collection[str], where: str = WHERE
) -> dict[str, Any]:
    """The fields of `rules` that the config sets; null counts as not set.

    Raises ModelError for values that break their rule, and for other fields unless they are null or `without_effect`.
    """
    given = {name: value for name, value in config.items() if value is not None}
    for name in given:
        if name not in rules and name not in without_effect:
            raise ModelError(f"{where}: {unknown_name_message('field', name, [*rules, *without_effect], rules)}.")
    return checked_fields(where, given, rules)


def refuse_unless(fields: Mapping[str, Any], name: str, *allowed: Any, where: str = WHERE) -> None:
    """Raise ModelError if a field has a value other than those `allowed`; a field that is not set passes."""
    if name in fields and fields[name] not in allowed:
        supported = " or ".join(quoted(value) for value in allowed)
        raise ModelError(f"{where}: {name}={quoted(fields[name])} is not supported; supported: {supported}.")


def checked_group_size(group_size: int) -> int:
    """The size, if the kernels support it. Raises ModelError otherwise."""
    if group_size != -1 and (group_size < 32 or group_size % 32):
        raise ModelError(
            f"{WHERE}: group_size={group_size} is not supported; supported: multiples of 32, such as 32, 64 and 128, "
            "and -1 for one group."
        )
    return group_size


@dataclass(frozen=True, slots=True)
class Modules:
    """Which matrices of the network are quantized.

    targets: patterns of which a quantized module matches one; ignored: patterns of which it matches none. A pattern is
    a name, "re:" and a regular expression that must match the begin of the name, or "Linear" for all. as_parts:
    `ignored` also stops the modules whose names begin or end with a pattern's parts, as in Transformers' lists
    `modules_to_not_convert`.
    """

    ignored: tuple[str, ...] = ()
    targets: tuple[str, ...] = ("Linear",)
    as_parts: bool = True
    head: bool = False  # whether the output projection can be quantized

    def __post_init__(self) -> None:
        for pattern in (*self.ignored, *self.targets):
            _check_pattern(pattern)

    def include(self, module: str) -> bool:
        """Whether the module is quantized. The embedding never is."""
        if module == EMBEDDING or (module == HEAD and not self.head):
            return False
        if not any(_matches(target, module) for target in self.targets):
            return False
        return not any(_matches(name, module) or (self.as_parts and _is_part(name, module)) for name in self.ignored)


def _matches(pattern: str, module: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    return pattern in ("Linear", module)


def _is_part(name: str, module: str) -> bool:
    return module.startswith(f"{name}.") or module.endswith(name)


def _check_pattern(pattern: str) -> None:
    """Raise ModelError for a regular expression that is wrong or could take very long."""
    if not pattern.startswith("re:"):
        return
    expression = pattern[3:]
    repeats = sum(expression.count(sign) for sign in "*+{")
    if len(expression) > MAX_PATTERN or repeats > _MAX_REPEATS or _UNSAFE.search(expression):
        raise ModelError(
            f"{WHERE}: the pattern {quoted(pattern)} is not supported: a regular expression may have {MAX_PATTERN} "
            f"characters and {_MAX_REPEATS} repeats, but no repeated groups, look-arounds and back references; list "
            "the names of the modules instead."
        )
    try:
        re.compile(expression)
    except (re.error, OverflowError, RecursionError) as error:
        raise ModelError(f"{WHERE}: {quoted(pattern)} is no regular expression: {error}.") from None
