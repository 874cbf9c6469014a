"""Adjustments, cuts and log-probabilities against Transformers' own logits processors, on the same logits."""

from __future__ import annotations

import math
from array import array
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from engines import random_prompt, token_ids
from torch import Tensor
from transformers import (
    LogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from nanovllm import LLM, SamplingParams
from nanovllm.data.batch import LogitAdjustments, SamplingRow, token_array
from nanovllm.engine.request import banned_tokens
from nanovllm.layers.logits import adjust_
from nanovllm.layers.sampler import kept_in_order, scale_

VOCAB = 97
ROWS = 12
ENDS = [*range(10, 40), 8, 9]  # so many that an end token comes soon


def random_logits(seed: int) -> Tensor:
    return 3 * torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(seed))


def random_tokens(seed: int, lowest: int = 0) -> list[list[int]]:
    """A history for each row, of different lengths, with repetitions."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(lowest, 40, (ROWS,), generator=generator).tolist()
    return [torch.randint(0, VOCAB // 2, (length,), generator=generator).tolist() for length in lengths]


def processed(processor: LogitsProcessor, histories: list[list[int]], logits: Tensor) -> Tensor:
    """Transformers' result, row by row: its histories must all have the same length."""
    rows = [processor(torch.tensor([ids]), row[None].clone()) for ids, row in zip(histories, logits, strict=True)]
    return torch.cat(rows)


def test_bad_words_in_the_output() -> None:
    """Transformers looks for a word's beginning in prompt and output, vLLM and this engine in the output alone."""
    words = [(5,), (7, 8), (7, 9), (1, 2, 3), (2, 2)]
    outputs = [[], [7], [8, 7], [1, 2], [7, 1, 2], [2], [2, 2], [3, 1], [5], [1, 1, 2], [7, 7], [1, 2, 3]]
    logits = random_logits(5)
    oracle = NoBadWordsLogitsProcessor([list(word) for word in words], eos_token_id=96)
    # Transformers fails on an empty history; a token that begins no word stands for it.
    expected = processed(oracle, [output or [50] for output in outputs], logits)
    rows = [LogitAdjustments(banned=token_array(banned_tokens(words, output))) for output in outputs]
    assert torch.equal(adjust_(logits.clone(), rows), expected)


CUTS: list[dict[str, Any]] = [
    {"temperature": 0.3},
    {"top_k": 7},
    {"top_p": 0.6},
    {"min_p": 0.1},
    {"temperature": 1.8, "min_p": 0.05, "top_k": 20, "top_p": 0.8},
]


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_temperature_and_cuts(cut: dict[str, Any]) -> None:
    """Transformers cuts to top_k, top_p and then min_p unless its warpers are called in vLLM's order, as here."""
    logits = random_logits(7)
    expected = TemperatureLogitsWarper(cut.get("temperature", 1.0))(torch.tensor([]), logits.clone())
    if "min_p" in cut:
        expected = MinPLogitsWarper(cut["min_p"])(torch.tensor([]), expected)
    if "top_k" in cut:
        expected = TopKLogitsWarper(cut["top_k"])(torch.tensor([]), expected)
    if "top_p" in cut:
        expected = TopPLogitsWarper(cut["top_p"])(torch.tensor([]), expected)
    row = SamplingRow(seed=0, index=0, **cut)
    for width in (VOCAB, 40):
        scores, tokens, complete = kept_in_order(scale_(logits.clone(), [row] * ROWS), [row] * ROWS, width)
        found = torch.full_like(logits, -math.inf).scatter_(1, tokens, scores)
        assert torch.equal(found[complete], expected[complete])
        assert complete.all() or width < VOCAB


def test_everything_together_in_the_order_of_the_docstring() -> None:
    """Bans, bias, repetition, temperature; frequency and presence, which Transformers lacks, by their formula."""
    logits = random_logits(8)
    prompts = random_tokens(9, lowest=1)
    outputs = random_tokens(10, lowest=1)
    bias = {3: 2.0, 5: -1.0}
    expected = processed(SequenceBiasLogitsProcessor([[[t], b] for t, b in bias.items()]), prompts, logits)
    together = [prompt + output for prompt, output in zip(prompts, outputs, strict=True)]
    expected = processed(RepetitionPenaltyLogitsProcessor(1.4), together, expected)
    counts = torch.stack([torch.bincount(torch.tensor(output), minlength=VOCAB) for output in outputs])
    expected = expected - 0.6 * counts - 0.9 * (counts > 0)
    expected[:, [20, 21]] = -math.inf
    rows = [
        LogitAdjustments(
            banned=token_array([20, 21]),
            biased=token_array(bias),
            biases=array("d", bias.values()),
            repetition_penalty=1.4,
            frequency_penalty=0.6,
            presence_penalty=0.9,
            prompt_tokens=token_array(prompt),
            output_tokens=token_array(output),
        )
        for prompt, output in zip(prompts, outputs, strict=True)
    ]
    assert torch.equal(adjust_(logits.clone(), rows), expected)


# params of this engine -> arguments of Transformers' generate
GENERATED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"repetition_penalty": 1.5}, {"repetition_penalty": 1.5}),
    (
        {"logit_bias": {5: 3.0, 60: -2.0, 33: -math.inf}},
        {"sequence_bias": [[[5], 3.0], [[60], -2.0], [[33], -math.inf]]},
    ),
    ({"min_tokens": 9, "stop_token_ids": [8, 9], "ignore_eos": False}, {"min_new_tokens": 9, "eos_token_id": ENDS}),
    (
        {"repetition_penalty": 1.3, "logit_bias": {2: 2.0}, "min_tokens": 3, "ignore_eos": False},
        {"repetition_penalty": 1.3, "sequence_bias": [[[2], 2.0]], "min_new_tokens": 3, "eos_token_id": ENDS[:-2]},
    ),
]


@pytest.mark.parametrize(("params", "arguments"), GENERATED, ids=str)
def test_greedy_generation(params: dict[str, Any], arguments: dict[str, Any], tmp_path: Path) -> None:
    reference = make_checkpoint(tmp_path, vocab=VOCAB, seed=4, eos_token_id=ENDS[:-2])
    prompts = [random_prompt(length, VOCAB, seed=7) for length in (1, 5, 17, 40)]
    given = SamplingParams(**{"temperature": 0.0, "max_tokens": 30, "ignore_eos": True, **params})
    with LLM(tmp_path, kvcache_block_size=16, num_gpu_blocks=60, max_num_batched_tokens=20) as llm:
        found = token_ids(llm, prompts, given)
    expected = []
    for prompt in prompts:
        input_ids = torch.tensor([prompt])
        settings = {"eos_token_id": None, "pad_token_id": 0, "max_new_tokens": 30, "do_sample": False, **arguments}
        with torch.inference_mode():
            output = reference.generate(input_ids, attention_mask=torch.ones_like(input_ids), **settings)
        expected.append(output[0, len(prompt) :].tolist())
    assert found == expected
    if "min_tokens" in params:
        assert all(len(tokens) > params["min_tokens"] for tokens in found)
        assert any(len(tokens) < 30 for tokens in found), "no end token was met"
