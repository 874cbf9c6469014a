"""Sampling parameters: a sentence for everything that cannot be honoured."""

from __future__ import annotations

import copy
import math
import pickle
import re
from dataclasses import fields
from typing import Any

import pytest

from nanovllm import SamplingParams
from nanovllm.errors import RequestError, quoted
from nanovllm.sampling_params import StructuredOutputsParams

NAN = math.nan
INF = math.inf


def one_argument(logits: object) -> object:
    return logits


FLAG = [0, None, "yes"]
# field -> values that are refused
REFUSED: dict[str, list[Any]] = {
    "temperature": [-0.1, NAN, INF, 10**400, "1", None, True],
    "top_p": [0, 1.0001, NAN, "0.5", None, True],
    "min_p": [-0.1, 1.1, NAN, None, False],
    "top_k": [-2, 1.0, "5", None, True],
    "seed": [2**63, -(2**63) - 1, 1.0, True],
    "max_tokens": [-1, 1.5, "16", True, 0],
    "min_tokens": [-1, 0.5, None, True, 17],
    **dict.fromkeys(("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "detokenize"), FLAG),
    **dict.fromkeys(("use_beam_search", "skip_clone"), FLAG),
    "output_kind": [0, "CUMULATIVE", None],
    "stop_token_ids": [5, "12", b"12", {1: 2}, {3}, [-1], [1.0], ["7"], [True]],
    "n": [0, 1.0, None, True],
    "best_of": [0, 2.0, True],
    **{name: [-2.01, 2.5, NAN, None, True] for name in ("presence_penalty", "frequency_penalty")},
    "repetition_penalty": [0, INF, "1", None, True],
    "length_penalty": [NAN, "1", None, True, 0.5],
    "early_stopping": ["always", None, 1, True, "never"],
    **{name: [-2, 1.0, True] for name in ("logprobs", "prompt_logprobs")},
    "stop": [5, b"x", {"x"}, ["x", None], "", ["x", ""]],
    "bad_words": ["word", b"x", 5, {"x"}, ["x", None], ["x", ""]],
    "logit_bias": [5, [(1, 2.0)], {1}, {-1: 1}, {"7": 1}, {3: NAN}, {3: INF}, {3: True}],
    "allowed_token_ids": [5, "12", {3}, [], [-1], ["7"]],
    "structured_outputs": [5, "json"],
    "logits_processors": [5, len, [one_argument]],
    "truncate_prompt_tokens": [0, -2, 1.0, True],
}
BEAMS: dict[str, Any] = {"use_beam_search": True, "n": 2, "temperature": 0.0}
# (parameters, what the sentence says)
REFUSED_TOGETHER: list[tuple[dict[str, Any], str]] = [
    ({"detokenize": False, "stop": "x"}, "detokenize=False: must be True with stop"),
    ({"max_tokens": 0, "prompt_logprobs": 1, "n": 2}, "n=2: must be 1 with max_tokens=0"),
    ({"max_tokens": 0, "prompt_logprobs": 1, "min_tokens": 1}, "min_tokens=1: must be at most max_tokens=0"),
    ({"n": 3, "best_of": 2}, "best_of=2"),
    ({"min_tokens": 2, "max_tokens": 1}, "min_tokens=2: must be at most max_tokens=1"),
    ({"temperature": 0.0, "n": 2}, "n=2: must be 1 with greedy sampling"),
    ({"temperature": 0.0, "best_of": 2}, "best_of=2: must be 1 with greedy sampling"),
    ({**BEAMS, "n": 1}, "use_beam_search=True: needs n or best_of of at least 2"),
    *(
        ({**BEAMS, name: value}, f"{name}={quoted(value)}: must be")
        for name, value in (
            *(("temperature", 1.0), ("top_p", 0.5), ("min_p", 0.5), ("top_k", 5), ("presence_penalty", 1.5)),
            *(("frequency_penalty", 1.5), ("repetition_penalty", 1.5), ("logit_bias", {1: 2.0}), ("stop", ["x", "y"])),
            *(("bad_words", ["x"]), ("logits_processors", [max]), ("allowed_token_ids", [1])),
            ("structured_outputs", StructuredOutputsParams(regex="a")),
        )
    ),
]


@pytest.mark.parametrize("field", REFUSED)
def test_invalid_values_are_refused_with_the_field(field: str) -> None:
    for value in REFUSED[field]:
        with pytest.raises(RequestError) as refusal:
            SamplingParams(**{field: value})
        assert str(refusal.value).startswith(f"{field}=")
        if not isinstance(value, list | dict | set) and not callable(value):
            assert quoted(value) in str(refusal.value)


def test_what_contradicts_each_other_is_refused() -> None:
    for params, says in REFUSED_TOGETHER:
        with pytest.raises(RequestError, match=re.escape(says)):
            SamplingParams(**params)


def test_every_field_has_a_refusal() -> None:
    assert {field.name for field in fields(SamplingParams)} == set(REFUSED)


def test_lists_are_copies_and_may_be_none() -> None:
    mine: dict[str, Any] = {"stop_token_ids": [1, 2], "stop": ["a"], "bad_words": ["b"], "logit_bias": {1: 2}}
    params = SamplingParams(**mine)
    for value in mine.values():
        value.clear()
    kept = (params.stop_token_ids, params.stop, params.bad_words, params.logit_bias)
    assert kept == ((1, 2), ("a",), ("b",), {1: 2.0})
    none = SamplingParams(**dict.fromkeys(mine))  # type: ignore[arg-type]
    assert (none.stop_token_ids, none.stop, none.bad_words, none.logit_bias) == ((), (), (), {})
    assert SamplingParams(stop="a").stop == ("a",) and SamplingParams(seed=-1).seed is None


def test_copies_are_apart() -> None:
    params = SamplingParams(temperature=0.0, stop="end")
    params.max_tokens = 3
    copied = pickle.loads(pickle.dumps(copy.copy(params)))
    assert copied == params == SamplingParams(temperature=0.0, max_tokens=3, stop="end")
    copied.max_tokens = 4
    assert (params.max_tokens, copied.max_tokens) == (3, 4)


def test_parameters_cannot_be_given_by_position() -> None:
    with pytest.raises(TypeError, match="positional"):
        SamplingParams(0.5)  # type: ignore[misc]
    with pytest.raises(RequestError, match="unknown sampling parameter 'temprature': did you mean 'temperature'"):
        SamplingParams(temprature=0.5)  # type: ignore[call-arg]


def test_a_temperature_below_the_noise_is_greedy() -> None:
    assert SamplingParams(temperature=9e-6).is_greedy and not SamplingParams(temperature=1e-5).is_greedy


# ---- vLLM's other ways to make and copy them


def test_from_optional_reads_none_as_the_default() -> None:
    params = SamplingParams.from_optional(n=None, temperature=None, top_k=None, seed=None, max_tokens=None, stop=None)
    assert params == SamplingParams(max_tokens=None)
    bias = SamplingParams.from_optional(logit_bias={"5": 1000, 7: -1e9, "9": 0.5}).logit_bias
    assert bias == {5: 100.0, 7: -100.0, 9: 0.5}
    for arguments, says in [
        ({"logit_bias": {"a": 1}}, "logit_bias={'a': 1}: must be a dict from token id to a number"),
        ({"logit_bias": {"1": "x"}}, "logit_bias={'1': 'x'}: must be a dict"),
        ({"temprature": None}, "did you mean 'temperature'"),
    ]:
        with pytest.raises(RequestError, match=re.escape(says)):
            SamplingParams.from_optional(**arguments)


# ---- structured outputs

HALVES = {"regex": "\ud800", "choice": ["\ud800"], "json": {"const": "\ud800"}}


def test_invalid_structured_outputs_are_refused() -> None:
    given: dict[str, Any]
    for given, says in (
        ({}, "structured outputs have no kind: give exactly one of json, regex, choice, grammar, json_object"),
        ({"regex": "a", "choice": ["a"]}, "structured outputs have regex and choice: give exactly one of"),
        ({"regexp": "a"}, "unknown parameter of structured outputs 'regexp': did you mean 'regex'?"),
        ({"regex": ""}, "regex='': must be text, not empty"),
        ({"grammar": 5}, "grammar=5: must be text, not empty"),
        *(({name: value}, ": must be ") for name, value in HALVES.items()),
        ({"choice": []}, "choice=[]: must be a list of at least one text"),
        ({"choice": ["a", 5]}, "choice=['a', 5]: must be a list of at least one text"),
        ({"json": 5}, "json=5: must be a JSON schema, as a dict, as JSON text, or as a pydantic model class"),
        ({"json": "{"}, "json='{': must be a JSON schema"),
        ({"json": {"a": NAN}}, "json={'a': nan}: must be a JSON schema"),
        ({"json": {"a": {1, 2}}}, "must be a JSON schema"),
        ({"json": "[" * 100_000}, "must be a JSON schema"),
        ({"json_object": False}, "json_object=False: must be True or left out"),
        ({"json_object": True, "disable_any_whitespace": 1}, "disable_any_whitespace=1: must be True or False"),
        ({"regex": "a", "disable_any_whitespace": True}, "disable_any_whitespace=True: needs json or json_object"),
        ({"json_object": True, "disable_additional_properties": True}, "needs json"),
        ({"json": {}, "disable_any_whitespace": True, "whitespace_pattern": " "}, "needs disable_any_whitespace=False"),
    ):
        for make in (StructuredOutputsParams, lambda **given: SamplingParams(structured_outputs=given)):
            with pytest.raises(RequestError, match=re.escape(says)):
                make(**given)
