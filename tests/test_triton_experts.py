"""The Triton kernels of experts against plain torch, in the interpreter or on a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from fast import fast_only
from packed_cases import VARIANTS, random_weight
from torch import Tensor
from triton_mode import DEVICE, DTYPES, TRITON_MARKS

from nanovllm.data.network import ExpertSpec
from nanovllm.formats.quantization.config_fields import Modules
from nanovllm.formats.quantization.mxfp4 import Mxfp4
from nanovllm.formats.quantization.packed_method import PackedMethod
from nanovllm.layers import expert_weights
from nanovllm.layers import experts as experts_module
from nanovllm.layers.build_context import BuildContext
from nanovllm.layers.dense_weight import linear
from nanovllm.layers.experts import Experts
from nanovllm.layers.linear import Linear
from nanovllm.layers.mlp import GatedMLP
from nanovllm.ops.packed_weights import dequantize
from nanovllm.ops.triton_experts import ExpertConfig, expert_config, grouped_linear, weighted_sum
from nanovllm.ops.triton_packed import round_inputs
from nanovllm.ops.triton_routing import route
from nanovllm.ops.triton_unpack import SCHEMES

pytestmark = TRITON_MARKS
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)
# Sums of up to 100 products of size 1 in another order, rounded once.
BOUNDS = {torch.float32: 1e-4, torch.float16: 4e-2, torch.bfloat16: 0.3}
# Of the sum of the products' sizes: rounding of the weights and of the result, and of fp32 sums.
RELATIVE_BOUNDS = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
PACKED = tuple(variant for variant in VARIANTS if variant.split()[0] in SCHEMES)
# Of the kernel for few rows and of that for many; few programs: the interpreter runs them one by one.
SMALL = ExpertConfig(16, 16, 64, 4, 1)
LARGE = ExpertConfig(32, 32, 64, 4, 1)
SOFTMAX = ExpertSpec(12, 3)
SIGMOID = replace(SOFTMAX, scoring="sigmoid")
# How experts are chosen, and what a layer has besides.
ROUTERS: dict[str, tuple[ExpertSpec, dict[str, Any]]] = {
    "softmax": (SOFTMAX, {}),
    "softmax, not normalized": (replace(SOFTMAX, norm_topk_prob=False), {"expert_scale": "scale"}),
    "sigmoid, groups": (
        replace(SIGMOID, num_groups=4, chosen_groups=2, weight_scale=2.5), {"correction_bias": "bias"}
    ),
    "sigmoid, shared": (SIGMOID, {"correction_bias": "bias", "shared": "shared_experts"}),
    "shared, gated": (SOFTMAX, {"shared": "shared_expert", "shared_gate": "shared_expert_gate"}),
    "softmax of chosen, biases": (replace(SOFTMAX, scoring="softmax_of_chosen"), {"biases": True}),
}  # fmt: skip
FAST_LAYERS = ("softmax of chosen, biases",)
EVERY_ROUTER = pytest.mark.parametrize("name", ROUTERS)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@EVERY_DTYPE
@pytest.mark.parametrize(
    "counts",
    [(1,), (0, 0, 3, 0), (1, 0, 17, 16, 0), (40, 0, 33)],
    ids=["one row", "empty groups", "few rows", "many rows"],
)
def test_grouped_products(counts: tuple[int, ...], dtype: torch.dtype) -> None:
    entries = sum(counts)
    tokens = 9
    out_features = 70
    in_features = 100
    x = random(tokens, in_features, dtype=dtype)
    weights = random(len(counts), out_features, in_features, dtype=dtype)
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
    y = random(21, 1100, dtype=dtype)
    weights = random(7, 3, seed=1)
    entries = torch.randperm(21, generator=torch.Generator().manual_seed(2)).view(7, 3).to(DEVICE)
    expected = (y[entries].double() * weights[..., None].double()).sum(1)
    found = weighted_sum(y, entries, weights)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, atol=BOUNDS[dtype] / 4, rtol=0)


def test_the_shared_expert_is_added_last() -> None:
    y = random(21, 70)
    shared = random(7, 70, seed=1)
    weights = random(7, 4, seed=2)
    entries = torch.arange(21, dtype=torch.int32).view(7, 3).to(DEVICE)
    expected = weighted_sum(y, entries, weights[:, :3].contiguous()) + weights[:, 3:] * shared
    torch.testing.assert_close(weighted_sum(y, entries, weights, shared), expected, atol=1e-6, rtol=0)


# ---- packed matrices


def check_packed(
    variant: str, dtype: torch.dtype, counts: tuple[int, ...], config: ExpertConfig | None = SMALL
) -> None:
    """Against the dequantized matrices in fp64, with outputs and inputs beyond the last whole tile."""
    out_features = 20
    in_features = 128 if "128" in variant or "64" in variant else 160
    num_experts = len(counts)
    weight = random_weight(variant, num_experts * out_features, in_features).to(DEVICE)
    dense = dequantize(weight).double().view(num_experts, out_features, in_features)
    x = random(9, in_features, dtype=dtype)
    bias = random(num_experts, out_features, dtype=dtype, seed=2)
    rows = torch.randint(9, (sum(counts),), generator=torch.Generator().manual_seed(1)).int().to(DEVICE)
    ends = torch.tensor(counts, device=DEVICE).cumsum(0).int()
    expert = torch.arange(num_experts).repeat_interleave(torch.tensor(counts)).to(DEVICE)
    found = grouped_linear(x, weight, ends, rows, bias, config)
    wide = x[rows.long()].double()
    expected = torch.einsum("rk,rnk->rn", wide, dense[expert]) + bias[expert].double()
    size = torch.einsum("rk,rnk->rn", wide.abs(), dense[expert].abs()) + bias[expert].double().abs()
    assert found.dtype == dtype and found.shape == expected.shape
    assert ((found.double() - expected).abs() <= RELATIVE_BOUNDS[dtype] * size + 1e-9).all()


@pytest.mark.parametrize("variant", fast_only(["mxfp4"], PACKED))
def test_packed_products(variant: str) -> None:
    """Rows of several tiles, experts without rows, and one row."""
    for dtype in DTYPES:
        check_packed(variant, dtype, (3, 0, 17, 1))
        check_packed(variant, dtype, (3, 0, 17, 1), LARGE)


@pytest.mark.parametrize("counts", [(1,), (0, 0, 18, 0), (0, 0, 0, 1)], ids=["one expert", "all of one", "one row"])
def test_packed_products_of_few_rows(counts: tuple[int, ...]) -> None:
    for variant in ("mxfp4", "int4 zeros"):
        check_packed(variant, torch.float32, counts, None)


def test_tiles_are_larger_where_experts_have_more_rows() -> None:
    counts = (1, 64, 128, 400, 576, 4000)
    assert [expert_config(entries, 8, torch.bfloat16, packed=False).rows for entries in counts] == [
        16, 16, 16, 64, 128, 128
    ]  # fmt: skip
    assert [expert_config(entries, 8, torch.bfloat16, packed=True).rows for entries in counts] == [
        8, 8, 64, 64, 128, 128
    ]  # fmt: skip


# ---- the router and whole layers


def made_layer(name: str, method: PackedMethod | None = None) -> Experts:
    """One with the router of this name and random weights."""
    spec, others = ROUTERS[name]
    build = BuildContext(torch.float32, torch.device(DEVICE), method).at("mlp")
    if "shared" in others:
        others = {**others, "shared": GatedMLP(64, 24, "silu", build.at(others["shared"]))}
    made = Experts(64, 32, "silu", spec, build, **others)
    for seed, (_, slot) in enumerate(made.slots()):
        if slot.randomize is None:
            slot.view.copy_(random(*slot.shape, seed=seed) / slot.shape[-1] ** 0.5)
        else:
            slot.randomize(torch.Generator(DEVICE).manual_seed(seed))
    return made


@EVERY_ROUTER
def test_routers_choose_and_group_as_torch(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Of a part of a program's rows, of exactly those, and of several programs."""
    monkeypatch.setattr(experts_module, "use_triton", lambda x: False)
    made = made_layer(name)
    k = 3
    for rows in (1, 16, 40):
        x = random(rows, 64, seed=rows)
        expected, chosen = made.route(x)
        assert isinstance(chosen, Tensor)
        logits = linear(x, made.gate, made.gate_bias)
        share = None if made.shared_gate is None else linear(x, made.shared_gate)
        weights, grouping = route(made.spec, logits, share, made.correction_bias, made.expert_scale)
        if made.shared is not None:
            torch.testing.assert_close(weights[:, k:], made._share(x), atol=1e-6, rtol=0)
        torch.testing.assert_close(weights[:, :k], expected, atol=1e-6, rtol=0)
        experts, order = chosen.flatten().sort(stable=True)
        assert grouping.ends.tolist() == torch.searchsorted(experts.cpu(), torch.arange(12), right=True).tolist()
        assert torch.equal(grouping.rows.long(), order // k)
        assert torch.equal(grouping.entries.flatten().long(), order.argsort())


@EVERY_ROUTER
def test_of_equal_scores_the_first_are_chosen(name: str) -> None:
    """And every expert once, whatever the scores: rows of NaN or infinity stay within the experts."""
    spec, others = ROUTERS[name]
    spec = replace(spec, has_shared="shared" in others)
    logits = torch.zeros(20, 12, device=DEVICE)
    bias = torch.zeros(12, device=DEVICE)
    scale = torch.ones(12, device=DEVICE)
    tensors = (None, bias if "correction_bias" in others else None, scale if "expert_scale" in others else None)
    _, grouping = route(spec, logits, *tensors)
    assert grouping.ends.tolist() == [20, 40, *[60] * 10]
    logits[1], logits[2], logits[3, 4:8] = torch.nan, -torch.inf, torch.inf
    weights, grouping = route(spec, logits, *tensors)
    assert sorted(grouping.entries.flatten().tolist()) == list(range(60))
    assert grouping.rows.bincount().tolist() == [3] * 20 and grouping.ends[-1] == 60
    assert bool(weights[1, :3].isnan().all()), "a row of NaN stays one"


@pytest.mark.parametrize("counts", [(2, 0, 5), (0, 3, 27)], ids=["few rows", "many rows"])
def test_rows_of_fp8_inputs_are_rounded_once(counts: tuple[int, ...]) -> None:
    """The product is that of the rounded rows; the interpreter multiplies fp8 tiles as fp32."""
    weight = random_weight("fp8 blocks", 3 * 20, 256).to(DEVICE)
    x = random(9, 256)
    rows = torch.arange(sum(counts), dtype=torch.int32, device=DEVICE) % 9
    rounded, scales = round_inputs(x, 128)
    wide = (rounded.float().unflatten(1, (2, 128)) * scales[..., None]).flatten(1)
    expert = torch.arange(3).repeat_interleave(torch.tensor(counts)).to(DEVICE)
    dense = dequantize(weight).double().view(3, 20, 256)
    expected = torch.einsum("rk,rnk->rn", wide[rows.long()].double(), dense[expert])
    ends = torch.tensor(counts, device=DEVICE).cumsum(0).int()
    found = grouped_linear(x, weight, ends, rows, fp8_inputs=True)
    torch.testing.assert_close(found.double(), expected, atol=5e-3 if DEVICE == "cuda" else 2e-3, rtol=0)


MXFP4 = PackedMethod("mxfp4", Mxfp4(), Modules((), targets=(r"re:.*\.experts\.",)))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FAST_LAYERS else pytest.mark.slow) for name in ROUTERS]
)
def test_a_layer_computes_the_same_at_once_as_expert_by_expert(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(expert_weights, "stacked_on", lambda device: True)
    for method in (None, MXFP4):
        made = made_layer(name, method)
        x = random(2, 64)
        monkeypatch.setattr(experts_module, "use_triton", lambda x: False)
        expected = made(x)
        monkeypatch.setattr(experts_module, "use_triton", lambda x: True)
        torch.testing.assert_close(made(x), expected, atol=2e-5, rtol=0)
        assert made(x[:0]).shape == (0, 64)


class AddsTheMean:
    """Stands for adapters: adds the mean of a row to the outputs of a linear layer, and counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def add_(self, linear: Linear, x: Tensor, y: Tensor) -> None:
        self.calls += 1
        y += x.mean(1, keepdim=True)


def test_adapters_of_the_shared_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    """They add to its two products, and to no other."""
    monkeypatch.setattr(expert_weights, "stacked_on", lambda device: True)
    made = made_layer("shared, gated")
    x = random(2, 64)
    adapters = AddsTheMean()
    monkeypatch.setattr(experts_module, "use_triton", lambda x: False)
    expected = made(x, adapters)
    assert not torch.allclose(expected, made(x), atol=1e-3)
    monkeypatch.setattr(experts_module, "use_triton", lambda x: True)
    torch.testing.assert_close(made(x, adapters), expected, atol=2e-5, rtol=0)
    assert adapters.calls == 4
