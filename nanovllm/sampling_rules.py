"""What single sampling parameters must be, beyond the rules of `rules`: lists, functions and structured outputs."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from nanovllm.errors import RequestError
from nanovllm.rules import Rule, is_number, is_whole

GREEDY_EPS = 1e-5  # lower temperatures mean greedy sampling
TEXT_RULE = "not empty and without half of a surrogate pair, which is no character"


def check_characters(what: str, text: str) -> None:
    """Raise RequestError for a text with an unpaired surrogate, which Python strings can hold and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start]
        raise RequestError(
            f"{what} holds {half!r} at position {error.start}, half of a surrogate pair and no character: decode what "
            "it was made from as UTF-8"
        ) from None


def takes_prompt(function: Callable[..., Any]) -> bool | None:
    """Whether a logits processor is called with the prompt's token ids; None if it can be called in neither way."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some functions of other languages have none
        return False
    for count in (2, 3):
        with suppress(TypeError):
            signature.bind(*range(count))
            return count == 3
    return None


def _is_text(value: object) -> bool:
    if not isinstance(value, str) or not value:
        return False
    with suppress(UnicodeEncodeError):
        value.encode()
        return True
    return False


def _is_token_id(value: object) -> bool:
    return is_whole(value) and value >= 0  # type: ignore[operator]


def _is_list(value: object, holds: Callable[[Any], bool]) -> bool:
    """Whether it is a list, or a sequence like one, whose elements hold."""
    is_list = isinstance(value, Sequence) and not isinstance(value, str | bytes)
    return is_list and all(map(holds, value))  # type: ignore[call-overload]


def _is_bias(value: object) -> bool:
    if not isinstance(value, Mapping):
        return False
    return all(map(_is_token_id, value)) and all(is_number(bias) or bias == -math.inf for bias in value.values())


def _is_processor(value: object) -> bool:
    return callable(value) and takes_prompt(value) is not None


def _is_schema(value: object) -> bool:
    """Whether it can be written as JSON, or is its text."""
    try:
        if isinstance(value, str):
            value.encode()
            json.loads(value)
            return True
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
        return isinstance(value, Mapping)
    except (TypeError, ValueError, RecursionError):
        return False


def optional(rule: Rule) -> Rule:
    """None, or what keeps the rule."""
    return Rule(lambda value: value is None or rule.holds(value), rule.text, rule.most)


TEXT = Rule(_is_text, f"must be text, {TEXT_RULE}")
TEXTS = Rule(lambda value: _is_list(value, _is_text), f"must be a list of strings, each {TEXT_RULE}")
STOP = Rule(
    lambda value: _is_text(value) or _is_list(value, _is_text),
    f"must be a string or a list of strings, each {TEXT_RULE}",
)
CHOICE = Rule(
    lambda value: _is_list(value, lambda text: text == "" or _is_text(text)) and len(value) > 0,
    "must be a list of at least one text, without half of a surrogate pair, which is no character",
)
TOKEN_IDS = Rule(
    lambda value: _is_list(value, _is_token_id), "must be a list of token ids, whole numbers of at least 0"
)
ALLOWED = Rule(
    lambda value: _is_list(value, _is_token_id) and len(value) > 0,
    "must be None or a list of at least one token id, a whole number of at least 0",
)
BIAS = Rule(_is_bias, "must be a dict from token id to a number, or to -inf, which bans the token")
PROCESSORS = Rule(
    lambda value: _is_list(value, _is_processor),
    "must be a list of functions (output token ids, logits) -> logits, or with the prompt's token ids in front",
)
SCHEMA = Rule(_is_schema, "must be a JSON schema, as a dict, as JSON text, or as a pydantic model class")
