"""The engine argument `speculative_config`: its fields, with vLLM's names and defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nanovllm.errors import ConfigError, quoted
from nanovllm.rules import whole

NAME = "speculative_config"
DEFAULT_LOOKUP = 5  # tokens of an n-gram
MOST_TOKENS = 1024
METHODS = {
    "ngram": ("method", "num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min"),
    "draft_model": ("method", "num_speculative_tokens", "model", "max_model_len"),
    "mtp": ("method", "num_speculative_tokens", "max_model_len"),
}


# Of the fields that count tokens.
RULES = {
    "num_speculative_tokens": whole(1, most=MOST_TOKENS),
    "prompt_lookup_max": whole(1, also=(None,), most=MOST_TOKENS),
    "prompt_lookup_min": whole(1, also=(None,), most=MOST_TOKENS),
    "max_model_len": whole(1, also=(None,)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """How tokens are drafted.

    num_speculative_tokens: most drafted tokens of a sequence in a step. prompt_lookup_max, prompt_lookup_min: the
    longest and the shortest n-gram that is looked up. model: the draft model, a directory, GGUF file or name of the
    hub. max_model_len: tokens of the longest sequence that it, or the model's head, drafts for; None: of the longest.
    """

    method: str
    num_speculative_tokens: int
    prompt_lookup_max: int = DEFAULT_LOOKUP
    prompt_lookup_min: int = DEFAULT_LOOKUP
    model: str = ""
    max_model_len: int | None = None


def speculative_config(given: Mapping[str, Any]) -> SpeculativeConfig:
    """The checked fields of the argument. Raises ConfigError."""
    method = given.get("method")
    model = given.get("model")
    if not isinstance(method, str) or method not in METHODS:
        raise ConfigError(f"{NAME}: method={quoted(method)} must be {' or '.join(METHODS)}: give it one of them")
    names = METHODS[method]
    for name in given:
        if name not in names:
            raise ConfigError(f"{NAME}: unknown field {quoted(name)}: with this method it has {', '.join(names)}")
    for name, rule in RULES.items():
        rule.check(f"{NAME}: {name}", given.get(name), ConfigError)
    if method == "draft_model" and (not isinstance(model, str) or not model):
        raise ConfigError(f"{NAME}: model={quoted(model)} must name the draft model: give its directory")
    longest = given.get("prompt_lookup_max")
    shortest = given.get("prompt_lookup_min")
    longest, shortest = longest or shortest or DEFAULT_LOOKUP, shortest or longest or DEFAULT_LOOKUP
    if shortest > longest:
        raise ConfigError(f"{NAME}: prompt_lookup_min={shortest} must be at most prompt_lookup_max={longest}")
    others = {name: value for name, value in given.items() if value is not None}
    return SpeculativeConfig(**others | {"prompt_lookup_max": longest, "prompt_lookup_min": shortest})
