"""The engine argument `speculative_config`: its fields, with vLLM's names and defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from nanovllm.errors import ConfigError, quoted
from nanovllm.rules import is_whole

NAME = "speculative_config"
DEFAULT_LOOKUP = 5  # tokens of an n-gram
MOST_TOKENS = 1024
LATER = ("draft_model", "mtp")


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """How tokens are drafted.

    num_speculative_tokens: most drafted tokens of a sequence in a step. prompt_lookup_max, prompt_lookup_min: the
    longest and the shortest n-gram that is looked up.
    """

    method: str
    num_speculative_tokens: int
    prompt_lookup_max: int
    prompt_lookup_min: int


def speculative_config(given: Mapping[str, Any]) -> SpeculativeConfig:
    """The checked fields of the argument. Raises ConfigError."""
    names = [field.name for field in fields(SpeculativeConfig)]
    method = given.get("method")
    if method in LATER:
        raise ConfigError(f"{NAME}: method={quoted(method)} is not supported yet: use 'ngram' or leave it out")
    if method != "ngram":
        raise ConfigError(f"{NAME}: method={quoted(method)} must be 'ngram': give it, or leave the argument out")
    for name in given:
        if name not in names:
            raise ConfigError(f"{NAME}: unknown field {quoted(name)}: it has {', '.join(names)}")
    for name in names[1:]:
        value: Any = given.get(name)
        is_left_out = value is None and name != "num_speculative_tokens"
        if not is_left_out and not (is_whole(value) and 1 <= value <= MOST_TOKENS):
            raise ConfigError(f"{NAME}: {name}={quoted(value)} must be a whole number from 1 to {MOST_TOKENS}")
    longest, shortest = given.get("prompt_lookup_max"), given.get("prompt_lookup_min")
    longest, shortest = longest or shortest or DEFAULT_LOOKUP, shortest or longest or DEFAULT_LOOKUP
    if shortest > longest:
        raise ConfigError(f"{NAME}: prompt_lookup_min={shortest} must be at most prompt_lookup_max={longest}")
    return SpeculativeConfig("ngram", given["num_speculative_tokens"], longest, shortest)
