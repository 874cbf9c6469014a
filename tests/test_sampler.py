"""Sampling draws from exactly the distribution that its parameters name, and from nothing but its own row."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch

from nanovllm.data.batch import LogitAdjustments, SamplingRow, token_array
from nanovllm.layers import sampler
from nanovllm.layers.sampler import ALL_BANNED, NOT_FINITE, gumbel_noise, sample
from nanovllm.ops import torch_rows

LOGITS = (-4.0, 1.0, 0.5, 0.5, 2.0, 0.0, -0.5, -1.0, -1.5, -2.5, 1.9, -0.25)  # the likeliest is token 4
DRAWS = 4000
OFF: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 1, "index": 0}


def row(**changes: Any) -> SamplingRow:
    return SamplingRow(**{**OFF, **changes})


def draws(logits: Sequence[float], count: int, **params: Any) -> list[int]:
    """The draws of one request at index 0, 1, ..."""
    rows = [row(index=index, **params) for index in range(count)]
    return sample(torch.tensor(logits).expand(count, -1), rows)


def changes(**fields: Any) -> LogitAdjustments:
    """Adjustments whose tokens are given as lists, and biases as a dict."""
    biases: dict[int, float] = fields.pop("bias", {})
    tokens = {name: token_array(fields.pop(name, ())) for name in ("banned", "prompt_tokens", "output_tokens")}
    return LogitAdjustments(**tokens, biased=token_array(biases), biases=array("d", biases.values()), **fields)


def changed(logits: Sequence[float], by: LogitAdjustments | None) -> list[float]:
    """The logits after adjustments, each written out from its definition."""
    if by is None:
        return list(logits)
    result = []
    for token, logit in enumerate(logits):
        logit += dict(zip(by.biased, by.biases, strict=True)).get(token, 0.0)
        if token in by.prompt_tokens or token in by.output_tokens:
            logit = logit / by.repetition_penalty if logit > 0 else logit * by.repetition_penalty
        logit -= by.output_tokens.count(token) * by.frequency_penalty
        logit -= by.presence_penalty if token in by.output_tokens else 0.0
        result.append(-math.inf if token in by.banned else logit)
    return result


def exact(logits: Sequence[float], temperature: float, top_k: int, top_p: float, min_p: float) -> list[float]:
    """Probabilities in fp64: softmax, cut to min_p and top_k, renormalized, cut to top_p, renormalized."""
    weights = [math.exp(value / temperature) if value > -math.inf else 0.0 for value in logits]
    order = sorted(range(len(logits)), key=lambda token: (-weights[token], token))
    kept = [token for token in order[: top_k or len(order)] if weights[token] >= min_p * weights[order[0]]]
    total = sum(weights[token] for token in kept)
    before = 0.0
    nucleus = []
    for token in kept:
        if before / total < top_p or not nucleus:
            nucleus.append(token)
        before += weights[token]
    total = sum(weights[token] for token in nucleus)
    return [weights[token] / total if token in nucleus else 0.0 for token in range(len(logits))]


def critical_chi_square(freedom: int) -> float:
    """The 0.999 quantile, by the Wilson-Hilferty approximation."""
    spread = 2 / (9 * freedom)
    return float(freedom * (1 - spread + 3.09 * spread**0.5) ** 3)


CUTS: list[dict[str, Any]] = [
    {},
    {"top_k": 1},
    {"top_k": 4},  # of two equal logits the first is kept
    {"top_p": 0.3},
    {"min_p": 0.5},
    {"top_k": 6, "top_p": 0.8},
    {"temperature": 0.8, "top_k": 9, "top_p": 0.95, "min_p": 0.05},
    {"temperature": 2.5, "top_k": 5, "top_p": 0.6, "min_p": 0.3},
]


HISTORY: dict[str, Any] = {"prompt_tokens": [0, 2, 4, 7], "output_tokens": [4, 1, 4, 10, 4]}
CHANGES: list[dict[str, Any]] = [
    {"banned": [4, 10, 4]},
    {"bias": {0: 5.0, 4: -2.0, 10: -100.0}},
    {"bias": {1: 1.5, 3: -math.inf}, "banned": [1]},
    {"repetition_penalty": 1.6, **HISTORY},
    {"repetition_penalty": 0.5, **HISTORY},
    {"frequency_penalty": 0.7, **HISTORY},
    {"presence_penalty": -2.0, "frequency_penalty": 0.4, **HISTORY},
    {
        "banned": [2],
        "bias": {4: 1.0, 9: 3.0},
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.5,
        "presence_penalty": 0.25,
        **HISTORY,
    },
]
ALL_CUTS: dict[str, Any] = {"temperature": 0.7, "top_k": 6, "top_p": 0.9, "min_p": 0.02}
CASES = [({}, cut) for cut in CUTS] + [(by, ALL_CUTS) for by in CHANGES] + [(CHANGES[-1], {})]


@pytest.mark.parametrize(("by", "cut"), CASES, ids=str)
def test_draws_follow_the_exact_distribution(by: dict[str, Any], cut: dict[str, Any]) -> None:
    adjustments = changes(**by) if by else None
    cut = {name: OFF[name] for name in ("temperature", "top_k", "top_p", "min_p")} | cut
    probabilities = exact(changed(LOGITS, adjustments), **cut)
    counts = Counter(draws(LOGITS, DRAWS, adjustments=adjustments, **cut))
    possible = {token for token, p in enumerate(probabilities) if p > 0}
    assert set(counts) <= possible, "a token that was cut off was drawn"
    expected = {token: probabilities[token] * DRAWS for token in possible}
    if len(possible) > 1:
        chi_square = sum((counts[token] - mean) ** 2 / mean for token, mean in expected.items())
        assert chi_square < critical_chi_square(len(possible) - 1)
    assert {token for token, mean in expected.items() if mean > 10} <= set(counts)


def test_neighbouring_seeds_draw_independently() -> None:
    """Pairs of draws of seeds s and s + 1, and of indices i and i + 1, are spread as independent ones are."""
    logits = (0.5, 0.0, -0.5)
    first = draws(logits, DRAWS, seed=10)
    second = draws(logits, DRAWS, seed=11)
    probabilities = exact(logits, 1.0, 0, 1.0, 0.0)
    for pairs in (zip(first, second, strict=True), pairwise(first)):
        counts = Counter(pairs)
        total = sum(counts.values())
        chi_square = 0.0
        for a in range(3):
            for b in range(3):
                mean = probabilities[a] * probabilities[b] * total
                chi_square += (counts[a, b] - mean) ** 2 / mean
        assert chi_square < critical_chi_square(8)


def test_greedy_takes_the_largest_logit_after_adjustments() -> None:
    for by in CHANGES:
        adjustments = changes(**by)
        expected = changed(LOGITS, adjustments)
        assert draws(LOGITS, 1, temperature=0.0, adjustments=adjustments) == [expected.index(max(expected))]


@pytest.mark.parametrize("window", [1024, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_row_does_not_depend_on_its_batch(dtype: torch.dtype, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "WINDOW", window)
    generator = torch.Generator().manual_seed(1)
    logits = (2 * torch.randn(40, 300, generator=generator)).to(dtype)
    kinds = [{}, {"temperature": 0.0}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.2}, {"top_k": 50, "top_p": 0.7}]
    kinds += [{**kind, "adjustments": changes(**by)} for kind, by in zip(2 * kinds, CHANGES, strict=False)]
    rows = [row(seed=i // 2, index=i % 7, **kinds[i % len(kinds)]) for i in range(40)]
    alone = [sample(logits[i : i + 1], [rows[i]])[0] for i in range(40)]
    assert sample(logits, rows) == alone
    order = torch.randperm(40, generator=generator).tolist()
    assert sample(logits[order], [rows[i] for i in order]) == [alone[i] for i in order]
    monkeypatch.setattr(sampler, "CPU_PIECE", 3 * 300)
    assert sample(logits, rows) == alone


def test_sorting_a_window_draws_as_sorting_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the window holds all that is kept, ends among equal logits, or is too narrow."""
    generator = torch.Generator().manual_seed(5)
    logits = (8 * torch.randn(300, 60, generator=generator)).round() / 4
    cuts: list[dict[str, Any]] = [
        {"top_k": 1},
        {"top_k": 6},
        {"top_k": 25},
        {"top_p": 0.3},
        {"top_p": 0.97},
        {"top_k": 25, "top_p": 0.5},
        {"top_k": 59, "top_p": 0.99},
        {"min_p": 0.02, "top_p": 0.9},
        {"top_k": 4, "adjustments": changes(banned=range(57))},
    ]
    rows = [row(seed=i, **cuts[i % len(cuts)]) for i in range(300)]
    assert logits.shape[1] < sampler.WINDOW
    whole = sample(logits, rows)
    for window in (1, 2, 7, 24, 40, 59):
        monkeypatch.setattr(sampler, "WINDOW", window)
        assert sample(logits, rows) == whole, window


@pytest.mark.parametrize("bits", [0, -1, 1, 2**63 - 1, -(2**63)])
def test_the_outermost_random_numbers_give_finite_noise(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A uniform that rounds to 0 or 1 would make a token impossible or certain."""
    monkeypatch.setattr(torch_rows, "splitmix64", lambda z: torch.full_like(z, bits))
    assert gumbel_noise([row()], torch.arange(5)).isfinite().all()


@pytest.mark.parametrize("temperature", [1e-5, 1e30, 3e38])
def test_extreme_temperatures_stay_finite(temperature: float) -> None:
    drawn = set(draws(LOGITS, 400, temperature=temperature, top_p=0.9999))
    assert drawn == ({4} if temperature < 1 else set(range(len(LOGITS))))


KINDS = pytest.mark.parametrize(
    "kind", [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.5}, {"temperature": 0.0}], ids=str
)


@KINDS
def test_logits_that_are_not_finite_give_no_token(kind: dict[str, Any]) -> None:
    for bad in (math.nan, math.inf, -math.inf):
        logits = torch.tensor(LOGITS).repeat(3, 1)
        whole = sample(logits, [row(index=i, **kind) for i in range(3)])
        logits[1, 7] = bad
        found = sample(logits, [row(index=i, **kind) for i in range(3)])
        assert found == [whole[0], NOT_FINITE, whole[2]], "and the rows beside are as they were"
    adjusted = sample(torch.full((1, 12), math.nan), [row(adjustments=changes(banned=range(12)), **kind)])
    assert adjusted == [NOT_FINITE]


@KINDS
def test_a_row_without_any_token_left_gives_none(kind: dict[str, Any]) -> None:
    assert draws(LOGITS, 1, adjustments=changes(banned=range(len(LOGITS))), **kind) == [ALL_BANNED]
    assert draws(LOGITS, 1, adjustments=changes(banned=range(1, len(LOGITS))), **kind) == [0]
