"""The Triton kernels of experts against plain torch, in the interpreter or on a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from triton_mode import DEVICE, DTYPES, TRITON_MARKS

from nanovllm.data.network import ExpertSpec, SharedExpert
from nanovllm.layers import experts as experts_module
from nanovllm.layers.experts import Experts
from nanovllm.ops.triton_experts import grouped_linear, weighted_sum

pytestmark = TRITON_MARKS
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)
# Sums of up to 100 products of size 1 in another order, rounded once.
BOUNDS = {torch.float32: 1e-4, torch.float16: 4e-2, torch.bfloat16: 0.3}


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@EVERY_DTYPE
@pytest.mark.parametrize(
    "counts",
    [(1,), (0, 0, 3, 0), (1, 0, 17, 16, 0), (40, 0, 33)],
    ids=["one row", "empty groups", "few rows", "many rows"],
)
def test_grouped_products(counts: tuple[int, ...], dtype: torch.dtype) -> None:
    entries, tokens, out_features, in_features = sum(counts), 9, 70, 100
    x, weights = random(tokens, in_features, dtype=dtype), random(len(counts), out_features, in_features, dtype=dtype)
    rows = torch.randint(tokens, (entries,), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    ends = torch.tensor(counts, device=DEVICE).cumsum(0)
    expert = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts)).to(DEVICE)
    expected = torch.einsum("rk,rnk->rn", x[rows].double(), weights[expert].double())
    bias = random(len(counts), out_features, dtype=dtype, seed=2)
    with_bias = grouped_linear(x, weights, ends, rows, bias)
    torch.testing.assert_close(with_bias.double(), expected + bias[expert].double(), atol=BOUNDS[dtype], rtol=0)
    for y in (grouped_linear(x, weights, ends, rows), grouped_linear(x[rows], weights, ends)):
        assert y.dtype == dtype
        torch.testing.assert_close(y.double(), expected, atol=BOUNDS[dtype], rtol=0)


@EVERY_DTYPE
def test_weighted_sums(dtype: torch.dtype) -> None:
    y, weights = random(21, 1100, dtype=dtype), random(7, 3, seed=1)
    entries = torch.randperm(21, generator=torch.Generator().manual_seed(2)).view(7, 3).to(DEVICE)
    expected = (y[entries].double() * weights[..., None].double()).sum(1)
    found = weighted_sum(y, entries, weights)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, atol=BOUNDS[dtype] / 4, rtol=0)


@pytest.mark.parametrize(
    "facts",
    [
        {},
        {"scoring": "sigmoid", "correction_bias": "bias", "num_groups": 3, "chosen_groups": 2, "weight_scale": 2.5},
        {"shared": SharedExpert(24)},
        {"shared": SharedExpert(24, "shared_expert", "shared_expert_gate")},
        {"biases": True, "scoring": "softmax_of_chosen"},
    ],
    ids=["softmax", "sigmoid, groups", "shared", "shared, gated", "biases"],
)
def test_a_layer_computes_the_same_at_once_as_expert_by_expert(
    monkeypatch: pytest.MonkeyPatch, facts: dict[str, Any]
) -> None:
    spec = replace(ExpertSpec(6, 3, 40, True, (True,)), **facts)
    layer = Experts(spec, 0, 48, activation="silu", method=None, dtype=torch.float32, device=torch.device(DEVICE))
    for seed, (_, slot) in enumerate(layer.slots()):
        slot.view.copy_(random(*slot.shape, seed=seed) / slot.shape[-1] ** 0.5)
    x = random(7, 48)
    monkeypatch.setattr(experts_module, "use_triton", lambda x: False)
    expected = layer(x)
    monkeypatch.setattr(experts_module, "use_triton", lambda x: True)
    torch.testing.assert_close(layer(x), expected, atol=1e-5, rtol=0)
    assert layer(x[:0]).shape == (0, 48)
    assert weighted_sum(x[:0], torch.zeros(0, 2, dtype=torch.int64, device=DEVICE), x[:0, :2]).shape == (0, 48)
