"""Reading a `quantization_config`, which is not trusted: its fields, and the patterns that select modules."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from nanovllm.data.json_fields import TEXT, Field, checked_fields, integer, list_of, only
from nanovllm.errors import ModelError, quoted

WHERE = "quantization_config"
EMBEDDING = "model.embed_tokens"
HEAD = "lm_head"
MAX_PATTERN = 256
_MAX_REPEATS = 4  # a match takes up to length^repeats steps
# What could make a match take exponential time, or look outside the name.
_UNSAFE = re.compile(r"\)\s*[*+?{]|\(\?|\\[0-9]|[*+?}][*+{]")

# A pattern that only looks for a text anywhere in a name. Tools write hundreds of these, and searching for the text is
# several times as fast as a regular expression.
_ANYWHERE = re.compile(r"re:\.\*((?:[\w-]|\\\.)+)(?:\.\*)?")

NAMES = list_of(TEXT, 1 << 16)
_WHOLE = integer(-1, 1 << 20)
# -1: one group for all inputs. The kernels take multiples of 32.
GROUP_SIZE = Field(
    "a multiple of 32, such as 32, 64 and 128, or -1 for one group",
    lambda value: _WHOLE.holds(value) and (value == -1 or (value >= 32 and value % 32 == 0)),
)
# Of the formats whose int32 pack integers: GPTQ, AWQ and AutoRound.
INTEGER_FIELDS: Mapping[str, Field] = MappingProxyType(
    {"group_size": GROUP_SIZE, "data_type": only("int"), "pack_dtype": only("int32")}
)


def read_fields(
    config: Mapping[str, Any], rules: Mapping[str, Field], where: str = WHERE, *, needed: Collection[str] = ()
) -> dict[str, Any]:
    """The fields with a rule that the config sets; null counts as not set. Other fields have no effect.

    Raises ModelError for values that break their rule, and for `needed` fields that are not set.
    """
    given = {name: value for name, value in config.items() if value is not None}
    for name in needed:
        if name not in given:
            raise ModelError(f"{where} must say the {name} of a checkpoint in this format.")
    return checked_fields(where, given, rules)


@dataclass(frozen=True, slots=True)
class Modules:
    """Which matrices of the network are quantized.

    A pattern is a name, or "re:" and a regular expression that must match the beginning of the name, or "Linear", which
    matches all.
    """

    ignored: tuple[str, ...] = ()  # patterns; a quantized module matches none of them
    targets: tuple[str, ...] = ("Linear",)  # patterns; a quantized module matches at least one
    # A name in `ignored` also matches modules that contain its parts or end with it, as in the lists
    # `modules_to_not_convert` of Transformers and AutoAWQ.
    as_parts: bool = True
    head: bool = False  # the output projection can be quantized
    # Pairs: what a module's name begins with here, and what it begins with in the whole model that the patterns name.
    prefixes: tuple[tuple[str, str], ...] = ()

    def include(self, module: str) -> bool:
        """Whether the module is quantized. Embeddings never are. Raises ModelError for a pattern that is refused."""
        if module.startswith(EMBEDDING) or (module == HEAD and not self.head):
            return False
        names = [module, *self._other_names(f"{module}.")]
        ignored = any(map(_patterns(self.ignored, self.as_parts), names))
        return not ignored and any(map(_patterns(self.targets), names))

    def _other_names(self, prefix: str) -> Iterator[str]:
        for own, other in self.prefixes:
            if prefix.startswith(own):
                yield (other + prefix.removeprefix(own)).removesuffix(".")


class _Patterns:
    """Whether a module matches one of the patterns; see `Modules`."""

    def __init__(self, patterns: tuple[str, ...], as_parts: bool) -> None:
        texts = {pattern: match[1] for pattern in patterns if (match := _ANYWHERE.fullmatch(pattern))}
        self._texts = tuple(text.replace("\\.", ".") for text in texts.values())
        expressions = (pattern for pattern in patterns if pattern.startswith("re:") and pattern not in texts)
        self._expressions = [_compiled(pattern) for pattern in expressions]
        self._names = frozenset(pattern for pattern in patterns if not pattern.startswith("re:"))
        self._ends = tuple(stripped for name in self._names if (stripped := name.strip("."))) if as_parts else ()
        self._begins = tuple(f"{name}." for name in self._ends)
        # A list can have hundreds of whole names, which are never within another name.
        self._parts = tuple(f".{name}." for name in self._ends if not name.startswith("model."))

    def __call__(self, module: str) -> bool:
        if "Linear" in self._names or module in self._names:
            return True
        if module.startswith(self._begins) or module.endswith(self._ends):
            return True
        if any(parts in f"{module}." for parts in self._parts) or any(text in module for text in self._texts):
            return True
        return any(expression.match(module) for expression in self._expressions)


@lru_cache(maxsize=16)
def _patterns(patterns: tuple[str, ...], as_parts: bool = False) -> _Patterns:
    return _Patterns(patterns, as_parts)


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
