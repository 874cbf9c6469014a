"""The Triton product with packed weights against the dequantized weights in fp64, in the interpreter or on a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from packed_cases import VARIANTS, random_weight
from torch import Tensor
from triton_mode import DEVICE, DTYPES, TRITON_MARKS

from nanovllm.ops import packed_weights, triton_packed
from nanovllm.ops.packed_weights import PackedWeight, dequantize
from nanovllm.ops.triton_packed import SCHEMES, PackedConfig, packed_config, packed_linear

pytestmark = TRITON_MARKS
PACKED = tuple(variant for variant in VARIANTS if variant.split()[0] in SCHEMES)
# Of the sum of the products' sizes: rounding of the result, and of fp32 sums.
BOUNDS = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
SMALL = PackedConfig(16, 16, 32, 1, 4, 1)  # few programs: the interpreter runs them one by one


def product(x: Tensor, weight: PackedWeight, bias: Tensor | None = None, config: PackedConfig = SMALL) -> Tensor:
    assert weight.scales is not None
    group_size = weight.group_size if weight.scales.shape[1] > 1 else weight.in_features
    return packed_linear(x, weight.scheme, weight.data, weight.scales, weight.zeros, group_size, bias, config)


def check(x: Tensor, weight: PackedWeight, found: Tensor, bias: Tensor | None = None) -> None:
    dense = dequantize(weight).double()
    expected, size = x.double() @ dense.T, x.double().abs() @ dense.abs().T
    if bias is not None:
        expected, size = expected + bias.double(), size + bias.double().abs()
    assert found.dtype == x.dtype and found.shape == expected.shape
    assert ((found.double() - expected).abs() <= BOUNDS[x.dtype] * size + 1e-9).all()


FAST = {("int4 zeros", torch.float16), ("int8", torch.float32), ("fp8 blocks", torch.float16)}


@pytest.mark.parametrize(
    ("variant", "dtype"),
    [
        pytest.param(variant, dtype, marks=[] if (variant, dtype) in FAST else pytest.mark.slow)
        for variant in PACKED
        for dtype in DTYPES
    ],
    ids=str,
)
def test_products_are_those_of_the_dequantized_weights(variant: str, dtype: torch.dtype) -> None:
    """More rows, outputs and inputs than a tile has, with parts of tiles left over; rows of x are strided."""
    in_features = 128 if "128" in variant or "64" in variant else 96
    weight = random_weight(variant, 40, in_features).to(DEVICE)
    x = torch.randn(18, in_features + 8, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)[:, :in_features]
    bias = torch.randn(40, generator=torch.Generator().manual_seed(2)).to(DEVICE, dtype)
    check(x, weight, product(x, weight))
    check(x, weight, product(x, weight, bias), bias)


@pytest.mark.parametrize("variant", ["int4 zeros", "fp8 channel"])
def test_inputs_may_be_summed_in_parts(variant: str) -> None:
    """Three parts of four tiles and four of five: the last part is shorter, or empty."""
    for in_features, splits in ((128, 3), (160, 4)):
        weight = random_weight(variant, 20, in_features).to(DEVICE)
        x = torch.randn(3, in_features, device=DEVICE)
        bias = torch.randn(20, device=DEVICE)
        check(x, weight, product(x, weight, bias, replace(SMALL, splits=splits)), bias)


def test_scales_of_blocks_of_128_outputs() -> None:
    weight = random_weight("fp8 blocks", 150, 140).to(DEVICE)
    assert weight.scales is not None and weight.scales.shape == (2, 2)
    x = torch.randn(2, 140, device=DEVICE)
    check(x, weight, product(x, weight, config=PackedConfig(16, 64, 128, 1, 4, 1)))


def test_every_fp8_number() -> None:
    """All 254 numbers, zero and subnormal ones too: a row of the identity picks each out."""
    codes = torch.tensor([code for code in range(256) if code & 127 != 127], dtype=torch.uint8)
    data = codes.view(-1, 2).T.contiguous().view(torch.float8_e4m3fn)
    weight = PackedWeight("fp8", data, torch.ones(2, 1), None, 127, 127).to(DEVICE)
    found = product(torch.eye(127, device=DEVICE), weight, config=PackedConfig(16, 16, 128, 1, 4, 1))
    assert torch.equal(found.T, dequantize(weight))


def test_no_rows() -> None:
    weight = random_weight("int4", 16, 32).to(DEVICE)
    assert product(torch.empty(0, 32, device=DEVICE), weight).shape == (0, 16)


@pytest.mark.parametrize("rows", [1, 16, 17, 4096])
@pytest.mark.parametrize(("out_features", "in_features", "group"), [(1024, 3072, 128), (64, 96, 96), (50_000, 512, 32)])
def test_tiles_fit_the_sizes(rows: int, out_features: int, in_features: int, group: int) -> None:
    config = packed_config(rows, out_features, in_features, group)
    tiles = -(-in_features // config.columns)
    assert group % config.columns == 0 or group >= in_features
    assert 1 <= config.splits <= max(1, tiles) and config.columns >= 32
    assert packed_config(min(rows, 16), out_features, in_features, group) == packed_config(
        1 if rows <= 16 else 16, out_features, in_features, group
    )


def test_which_products_go_to_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Triton computes, int4, int8 and fp8 weights go there with one group size; GGUF's types go to torch."""
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(packed_weights, "use_triton", lambda x: True)
    monkeypatch.setattr(triton_packed, "packed_linear", lambda *args: calls.append(args))
    x = torch.empty(3, 256, device="meta")
    for variant in ("int4 zeros", "int8 channel", "fp8 tensor", "q4_k"):
        packed_weights.packed_linear(x, random_weight(variant, 32, 256).to("meta"))
    assert [(call[1], call[5]) for call in calls] == [("int4", 32), ("int8", 256), ("fp8", 256)]
