"""How one request's tokens are chosen and when it ends."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from nanovllm.errors import RequestError

GREEDY_EPS = 1e-5  # below this a temperature only scales rounding noise: it means greedy


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling of one request, under vLLM's names and rules; immutable, refused at once when invalid.

    temperature: 0 is greedy. top_k: 0 and -1 both mean off. top_p in (0, 1]. min_p in [0, 1], relative to the most
    likely token. seed: the same seed gives the same tokens, whatever else is in the batch. max_tokens: None
    generates up to max_model_len. stop_token_ids end the request with finish_reason "stop"; ignore_eos goes on past
    the model's own end tokens, not past stop_token_ids.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    ignore_eos: bool = False
    stop_token_ids: Sequence[int] = ()

    def __post_init__(self) -> None:
        # vLLM's callers pass None for "no stop tokens" and keep using the list they passed.
        object.__setattr__(self, "stop_token_ids", _token_ids(self.stop_token_ids))
        _check(self)

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_EPS


def _token_ids(value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        _refuse("stop_token_ids", "must be a list of token ids", value)
    for token in value:
        if not _is_int(token) or token < 0:
            _refuse("stop_token_ids", "must hold token ids, whole numbers of at least 0", token)
    return tuple(value)


def _check(p: SamplingParams) -> None:
    _check_number("temperature", p.temperature, "must be a number of at least 0", lambda x: x >= 0)
    _check_number("top_p", p.top_p, "must be a number above 0 and at most 1", lambda x: 0 < x <= 1)
    _check_number("min_p", p.min_p, "must be a number from 0 to 1", lambda x: 0 <= x <= 1)
    if not _is_int(p.top_k) or p.top_k < -1:
        _refuse("top_k", "must be a whole number of at least 1, or 0 or -1 for off", p.top_k)
    if p.seed is not None and (not _is_int(p.seed) or not -(2**63) <= p.seed < 2**63):
        _refuse("seed", "must be None or a whole number that fits 64 bits", p.seed)
    if p.max_tokens is not None and (not _is_int(p.max_tokens) or p.max_tokens < 1):
        _refuse("max_tokens", "must be None or a whole number of at least 1", p.max_tokens)
    if not isinstance(p.ignore_eos, bool):
        _refuse("ignore_eos", "must be True or False", p.ignore_eos)


def _check_number(name: str, value: float, rule: str, holds: Callable[[float], bool]) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # A NaN fails every comparison; an int can be too large for a float.
    if not is_number or not abs(value) <= sys.float_info.max or not holds(value):
        _refuse(name, rule, value)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _refuse(name: str, rule: str, value: object) -> NoReturn:
    raise RequestError(f"{name}={value!r}: {rule}")
