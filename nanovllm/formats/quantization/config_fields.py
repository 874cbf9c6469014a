"""Reading a `quantization_config`, which is not trusted: its fields, and the patterns that select modules."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from nanovllm.data.json_fields import NULL, TEXT, Field, checked_fields, integer, list_of
from nanovllm.errors import ModelError, quoted, unknown_name_message

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
    _ignores: _Patterns = field(init=False, repr=False, compare=False)
    _is_target: _Patterns = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_ignores", _Patterns(self.ignored, self.as_parts))
        object.__setattr__(self, "_is_target", _Patterns(self.targets))

    def include(self, module: str) -> bool:
        """Whether the module is quantized. The embedding never is."""
        if module == EMBEDDING or (module == HEAD and not self.head):
            return False
        return self._is_target(module) and not self._ignores(module)


class _Patterns:
    """Whether a module matches one of the patterns; see `Modules`.

    Names are looked up, not compared one by one: a mixture of experts has 20,000 matrices and a list hundreds of names.
    """

    def __init__(self, patterns: Collection[str], as_parts: bool = False) -> None:
        """Raises ModelError for a regular expression that is wrong or could take very long."""
        self._expressions = [_compiled(pattern) for pattern in patterns if pattern.startswith("re:")]
        self._names = {pattern for pattern in patterns if not pattern.startswith("re:")}
        self._as_parts = as_parts
        self._lengths = sorted({len(name) for name in self._names})

    def __call__(self, module: str) -> bool:
        if "Linear" in self._names or module in self._names:
            return True
        if any(expression.match(module) for expression in self._expressions):
            return True
        return self._as_parts and (self._has_parent_of(module) or self._has_end_of(module))

    def _has_parent_of(self, module: str) -> bool:
        """Whether the name of the module begins with one of the names and a dot."""
        while module := module.rpartition(".")[0]:
            if module in self._names:
                return True
        return False

    def _has_end_of(self, module: str) -> bool:
        size = len(module)
        return any(module[size - length :] in self._names for length in self._lengths if length <= size)


def _compiled(pattern: str) -> re.Pattern[str]:
    """The regular expression of a pattern. Raises ModelError if it is wrong or could take very long."""
    expression = pattern.removeprefix("re:")
    repeats = sum(expression.count(sign) for sign in "*+{")
    if len(expression) > MAX_PATTERN or repeats > _MAX_REPEATS or _UNSAFE.search(expression):
        raise ModelError(
            f"{WHERE}: the pattern {quoted(pattern)} is not supported: a regular expression may have {MAX_PATTERN} "
            f"characters and {_MAX_REPEATS} repeats, but no repeated groups, look-arounds and back references; list "
            "the names of the modules instead."
        )
    try:
        return re.compile(expression)
    except (re.error, OverflowError, RecursionError) as error:
        raise ModelError(f"{WHERE}: {quoted(pattern)} is no regular expression: {error}.") from None
