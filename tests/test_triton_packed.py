"""The Triton product with packed weights against the dequantized weights in fp64, in the interpreter or on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from packed_cases import VARIANTS, random_weight
from torch import Tensor
from triton_mode import DEVICE, DTYPES, NARROW, TRITON_MARKS

from nanovllm.ops import packed_weights, triton_packed
from nanovllm.ops.kv_quantization import quantize_rows_torch
from nanovllm.ops.packed_weights import PackedWeight, dequantize
from nanovllm.ops.triton_packed import SCHEMES, PackedConfig, packed_config, packed_linear, round_inputs

pytestmark = TRITON_MARKS
PACKED = tuple(variant for variant in VARIANTS if variant.split()[0] in SCHEMES)
# Of the sum of the products' sizes: rounding of the result, and of fp32 sums.
BOUNDS = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
SMALL = PackedConfig(16, 16, 32, 1, 4, 1)  # few programs: the interpreter runs them one by one


def product(x: Tensor, weight: PackedWeight, bias: Tensor | None = None, config: PackedConfig = SMALL) -> Tensor:
    assert weight.scales is not None
    return packed_linear(x, weight.scheme, weight.data, weight.scales, weight.zeros, weight.group_size, bias, config)


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


def test_every_fp8_number() -> None:
    """All 254 numbers, zero and subnormal ones too: a row of the identity picks each out."""
    codes = torch.tensor([code for code in range(256) if code & 127 != 127], dtype=torch.uint8)
    data = codes.view(-1, 2).T.contiguous().view(torch.float8_e4m3fn)
    weight = PackedWeight("fp8", data, torch.ones(2, 1), None, 127, 127).to(DEVICE)
    found = product(torch.eye(127, device=DEVICE), weight, config=PackedConfig(16, 16, 128, 1, 4, 1))
    assert torch.equal(found.T, dequantize(weight))
    assert product(torch.empty(0, 127, device=DEVICE), weight).shape == (0, 2)


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


@pytest.mark.parametrize("group_size", [32, 100])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rounded_inputs_are_those_of_the_kv_cache(dtype: torch.dtype, group_size: int) -> None:
    """With 9 rows, of which one is zero and one tiny, and the last group shorter than the others."""
    x = torch.randn(9, 108, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)[:, :100]
    x[2], x[3] = 0.0, x[3] / 4096
    rounded, scales = round_inputs(x, group_size)
    for group, part in enumerate(x.split(group_size, dim=1)):
        rows = quantize_rows_torch(part, torch.float8_e4m3fn).view(torch.uint8)
        begin = group * group_size
        found = rounded[:, begin : begin + part.shape[1]].contiguous().view(torch.uint8)
        assert torch.equal(found, rows[:, :-4])
        assert torch.equal(scales[:, group], rows[:, -4:].contiguous().view(torch.float32)[:, 0])


MULTIPLIES_FP8 = DEVICE == "cpu" or torch.cuda.get_device_capability() >= (8, 9)


@pytest.mark.skipif(not MULTIPLIES_FP8, reason="the GPU does not multiply fp8")
@pytest.mark.parametrize(("variant", "columns", "splits"), [("fp8 channel", 32, 3), ("fp8 blocks", 128, 1)])
def test_products_of_fp8_inputs(variant: str, columns: int, splits: int) -> None:
    """The products of the rounded inputs, which are exact in fp32."""
    in_features = 300 if variant == "fp8 blocks" else 100
    weight = random_weight(variant, 20, in_features).to(DEVICE)
    x = torch.randn(18, in_features, generator=torch.Generator().manual_seed(1)).to(DEVICE, NARROW)
    bias = torch.randn(20, generator=torch.Generator().manual_seed(2)).to(DEVICE, NARROW)
    group_size = 128 if variant == "fp8 blocks" else in_features
    rounded, scales = round_inputs(x, group_size)
    widened = rounded.float() * scales.repeat_interleave(group_size, dim=1)[:, :in_features]
    assert weight.scales is not None
    config = PackedConfig(16, 32, columns, splits, 4, 1)
    parts = (weight.scheme, weight.data, weight.scales, weight.zeros)
    found = packed_linear(x, *parts, group_size, bias, config, fp8_inputs=True)
    assert found.dtype == NARROW
    dense = dequantize(weight).double()
    expected = widened.double() @ dense.T + bias.double()
    size = widened.double().abs() @ dense.abs().T + bias.double().abs()
    assert ((found.double() - expected).abs() <= BOUNDS[NARROW] * size).all()
    assert ((found.double() - x.double() @ dense.T - bias.double()).abs() <= 2**-4 * size).all()


def test_which_products_round_their_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """16-bit inputs of weights whose checkpoint says so, where the GPU multiplies fp8."""
    calls: list[bool] = []
    monkeypatch.setattr(packed_weights, "use_triton", lambda x: True)
    monkeypatch.setattr(triton_packed, "packed_linear", lambda *args, fp8_inputs: calls.append(fp8_inputs))
    plain = random_weight("fp8 channel", 32, 256).to("meta")
    rounding = replace(plain, fp8_inputs=True)
    x = torch.empty(3, 256, device="meta", dtype=torch.bfloat16)
    for multiplies in (True, False):
        monkeypatch.setattr(packed_weights, "multiplies_fp8", lambda device, multiplies=multiplies: multiplies)
        for weight in (plain, rounding):
            packed_weights.packed_linear(x, weight)
        packed_weights.packed_linear(x.float(), rounding)
        packed_weights.packed_linear(x, random_weight("q4_k", 32, 256).to("meta"))  # whose scales are in the data
    assert calls == [False, True, False, False, False, False]
