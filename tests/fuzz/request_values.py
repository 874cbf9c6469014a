"""Values that people, programs and mistakes put into requests and flags."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from hypothesis import strategies as st

from nanovllm import SamplingParams

HUGE = 10**4000  # with more than 4,300 digits hypothesis could not show it
PARAMETERS = [field.name for field in fields(SamplingParams) if field.name != "output_kind"]

numbers = st.one_of(
    st.integers(-3, 70),
    st.integers(),
    st.floats(),
    st.floats(0, 2),
    st.sampled_from([0, 1, -1, 2**31, 2**63, -(2**63) - 1, 10**24, HUGE, -HUGE, 1e300, 1e-300, 5e-324, -0.0]),
)
texts = st.one_of(
    st.text(max_size=8),
    st.sampled_from(["", "a", "th", " a", "日本", "\0", "\ud800", "x\udcff", "<|end|>", "none"]),
    st.sampled_from(["x" * 5000, "9" * 5000]),
)
scalars = st.one_of(st.none(), st.booleans(), numbers, texts)
token_ids = st.one_of(st.integers(0, 299), st.integers(), numbers)
token_lists = st.one_of(
    st.lists(token_ids, max_size=6),
    st.lists(st.integers(0, 299), max_size=70),
    st.integers(290, 300).map(lambda count: list(range(count))),
)
biases = st.one_of(
    st.dictionaries(token_ids, st.one_of(numbers, st.just(float("-inf"))), max_size=5),
    st.integers(298, 300).map(lambda count: dict.fromkeys(range(count), float("-inf"))),
)
anything = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(texts, inner, max_size=4)),
    max_leaves=8,
)

# For each parameter mostly what it is for, so that requests run, and sometimes anything.
_SENSIBLE: dict[str, Any] = {
    "n": st.integers(1, 5),
    "best_of": st.one_of(st.none(), st.integers(1, 5)),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "repetition_penalty": st.one_of(st.floats(0.1, 3), st.floats(min_value=5e-324)),
    "temperature": st.one_of(st.just(0.0), st.floats(0, 3), st.floats(min_value=0)),
    "top_p": st.floats(0, 1),
    "top_k": st.integers(-1, 400),
    "min_p": st.floats(0, 1),
    "seed": st.integers(-(2**63), 2**63 - 1),
    "use_beam_search": st.booleans(),
    "length_penalty": st.one_of(st.just(1.0), st.floats(-5, 5), st.floats(allow_nan=False)),
    "early_stopping": st.sampled_from([True, False, "never"]),
    "stop": st.one_of(texts, st.lists(texts, max_size=4)),
    "stop_token_ids": token_lists,
    "max_tokens": st.one_of(st.none(), st.integers(0, 80)),
    "min_tokens": st.integers(0, 10),
    "logprobs": st.integers(-1, 20),
    "prompt_logprobs": st.integers(-1, 20),
    "logit_bias": biases,
    "bad_words": st.lists(texts, max_size=4),
    "allowed_token_ids": st.one_of(st.none(), token_lists),
    "truncate_prompt_tokens": st.one_of(st.none(), st.integers(-1, 70)),
    "structured_outputs": st.one_of(
        st.none(),
        st.sampled_from(
            [
                {"regex": "[a-z]{2}"},
                {"choice": ["a", "日本"]},
                {"grammar": 'start: "a" start | "b"'},
                {"json_object": True},
                {"json": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}},
            ]
        ),
        st.dictionaries(st.sampled_from(["json", "regex", "choice", "grammar", "json_object"]), anything, max_size=2),
    ),
}


def parameter(name: str) -> st.SearchStrategy[Any]:
    sensible = _SENSIBLE.get(name, st.booleans())
    return st.one_of(sensible, sensible, sensible, anything)


params = st.fixed_dictionaries({}, optional={name: parameter(name) for name in PARAMETERS})
few_params = st.lists(st.sampled_from(PARAMETERS), max_size=4, unique=True).flatmap(
    lambda names: st.fixed_dictionaries({name: parameter(name) for name in names})
)
prompts = st.one_of(
    st.just("a prompt"),
    texts,
    token_lists,
    st.fixed_dictionaries({"prompt": texts}, optional={"cache_salt": anything}),
    st.fixed_dictionaries({"prompt_token_ids": token_lists}, optional={"cache_salt": texts}),
    anything,
)
messages = st.one_of(
    st.lists(
        st.fixed_dictionaries(
            {"role": st.one_of(st.sampled_from(["user", "assistant", "system"]), texts)},
            optional={"content": st.one_of(texts, anything)},
        ),
        max_size=3,
    ),
    anything,
)
