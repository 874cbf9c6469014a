"""Rules of sampling parameters that take several of them, or look into one. Each error names a field and its value."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn

from nanovllm.errors import RequestError, quoted, told
from nanovllm.rules import is_number, is_whole, refusal

GREEDY_EPS = 1e-5  # lower temperatures mean greedy sampling
KINDS = ("json", "regex", "choice", "grammar", "json_object")  # of structured outputs


def check_lists(values: Mapping[str, Any]) -> None:
    """Raise RequestError for the first wrong element of a list, by the parameters' names."""
    if values["stop"] == "":
        _refuse("stop", "must not hold an empty string, which would end every text at once", "")
    for name, rule in (("stop", "must be a string or a list of strings"), ("bad_words", "must be a list of strings")):
        texts = values[name]
        for text in [texts] if name == "stop" and isinstance(texts, str) else _sequence(name, texts, rule):
            if not isinstance(text, str):
                _refuse(name, rule, texts)
            if not text:
                _refuse(name, "must not hold an empty string", texts)
            check_characters(name, text)
    for name in ("stop_token_ids", "allowed_token_ids"):
        _check_token_ids(name, _sequence(name, values[name], "must be a list of token ids"))
    if values["allowed_token_ids"] is not None and not values["allowed_token_ids"]:
        _refuse("allowed_token_ids", "must be None or hold at least one token id", values["allowed_token_ids"])
    bias = values["logit_bias"] or {}
    _check_token_ids("logit_bias", bias)
    for number in bias.values():
        if not is_number(number) and number != -math.inf:
            _refuse("logit_bias", "must hold numbers, or -inf to ban a token", number)
    rule = "must be a list of functions (output token ids, logits) -> logits, or with the prompt's token ids in front"
    for function in _sequence("logits_processors", values["logits_processors"], rule):
        if not callable(function) or takes_prompt(function) is None:
            _refuse("logits_processors", rule, function)


def check_together(values: Mapping[str, Any], off: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise RequestError for parameters that contradict each other. Each of them is right by itself.

    off: of the parameters that beam search does without, the values that change nothing.
    """
    n = values["n"]
    best_of = values["best_of"]
    max_tokens = values["max_tokens"]
    if best_of is not None and best_of < n:
        _refuse("best_of", f"must be None or a whole number of at least n={n}", best_of)
    if max_tokens is not None and values["min_tokens"] > max_tokens:
        _refuse("min_tokens", f"must be at most max_tokens={quoted(max_tokens)}", values["min_tokens"])
    if values["stop"] and not values["detokenize"]:
        _refuse("detokenize", "must be True with stop, which is found in the text", False)
    several = "n" if n > 1 else "best_of" if (best_of or 1) > 1 else None
    if max_tokens == 0:
        if values["prompt_logprobs"] is None:
            _refuse("max_tokens", "must be at least 1, or 0 with prompt_logprobs, which scores the prompt alone", 0)
        if several:
            _refuse(several, "must be 1 with max_tokens=0, which generates nothing", values[several])
    if not values["use_beam_search"]:
        if values["temperature"] < GREEDY_EPS and several:
            rule = "must be 1 with greedy sampling, whose sequences would all be the same"
            _refuse(several, rule, values[several])
        for name, default in (("early_stopping", False), ("length_penalty", 1.0)):
            if values[name] != default:
                _refuse(name, "needs use_beam_search=True", values[name])
        return
    if not several:
        _refuse("use_beam_search", "needs n or best_of of at least 2, the beam width", True)
    for name, same in off.items():
        if values[name] not in same:
            rule = f"must be {same[0]!r} with use_beam_search, which ranks tokens by the raw logits"
            _refuse(name, rule, values[name])


def check_structured_outputs(params: Any) -> None:
    """Raise RequestError for the first invalid field of a StructuredOutputsParams."""
    given = [name for name in KINDS if getattr(params, name) is not None]
    if len(given) != 1:
        kinds = " and ".join(given) or "no kind"
        raise RequestError(f"structured outputs have {kinds}: give exactly one of {', '.join(KINDS)}")
    for name in ("regex", "grammar", "whitespace_pattern"):
        if (text := getattr(params, name)) is not None:
            if not isinstance(text, str) or not text:
                _refuse(name, "must be text that is not empty", text)
            check_characters(name, text)
    if params.json is not None:
        _check_schema(params.json)
    if params.choice is not None:
        rule = "must be a list of at least one text"
        for text in _sequence("choice", params.choice, rule) or [None]:
            if not isinstance(text, str):
                _refuse("choice", rule, params.choice)
            check_characters("choice", text)
    if params.json_object is not None and params.json_object is not True:
        _refuse("json_object", "must be True or left out", params.json_object)
    for name, needs in (
        ("disable_any_whitespace", ("json", "json_object")),
        ("disable_additional_properties", ("json",)),
        ("whitespace_pattern", ("json", "json_object")),
    ):
        value = getattr(params, name)
        if name != "whitespace_pattern" and not isinstance(value, bool):
            _refuse(name, "must be True or False", value)
        if value and given[0] not in needs:
            _refuse(name, f"needs {' or '.join(needs)}", value)
    if params.disable_any_whitespace and params.whitespace_pattern:
        _refuse("whitespace_pattern", "needs disable_any_whitespace=False", params.whitespace_pattern)


def _check_schema(schema: Any) -> None:
    if not isinstance(schema, str | Mapping):
        _refuse("json", "must be a JSON schema, as a dict, as text, or as a pydantic model class", schema)
    try:
        if isinstance(schema, str):
            check_characters("json", schema)
            json.loads(schema)
        else:
            json.dumps(schema, allow_nan=False, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        _refuse("json", "must hold no half of a surrogate pair, which is no character", schema)
    except (TypeError, ValueError, RecursionError) as error:
        _refuse("json", f"must be a JSON schema, and is not JSON ({told(error)})", schema)


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


def _check_token_ids(name: str, tokens: Iterable[Any]) -> None:
    for token in tokens:
        if not is_whole(token) or token < 0:
            _refuse(name, "must hold token ids, whole numbers of at least 0", token)


def _sequence(name: str, value: object, rule: str) -> Sequence[Any]:
    if value is None:
        return ()
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        _refuse(name, rule, value)
    return value


def _refuse(name: str, rule: str, value: object) -> NoReturn:
    raise refusal(RequestError, name, value, rule)
