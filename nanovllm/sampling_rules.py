"""Validation of sampling parameters. Each error message names the field, its value and the rule."""

from __future__ import annotations

import inspect
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn

from nanovllm.errors import RequestError, quoted, told
from nanovllm.outputs import RequestOutputKind

MOST_SEQUENCES = 2**31 - 1  # the largest max_num_seqs
GREEDY_EPS = 1e-5  # lower temperatures mean greedy sampling
FLAGS = (
    "use_beam_search",
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
    "detokenize",
    "skip_clone",
)
KINDS = ("json", "regex", "choice", "grammar", "json_object")  # of structured outputs


def check(params: Any) -> None:
    """Raise RequestError for the first invalid field of a SamplingParams."""
    _check_numbers(params)
    _check_counts(params)
    _check_flags(params)
    _check_lists(params)
    _check_processors(params.logits_processors)
    _check_together(params)


def check_structured_outputs(params: Any) -> None:
    """Raise RequestError for the first invalid field of a StructuredOutputsParams."""
    given = [name for name in KINDS if getattr(params, name) is not None]
    if len(given) != 1:
        raise RequestError(
            f"structured outputs have {' and '.join(given) or 'no kind'}: give exactly one of {', '.join(KINDS)}"
        )
    for name in ("regex", "grammar", "whitespace_pattern"):
        if (text := getattr(params, name)) is not None:
            if not isinstance(text, str) or not text:
                _refuse(name, "must be text that is not empty", text)
            check_characters(name, text)
    if params.json is not None:
        _check_schema(params.json)
    if params.choice is not None:
        _check_choice(params.choice)
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


def _check_choice(choice: Any) -> None:
    rule = "must be a list of at least one text"
    if not _sequence("choice", choice, rule):
        _refuse("choice", rule, choice)
    for text in choice:
        if not isinstance(text, str):
            _refuse("choice", rule, choice)
        check_characters("choice", text)


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


def _check_numbers(p: Any) -> None:
    _check_number("presence_penalty", p.presence_penalty, "must be a number from -2 to 2", lambda x: -2 <= x <= 2)
    _check_number("frequency_penalty", p.frequency_penalty, "must be a number from -2 to 2", lambda x: -2 <= x <= 2)
    _check_number("repetition_penalty", p.repetition_penalty, "must be a number above 0", lambda x: x > 0)
    _check_number("temperature", p.temperature, "must be a number of at least 0", lambda x: x >= 0)
    _check_number("top_p", p.top_p, "must be a number above 0 and at most 1", lambda x: 0 < x <= 1)
    _check_number("min_p", p.min_p, "must be a number from 0 to 1", lambda x: 0 <= x <= 1)
    _check_number("length_penalty", p.length_penalty, "must be a number", lambda x: True)


def _check_counts(p: Any) -> None:
    if not _is_int(p.n) or p.n < 1:
        _refuse("n", "must be a whole number of at least 1", p.n)
    if p.best_of is not None and (not _is_int(p.best_of) or p.best_of < p.n):
        _refuse("best_of", f"must be None or a whole number of at least n={p.n}", p.best_of)
    for name in ("n", "best_of"):
        if (getattr(p, name) or 0) > MOST_SEQUENCES:
            _refuse(name, f"must be at most {MOST_SEQUENCES:,}", getattr(p, name))
    if not _is_int(p.top_k) or p.top_k < -1:
        _refuse("top_k", "must be a whole number of at least 1, or 0 or -1 for off", p.top_k)
    if p.seed is not None and (not _is_int(p.seed) or not -(2**63) <= p.seed < 2**63):
        _refuse("seed", "must be None or a whole number that fits 64 bits", p.seed)
    if p.max_tokens is not None and (not _is_int(p.max_tokens) or p.max_tokens < 0):
        _refuse("max_tokens", "must be None or a whole number of at least 0", p.max_tokens)
    if not _is_int(p.min_tokens) or p.min_tokens < 0:
        _refuse("min_tokens", "must be a whole number of at least 0", p.min_tokens)
    truncated = p.truncate_prompt_tokens
    if truncated is not None and (not _is_int(truncated) or (truncated < 1 and truncated != -1)):
        rule = "must be None, a whole number of at least 1, or -1 for as many as the model can take"
        _refuse("truncate_prompt_tokens", rule, truncated)
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(p, name)
        if value is not None and (not _is_int(value) or value < -1):
            _refuse(name, "must be None, a whole number of at least 0, or -1 for the whole vocabulary", value)


def _check_flags(p: Any) -> None:
    for name in FLAGS:
        if not isinstance(getattr(p, name), bool):
            _refuse(name, "must be True or False", getattr(p, name))
    if not isinstance(p.early_stopping, bool) and p.early_stopping != "never":
        _refuse("early_stopping", 'must be True, False or "never"', p.early_stopping)
    if not isinstance(p.output_kind, RequestOutputKind):
        _refuse("output_kind", "must be a RequestOutputKind", p.output_kind)


def _check_lists(p: Any) -> None:
    if not isinstance(p.stop, str):
        _check_strings("stop", p.stop, "must be a string or a list of strings")
    elif not p.stop:
        _refuse("stop", "must not hold an empty string, which would end every text at once", p.stop)
    else:
        check_characters("stop", p.stop)
    _check_strings("bad_words", p.bad_words, "must be a list of strings")
    for name in ("stop_token_ids", "allowed_token_ids"):
        for token in _sequence(name, getattr(p, name), "must be a list of token ids"):
            if not _is_int(token) or token < 0:
                _refuse(name, "must hold token ids, whole numbers of at least 0", token)
    if p.allowed_token_ids is not None and not p.allowed_token_ids:
        _refuse("allowed_token_ids", "must be None or hold at least one token id", p.allowed_token_ids)
    if p.logit_bias is not None and not isinstance(p.logit_bias, Mapping):
        _refuse("logit_bias", "must be a dict from token id to a number", p.logit_bias)
    for token, bias in (p.logit_bias or {}).items():
        if not _is_int(token) or token < 0:
            _refuse("logit_bias", "must hold token ids, whole numbers of at least 0", token)
        if bias != -math.inf:
            _check_number("logit_bias", bias, "must hold numbers, or -inf to ban a token", lambda x: True)


def _check_processors(processors: Any) -> None:
    rule = "must be a list of functions (output token ids, logits) -> logits, or with the prompt's token ids in front"
    for function in _sequence("logits_processors", processors, rule):
        if not callable(function) or takes_prompt(function) is None:
            _refuse("logits_processors", rule, function)


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


def _check_together(p: Any) -> None:
    if p.max_tokens is not None and p.min_tokens > p.max_tokens:
        _refuse("min_tokens", f"must be at most max_tokens={quoted(p.max_tokens)}", p.min_tokens)
    if p.stop and not p.detokenize:
        _refuse("detokenize", "must be True with stop, which is found in the text", p.detokenize)
    sequences = p.best_of if p.best_of is not None else p.n
    if p.max_tokens == 0:
        _check_scoring(p, sequences)
    if p.use_beam_search:
        _check_beam_search(p, sequences)
        return
    if p.temperature < GREEDY_EPS and sequences > 1:
        name = "n" if p.n > 1 else "best_of"
        _refuse(name, "must be 1 with greedy sampling, whose sequences would all be the same", getattr(p, name))
    if p.early_stopping is not False:
        _refuse("early_stopping", "needs use_beam_search=True", p.early_stopping)
    if p.length_penalty != 1.0:
        _refuse("length_penalty", "needs use_beam_search=True", p.length_penalty)


def _check_scoring(p: Any, sequences: int) -> None:
    """The rules of max_tokens=0."""
    if p.prompt_logprobs is None:
        _refuse("max_tokens", "must be at least 1, or 0 with prompt_logprobs, which scores the prompt alone", 0)
    if sequences > 1:
        name = "n" if p.n > 1 else "best_of"
        _refuse(name, "must be 1 with max_tokens=0, which generates nothing", getattr(p, name))


def _check_beam_search(p: Any, width: int) -> None:
    if width < 2:
        _refuse("use_beam_search", "needs n or best_of of at least 2, the beam width", p.use_beam_search)
    for name, off in (("temperature", 0.0), ("top_p", 1.0), ("min_p", 0.0)):
        if getattr(p, name) != off:
            _refuse(name, f"must be {off:g} with use_beam_search, which does not sample", getattr(p, name))
    if p.top_k not in (-1, 0):
        _refuse("top_k", "must be off (0 or -1) with use_beam_search, which does not sample", p.top_k)
    for name, off in (("presence_penalty", 0.0), ("frequency_penalty", 0.0), ("repetition_penalty", 1.0)):
        if getattr(p, name) != off:
            _refuse(name, f"must be {off:g} with use_beam_search, which ranks by the raw logits", getattr(p, name))
    for name in ("logit_bias", "bad_words", "logits_processors"):
        if getattr(p, name):
            _refuse(name, "must be empty with use_beam_search, which ranks by the raw logits", getattr(p, name))
    if p.allowed_token_ids is not None:
        _refuse(
            "allowed_token_ids", "must be None with use_beam_search, which ranks by the raw logits", p.allowed_token_ids
        )
    if p.structured_outputs is not None:
        rule = "must be None with use_beam_search, which ranks by the raw logits: use n or best_of"
        _refuse("structured_outputs", rule, p.structured_outputs)
    if p.stop:
        _refuse("stop", "must be empty with use_beam_search, whose beams end with a token: use stop_token_ids", p.stop)


def _check_strings(name: str, value: object, rule: str) -> None:
    for item in _sequence(name, value, rule):
        if not isinstance(item, str):
            _refuse(name, rule, value)
        if not item:
            _refuse(name, "must not hold an empty string", value)
        check_characters(name, item)


def _sequence(name: str, value: object, rule: str) -> Sequence[Any]:
    if value is None:
        return ()
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        _refuse(name, rule, value)
    return value


def _check_number(name: str, value: float, rule: str, holds: Callable[[float], bool]) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # A NaN fails every comparison; an int can be too large for a float.
    if not is_number or not abs(value) <= sys.float_info.max or not holds(value):
        _refuse(name, rule, value)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _refuse(name: str, rule: str, value: object) -> NoReturn:
    raise RequestError(f"{name}={quoted(value)}: {rule}")
