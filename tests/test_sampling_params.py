"""Sampling parameters: the defaults, and a sentence for everything that cannot be honoured."""

from __future__ import annotations

import math
import re
from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest

from nanovllm import RequestOutputKind, SamplingParams
from nanovllm.errors import RequestError

NAN, INF = math.nan, math.inf


def test_defaults() -> None:
    params = SamplingParams()
    assert {field.name: getattr(params, field.name) for field in fields(params)} == {
        "n": 1,
        "best_of": None,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "seed": None,
        "use_beam_search": False,
        "length_penalty": 1.0,
        "early_stopping": False,
        "stop": (),
        "stop_token_ids": (),
        "include_stop_str_in_output": False,
        "ignore_eos": False,
        "max_tokens": 16,
        "min_tokens": 0,
        "logprobs": None,
        "prompt_logprobs": None,
        "skip_special_tokens": True,
        "logit_bias": {},
        "bad_words": (),
        "output_kind": RequestOutputKind.CUMULATIVE,
    }


# field -> (rule in the message, values that are refused)
REFUSED: dict[str, tuple[str, list[Any]]] = {
    "temperature": ("must be a number of at least 0", [-0.1, -1, NAN, INF, -INF, 10**400, "1", None, True, [1.0]]),
    "top_p": ("must be a number above 0 and at most 1", [0, 0.0, -0.5, 1.0001, 2, NAN, INF, "0.5", None, True]),
    "min_p": ("must be a number from 0 to 1", [-0.1, 1.1, NAN, INF, "0", None, False]),
    "top_k": ("must be a whole number of at least 1, or 0 or -1 for off", [-2, -100, 1.0, 0.5, NAN, "5", None, True]),
    "seed": ("must be None or a whole number that fits 64 bits", [2**63, -(2**63) - 1, 1.0, "1", True]),
    "max_tokens": ("must be None or a whole number of at least 1", [0, -1, 1.5, "16", True]),
    "ignore_eos": ("must be True or False", [0, 1, None, "yes"]),
    "stop_token_ids": ("must be a list of token ids", [5, "12", b"12", {1: 2}, {3}]),
}


@pytest.mark.parametrize("field, value", [(field, value) for field in REFUSED for value in REFUSED[field][1]], ids=str)
def test_invalid_values_are_refused_with_field_rule_and_value(field: str, value: Any) -> None:
    with pytest.raises(RequestError) as refusal:
        SamplingParams(**{field: value})
    assert str(refusal.value) == f"{field}={value!r}: {REFUSED[field][0]}"


@pytest.mark.parametrize("token", [-1, 1.0, "7", None, True])
def test_stop_token_ids_hold_token_ids(token: Any) -> None:
    with pytest.raises(RequestError, match=rf"^stop_token_ids={re.escape(repr(token))}: must hold token ids"):
        SamplingParams(stop_token_ids=[3, token])


ACCEPTED: dict[str, list[Any]] = {
    "temperature": [0, 0.0, 1e-9, 1, 2.5, 1e30],
    "top_p": [1e-300, 0.5, 1, 1.0],
    "min_p": [0, 0.0, 1e-9, 1, 1.0],
    "top_k": [-1, 0, 1, 10**6, 2**70],
    "seed": [None, 0, -1, -(2**63), 2**63 - 1],
    "max_tokens": [None, 1, 10**9],
    "ignore_eos": [True, False],
    "stop_token_ids": [[], (), [0], (1, 2), range(3)],
}


@pytest.mark.parametrize("field, value", [(field, value) for field in ACCEPTED for value in ACCEPTED[field]], ids=str)
def test_valid_values_are_kept(field: str, value: Any) -> None:
    expected = tuple(value) if field == "stop_token_ids" else value
    assert getattr(SamplingParams(**{field: value}), field) == expected


def test_stop_token_ids_are_a_copy_and_may_be_none() -> None:
    mine = [1, 2]
    params = SamplingParams(stop_token_ids=mine)
    mine.append(3)
    assert params.stop_token_ids == (1, 2)
    assert SamplingParams(stop_token_ids=None).stop_token_ids == ()  # type: ignore[arg-type]


def test_parameters_cannot_be_changed_or_given_by_position() -> None:
    with pytest.raises(FrozenInstanceError):
        SamplingParams().top_k = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        SamplingParams(0.5)  # type: ignore[misc]
    with pytest.raises(RequestError, match="unknown sampling parameter 'temprature': did you mean 'temperature'"):
        SamplingParams(temprature=0.5)  # type: ignore[call-arg]


@pytest.mark.parametrize("temperature, greedy", [(0, True), (0.0, True), (9e-6, True), (1e-5, False), (1.0, False)])
def test_a_temperature_below_the_noise_is_greedy(temperature: float, greedy: bool) -> None:
    assert SamplingParams(temperature=temperature).is_greedy is greedy
