"""Validation of sampling parameters. Each error message names the field, its value and the rule."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from nanovllm.errors import RequestError, quoted
from nanovllm.outputs import RequestOutputKind

MOST_SEQUENCES = 2**31 - 1  # the largest max_num_seqs
GREEDY_EPS = 1e-5  # lower temperatures mean greedy sampling


def check(params: Any) -> None:
    """Raise RequestError for the first invalid field of a SamplingParams."""
    _check_numbers(params)
    _check_counts(params)
    _check_flags(params)
    _check_lists(params)
    _check_together(params)


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
    if p.max_tokens is not None and (not _is_int(p.max_tokens) or p.max_tokens < 1):
        _refuse("max_tokens", "must be None or a whole number of at least 1", p.max_tokens)
    if not _is_int(p.min_tokens) or p.min_tokens < 0:
        _refuse("min_tokens", "must be a whole number of at least 0", p.min_tokens)
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(p, name)
        if value is not None and (not _is_int(value) or value < -1):
            _refuse(name, "must be None, a whole number of at least 0, or -1 for the whole vocabulary", value)


def _check_flags(p: Any) -> None:
    for name in ("use_beam_search", "include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
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
    for token in _sequence("stop_token_ids", p.stop_token_ids, "must be a list of token ids"):
        if not _is_int(token) or token < 0:
            _refuse("stop_token_ids", "must hold token ids, whole numbers of at least 0", token)
    if p.logit_bias is not None and not isinstance(p.logit_bias, Mapping):
        _refuse("logit_bias", "must be a dict from token id to a number", p.logit_bias)
    for token, bias in (p.logit_bias or {}).items():
        if not _is_int(token) or token < 0:
            _refuse("logit_bias", "must hold token ids, whole numbers of at least 0", token)
        if bias != -math.inf:
            _check_number("logit_bias", bias, "must hold numbers, or -inf to ban a token", lambda x: True)


def _check_together(p: Any) -> None:
    if p.max_tokens is not None and p.min_tokens > p.max_tokens:
        _refuse("min_tokens", f"must be at most max_tokens={quoted(p.max_tokens)}", p.min_tokens)
    sequences = p.best_of if p.best_of is not None else p.n
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
    for name in ("logit_bias", "bad_words"):
        if getattr(p, name):
            _refuse(name, "must be empty with use_beam_search, which ranks by the raw logits", getattr(p, name))
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
