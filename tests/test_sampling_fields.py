"""max_tokens=0, allowed_token_ids, logits_processors, detokenize and truncate_prompt_tokens, on real engines.

And of every field that it has an effect.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import checkpoint_fixture
from engines import offloaded, random_prompt
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nanovllm import LLM, RequestOutput, RequestOutputKind, SamplingParams
from nanovllm.data.batch import PackedMask, SamplingRow
from nanovllm.errors import RequestError
from nanovllm.layers.logits import mask_
from nanovllm.layers.sampler import ALL_BANNED, sample

# of `write_byte_level`: <|end|>
VOCAB = 290
END_ID = 277
ENGINES: dict[str, dict[str, Any]] = {
    "resident": {"num_gpu_blocks": 100},
    "chunks": {"num_gpu_blocks": 100, "max_num_batched_tokens": 21},
    "preempted": {"num_gpu_blocks": 14, "max_num_batched_tokens": 40},
    "offloaded": offloaded(16, 4, 60, max_num_batched_tokens=64),
}


model_dir = checkpoint_fixture(vocab=VOCAB, eos_token_id=END_ID, tokenizer={})


def engine(model_dir: Path, name: str, **others: Any) -> LLM:
    return LLM(model_dir, **{"kvcache_block_size": 16, "max_logprobs": VOCAB, **ENGINES[name], **others})


@pytest.fixture(scope="module")
def llm(model_dir: Path) -> Iterator[LLM]:
    with engine(model_dir, "resident") as llm:
        yield llm


def run(llm: LLM, prompts: Any, params: Any) -> list[RequestOutput]:
    return llm.generate(prompts, params, use_tqdm=False)


# ---- max_tokens=0


@pytest.mark.parametrize("name", ENGINES)
def test_a_scored_prompt_generates_nothing(model_dir: Path, name: str) -> None:
    prompts = [random_prompt(length, VOCAB, 3) for length in (1, 2, 16, 17, 33, 130)]
    generating = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=3)
    scoring = SamplingParams(max_tokens=0, prompt_logprobs=3)
    with engine(model_dir, "resident") as llm:
        expected = [output.prompt_logprobs for output in run(llm, prompts, generating)]
    with engine(model_dir, name) as llm:
        outputs = run(llm, prompts, scoring)
        again = run(llm, prompts, scoring)  # over the prefix cache
        beside = run(llm, prompts, [scoring if i % 2 else generating for i in range(len(prompts))])
        assert llm.metrics().blocks.used == 0
    for found in (outputs, again, beside):
        assert [output.prompt_logprobs for output in found] == expected
    for output, length in zip(outputs, (1, 2, 16, 17, 33, 130), strict=True):
        (completion,) = output.outputs
        assert (completion.token_ids, completion.text, completion.finish_reason) == ([], "", "length")
        assert len(output.prompt_logprobs or ()) == length and output.finished
        assert output.metrics.first_token_time is None and output.metrics.finished_time is not None


# ---- allowed_token_ids


def test_only_allowed_tokens_are_sampled(llm: LLM) -> None:
    allowed = [3, 77, 280, 289]
    outputs = run(
        llm,
        [[1, 2, 3]] * 3,
        [
            SamplingParams(allowed_token_ids=allowed, max_tokens=30, seed=1, n=2, min_p=0.01, logprobs=2),
            SamplingParams(allowed_token_ids=allowed, max_tokens=30, temperature=0.0, repetition_penalty=1.3),
            SamplingParams(max_tokens=30, temperature=0.0),
        ],
    )
    masked = [token for output in outputs[:2] for completion in output.outputs for token in completion.token_ids]
    assert len(masked) == 90 and set(masked) <= set(allowed) and len(set(masked)) > 2
    assert not set(outputs[2].outputs[0].token_ids) <= set(allowed), "the row beside is free"
    logprobs = outputs[0].outputs[0].logprobs
    assert logprobs is not None and any(set(entries) - set(allowed) for entries in logprobs), "of the raw logits"


@settings(max_examples=60)
@given(st.data())
def test_a_packed_mask_is_applied_as_the_reference_does(data: st.DataObject) -> None:
    vocab = data.draw(st.integers(1, 70))
    rows = data.draw(st.lists(st.none() | st.sets(st.integers(0, vocab - 1)), min_size=1, max_size=5))
    logits = torch.randn(len(rows), vocab)
    expected = logits.clone()
    for row, allowed in enumerate(rows):
        for token in range(vocab):
            if allowed is not None and token not in allowed:
                expected[row, token] = -math.inf
    masks = [None if allowed is None else PackedMask.of(allowed, vocab) for allowed in rows]
    assert torch.equal(mask_(logits.clone(), masks), expected)
    found = sample(logits, [SamplingRow(temperature=0.0, seed=1, index=0, mask=mask) for mask in masks])
    for row, allowed in enumerate(rows):
        assert found[row] == (ALL_BANNED if allowed == set() else int(expected[row].argmax()))


# ---- logits_processors


def test_processors_see_tokens_and_change_one_row_only(llm: LLM) -> None:
    seen: list[tuple[list[int], list[int], list[int]]] = []

    def count_up(prompt_ids: list[int], past_ids: list[int], logits: Tensor) -> Tensor:
        seen.append((prompt_ids, past_ids, list(logits.shape)))
        assert logits.dtype == torch.float32
        return torch.nn.functional.one_hot(torch.tensor(prompt_ids[0] + len(past_ids)), VOCAB) * 1000.0

    plain = SamplingParams(temperature=0.0, max_tokens=5)
    params = SamplingParams(temperature=0.0, max_tokens=5, logits_processors=[count_up], logprobs=0)
    alone = run(llm, [[40, 41]], plain)[0].outputs[0]
    changed, beside = run(llm, [[20, 21], [40, 41]], [params, plain])
    assert changed.outputs[0].token_ids == [20, 21, 22, 23, 24]
    assert seen == [([20, 21], [20, 21, 22, 23, 24][:count], [VOCAB]) for count in range(5)]
    assert beside.outputs[0].token_ids == alone.token_ids
    assert all(entry.logprob < -0.01 for entries in changed.outputs[0].logprobs or () for entry in entries.values())


def fail(token_ids: list[int], logits: Tensor) -> Tensor:
    raise KeyError("mine")


@pytest.mark.parametrize(
    "processor, says",
    [
        (fail, "a logits processor has failed: 'mine' (KeyError)"),
        (lambda token_ids, logits: None, "it returned None, and must return logits of shape [290]"),
        (lambda token_ids, logits: logits[:5], "it returned torch.float32 [5], and must return logits of shape [290]"),
        (lambda token_ids, logits: logits * math.nan, "it returned NaN or +infinity"),
        (lambda token_ids, logits: logits - math.inf, "no token is left to choose"),
    ],
)
def test_a_processor_that_fails_ends_its_request_alone(llm: LLM, processor: Any, says: str) -> None:
    plain = SamplingParams(temperature=0.0, max_tokens=3)
    bad = SamplingParams(temperature=0.0, max_tokens=3, logits_processors=[processor])
    alone = run(llm, [[5, 6]], plain)[0].outputs
    failed, beside = run(llm, [[1, 2], [5, 6]], [bad, plain])
    assert failed.outputs[0].finish_reason == "error" and says in (failed.error or "")
    assert beside.outputs == alone and llm.metrics().blocks.used == 0


# ---- detokenize, truncate_prompt_tokens


def test_without_detokenizing_there_is_no_text(llm: LLM) -> None:
    with_text, without = run(
        llm,
        ["the thin", "the thin"],
        [SamplingParams(temperature=0.0, max_tokens=6, logprobs=1, detokenize=flag) for flag in (True, False)],
    )
    assert with_text.outputs[0].text and without.outputs[0].text == ""
    assert with_text.outputs[0].token_ids == without.outputs[0].token_ids
    for entries in without.outputs[0].logprobs or ():
        assert all(entry.decoded_token is None for entry in entries.values())


def test_the_end_of_a_long_prompt_is_kept(llm: LLM) -> None:
    longest = llm.max_model_len
    prompt = random_prompt(longest + 50, VOCAB, 8)
    for keep, max_tokens, kept in [(3, 2, 3), (longest, 1, longest), (-1, 4, longest - 1)]:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, truncate_prompt_tokens=keep)
        output = run(llm, [prompt], params)[0]
        assert output.prompt_token_ids == prompt[-kept:]
        assert (
            output.outputs
            == run(llm, [prompt[-kept:]], SamplingParams(temperature=0.0, max_tokens=max_tokens))[0].outputs
        )
    scored = SamplingParams(max_tokens=0, prompt_logprobs=0, truncate_prompt_tokens=-1)
    assert run(llm, [prompt], scored)[0].prompt_token_ids == prompt[-longest:]
    short = SamplingParams(max_tokens=1, truncate_prompt_tokens=30)
    assert run(llm, [[1, 2]], short)[0].prompt_token_ids == [1, 2]
    text = run(llm, ["the thin"], SamplingParams(max_tokens=1, truncate_prompt_tokens=2))[0]
    assert text.prompt == "the thin" and len(text.prompt_token_ids) == 2
    with pytest.raises(RequestError, match=rf"truncate_prompt_tokens={longest + 1}: must be at most max_model_len"):
        run(llm, [prompt], SamplingParams(truncate_prompt_tokens=longest + 1))
    with pytest.raises(RequestError, match="max_model_len"):
        run(llm, [prompt], SamplingParams(max_tokens=1))


# ---- every field

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 12}
SAMPLED: dict[str, Any] = {"seed": 1, "max_tokens": 12}
AB: dict[str, Any] = {**SAMPLED, "allowed_token_ids": [97, 98]}  # of a and b
ENDS: dict[str, Any] = {
    **SAMPLED,
    "allowed_token_ids": [97, END_ID],
    "stop_token_ids": [END_ID],
    "logit_bias": {END_ID: 9},
}
BEAMS: dict[str, Any] = {"temperature": 0.0, "use_beam_search": True, "n": 3, "stop_token_ids": list(range(0, 290, 9))}
# Of each field other parameters, and values each of which gives another outcome than the others.
EFFECTS: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "n": (SAMPLED, [1, 2]),
    "best_of": (SAMPLED, [None, 4]),
    "presence_penalty": (GREEDY, [0.0, 2.0]),
    "frequency_penalty": (GREEDY, [0.0, 2.0]),
    "repetition_penalty": (GREEDY, [1.0, 3.0]),
    "temperature": (SAMPLED, [0.0, 1.0, 0.3]),
    "top_p": (SAMPLED, [1.0, 0.1]),
    "top_k": (SAMPLED, [0, 2]),
    "min_p": (SAMPLED, [0.0, 0.9]),
    "seed": (SAMPLED, [1, 2]),
    "use_beam_search": ({**GREEDY, "n": 2}, [False, True]),
    "length_penalty": (BEAMS, [1.0, -5.0]),
    "early_stopping": (BEAMS, [False, True]),
    "stop": (AB, [(), "aa", "b"]),
    "stop_token_ids": (AB, [(), [97]]),
    "include_stop_str_in_output": ({**AB, "stop": "b"}, [False, True]),
    "ignore_eos": ({**ENDS, "stop_token_ids": ()}, [False, True]),
    "max_tokens": (SAMPLED, [1, 12, None]),
    "min_tokens": (ENDS, [0, 5]),
    "logprobs": (SAMPLED, [None, 0, 2, -1]),
    "prompt_logprobs": (SAMPLED, [None, 0, 2, -1]),
    "skip_special_tokens": ({**SAMPLED, "allowed_token_ids": [END_ID], "ignore_eos": True}, [True, False]),
    "logit_bias": (SAMPLED, [{}, {7: 100.0}]),
    "bad_words": (AB, [(), ["a"]]),
    "allowed_token_ids": (SAMPLED, [None, [5, 6], [7]]),
    "structured_outputs": (SAMPLED, [None, {"regex": "[ab]{3}"}]),
    "logits_processors": (SAMPLED, [(), [lambda token_ids, logits: -logits]]),
    "detokenize": (AB, [True, False]),
    "truncate_prompt_tokens": (SAMPLED, [None, 2]),
    "output_kind": (AB, list(RequestOutputKind)),
    "skip_clone": (SAMPLED, [False, True]),
}


@pytest.mark.parametrize("name", [field.name for field in fields(SamplingParams)])
def test_every_field_has_an_effect(llm: LLM, name: str) -> None:
    """Accepted and ignored is the worst that a parameter can be: a field without a row, or without an effect, fails."""
    assert name in EFFECTS, f"{name} needs a row in EFFECTS, with values whose outcomes differ"
    if name == "structured_outputs":
        pytest.importorskip("llguidance", reason="the package llguidance is not installed")
    others, values = EFFECTS[name]
    outcomes = [[outcome(llm, {**others, name: value}) for value in values] for _ in range(2)]
    assert outcomes[0] == outcomes[1], "chance makes no difference"
    assert len(set(outcomes[0])) == len(values)


def outcome(llm: LLM, given: dict[str, Any]) -> str:
    """What a caller gets, and whether a copy shares the parameters' parts; or the refusal."""
    try:
        params = SamplingParams(**given)
        outputs = list(llm.stream("the thin man", params))
    except RequestError as error:
        return str(error)
    parts = [(output.prompt_token_ids, output.prompt_logprobs, output.outputs, output.finished) for output in outputs]
    return f"{parts} {params.clone().logit_bias is params.logit_bias}"
