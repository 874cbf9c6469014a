"""The engine argument `speculative_config`: its fields, with vLLM's names and defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass
from typing import Any

from nanovllm.errors import ConfigError, quoted
from nanovllm.rules import TEXT, argument, check_fields, check_together, one_of, whole

NAME = "speculative_config"
DEFAULT_LOOKUP = 5  # tokens of an n-gram
MOST_TOKENS = 1024
METHODS = {
    "ngram": ("method", "num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min"),
    "draft_model": ("method", "num_speculative_tokens", "model", "max_model_len"),
    "mtp": ("method", "num_speculative_tokens", "max_model_len"),
}


def _error(message: str) -> ConfigError:
    return ConfigError(f"{NAME}: {message}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """How tokens are drafted. Raises ConfigError for wrong fields."""

    method: str = argument(MISSING, one_of(*METHODS), "how tokens are drafted")
    num_speculative_tokens: int = argument(
        MISSING, whole(1, most=MOST_TOKENS), "most drafted tokens of a sequence in a step"
    )
    prompt_lookup_max: int = argument(
        DEFAULT_LOOKUP, whole(1, most=MOST_TOKENS), "the longest n-gram that is looked up"
    )
    prompt_lookup_min: int = argument(DEFAULT_LOOKUP, whole(1, most=MOST_TOKENS), "the shortest one")
    model: str = argument("", TEXT, "the draft model: a directory, a GGUF file or a name of the hub")
    max_model_len: int | None = argument(
        None,
        whole(1, also=(None,)),
        "tokens of the longest sequence that the draft model, or the model's head, drafts for; None: of the longest",
    )

    def __post_init__(self) -> None:
        check_fields(self, _error)
        too_long = self.prompt_lookup_min > self.prompt_lookup_max
        wrong = (
            ("model", self.method == "draft_model" and not self.model, "must name the draft model: give its directory"),
            ("prompt_lookup_min", too_long, f"must be at most prompt_lookup_max={self.prompt_lookup_max}"),
        )
        check_together(self, wrong, _error)


def speculative_config(given: Mapping[str, Any]) -> SpeculativeConfig:
    """The checked fields of the argument. Raises ConfigError."""
    values = {name: value for name, value in given.items() if value is not None}
    method = values.get("method")
    names = METHODS.get(method, ()) if isinstance(method, str) else ()
    for name in given:
        if names and name not in names:
            raise _error(f"unknown field {quoted(name)}: with this method it has {', '.join(names)}")
    longest = values.get("prompt_lookup_max") or values.get("prompt_lookup_min")
    if longest is not None:  # one of them is the other's default
        values = {"prompt_lookup_max": longest, "prompt_lookup_min": longest} | values
    known: dict[str, Any] = {name: values.get(name) for name in ("method", "num_speculative_tokens")}
    return SpeculativeConfig(**known | {name: values[name] for name in names if name in values})
