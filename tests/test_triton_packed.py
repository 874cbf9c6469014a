"""The Triton product with packed weights against the dequantized weights in fp64, in the interpreter or on a GPU."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch
from fast import fast_only
from packed_cases import VARIANTS, input_multiple, random_weight
from torch import Tensor
from triton_mode import DEVICE, DTYPES, NARROW, TRITON_MARKS

from benchmarks.kernel_variants import packed_variants
from nanovllm.ops import dequantized_product, packed_weights, scaled_product, triton_packed
from nanovllm.ops.kv_quantization import quantize_rows_torch
from nanovllm.ops.packed_weights import PackedWeight, dequantize
from nanovllm.ops.triton_packed import COLUMNS, PROGRAMS, PackedConfig, packed_config, packed_linear, round_inputs
from nanovllm.ops.triton_unpack import SCHEMES

pytestmark = TRITON_MARKS
PACKED = tuple(variant for variant in VARIANTS if variant.split()[0] in SCHEMES)
# Of the sum of the products' sizes: rounding of the result, and of fp32 sums.
BOUNDS = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
SMALL = PackedConfig(16, 16, 1, 4, 1)  # few programs: the interpreter runs them one by one


def product(x: Tensor, weight: PackedWeight, bias: Tensor | None = None, config: PackedConfig = SMALL) -> Tensor:
    assert weight.scales is not None
    return packed_linear(x, weight.scheme, weight.data, weight.scales, weight.zeros, weight.group_size, bias, config)


def check(x: Tensor, weight: PackedWeight, found: Tensor, bias: Tensor | None = None) -> None:
    dense = dequantize(weight).double()
    expected = x.double() @ dense.T
    size = x.double().abs() @ dense.abs().T
    if bias is not None:
        expected = expected + bias.double()
        size = size + bias.double().abs()
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
    found = product(torch.eye(127, device=DEVICE), weight, config=PackedConfig(16, 16, 1, 4, 1))
    assert torch.equal(found.T, dequantize(weight))
    assert product(torch.empty(0, 127, device=DEVICE), weight).shape == (0, 2)


@pytest.mark.parametrize(
    "variant",
    fast_only(
        ["int4 bfloat16 zeros 128"], ("int4 bfloat16 zeros 128", "fp8 blocks", "int4 zeros", "int8 zeros bfloat16")
    ),
)
def test_products_by_the_tiles_of_the_sizes(variant: str) -> None:
    """Few rows, in tiles of 8 and of 16, and more in tiles whose even and odd inputs are not apart; several parts."""
    weight = random_weight(variant, 70, 1152).to(DEVICE)
    for rows in (3, 16, 33):
        config = packed_config(rows, 70, 1152)
        assert config.splits > 1
        x = torch.randn(rows, 1154, generator=torch.Generator().manual_seed(1)).to(DEVICE, NARROW)
        for inputs in (x[:, :1152], x[:, 1:1153]):  # the second begins between two words
            check(inputs, weight, product(inputs, weight, config=config))


@pytest.mark.parametrize("rows", [1, 8, 16, 17, 64, 128])
@pytest.mark.parametrize(("out_features", "in_features"), [(1024, 3072), (64, 96), (50_000, 512)])
def test_tiles_fit_the_sizes(rows: int, out_features: int, in_features: int) -> None:
    config = packed_config(rows, out_features, in_features)
    steps = -(-in_features // COLUMNS)
    tiles = -(-out_features // config.outputs) * -(-rows // config.rows)
    assert 1 <= config.splits <= max(1, steps) and tiles * config.splits <= max(PROGRAMS, tiles)
    assert config.rows >= min(rows, 64)


def test_how_few_rows_are_does_not_change_a_sum() -> None:
    """Up to 16 rows take the same parts of the inputs, in the same steps; only the rows of a tile differ."""
    few = {replace(packed_config(rows, 4096, 4096), rows=0) for rows in range(1, 17)}
    assert len(few) == 1


@pytest.mark.parametrize("variant", PACKED)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weights_in_16_bits_are_the_dequantized_ones_rounded(variant: str, dtype: torch.dtype) -> None:
    """To the bit; the last part of a row is shorter where a format allows it."""
    in_features = 320 if input_multiple(variant) <= 64 else 384
    weight = random_weight(variant, 37, in_features).to(DEVICE)
    out = torch.full((37, in_features), torch.nan, device=DEVICE, dtype=dtype)
    assert weight.scales is not None
    parts = (weight.scheme, weight.data, weight.scales, weight.zeros, weight.group_size)
    assert torch.equal(triton_packed.dequantize_(out, *parts), dequantize(weight).to(dtype))


@pytest.mark.parametrize("rows", [1, 9])
@pytest.mark.parametrize("with_bias", [False, True])
def test_many_rows_are_multiplied_by_parts_of_the_outputs(
    rows: int, with_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three parts through one scratch, which holds a third of a matrix that is larger than allowed."""
    weight = random_weight("int8", 300, 64).to(DEVICE)
    x = torch.randn(rows, 64, device=DEVICE)
    bias = torch.randn(300, device=DEVICE) if with_bias else None
    scratch: list[tuple[int, torch.Size]] = []

    def write(part: PackedWeight, out: Tensor) -> None:
        scratch.append((out.data_ptr(), out.shape))
        out.copy_(dequantize(part))

    whole = dequantized_product.dequantized_linear(x, weight, bias, write)
    check(x, weight, whole, bias)
    monkeypatch.setattr(dequantized_product, "SCRATCH_BYTES", 128 * 64 * 4)
    check(x, weight, dequantized_product.dequantized_linear(x, weight, bias, write), bias)
    assert [shape[0] for _, shape in scratch] == [300, 128, 128, 44] and len({at for at, _ in scratch[1:]}) == 1


@pytest.mark.parametrize(("out_features", "in_features"), [(28672, 4096), (57344, 8192), (128256, 4096), (8, 1 << 20)])
def test_scratch_is_bounded(out_features: int, in_features: int) -> None:
    """All of a layer of 8B; other parts differ by less than a tile, of one that is larger."""
    count = dequantized_product.outputs_at_once(out_features, in_features, 2)
    assert count * in_features * 2 <= max(dequantized_product.SCRATCH_BYTES, 128 * in_features * 2)
    parts = -(-out_features // count)
    assert (parts == 1) == (out_features * in_features * 2 <= dequantized_product.SCRATCH_BYTES)
    assert parts * count - out_features < parts * 128


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
@pytest.mark.parametrize(("variant", "splits"), [("fp8 channel", 3), ("fp8 blocks", 1)])
def test_products_of_fp8_inputs(variant: str, splits: int) -> None:
    """The products of the rounded inputs, which are exact in fp32."""
    in_features = 300 if variant == "fp8 blocks" else 100
    weight = random_weight(variant, 20, in_features).to(DEVICE)
    x = torch.randn(18, in_features, generator=torch.Generator().manual_seed(1)).to(DEVICE, NARROW)
    bias = torch.randn(20, generator=torch.Generator().manual_seed(2)).to(DEVICE, NARROW)
    group_size = 128 if variant == "fp8 blocks" else in_features
    rounded, scales = round_inputs(x, group_size)
    widened = rounded.float() * scales.repeat_interleave(group_size, dim=1)[:, :in_features]
    assert weight.scales is not None
    config = PackedConfig(16, 32, splits, 4, 1)
    parts = (weight.scheme, weight.data, weight.scales, weight.zeros)
    found = packed_linear(x, *parts, group_size, bias, config, fp8_inputs=True)
    assert found.dtype == NARROW
    dense = dequantize(weight).double()
    expected = widened.double() @ dense.T + bias.double()
    size = widened.double().abs() @ dense.abs().T + bias.double().abs()
    assert ((found.double() - expected).abs() <= BOUNDS[NARROW] * size).all()
    assert ((found.double() - x.double() @ dense.T - bias.double()).abs() <= 2**-4 * size).all()


def test_which_kernel_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the rows; 16-bit inputs are rounded for weights whose checkpoint says so, where the GPU multiplies fp8."""
    calls: list[str] = []
    monkeypatch.setattr(packed_weights, "use_triton", lambda x: True)
    monkeypatch.setattr(packed_weights, "multiplies_fp8", lambda device: multiplies)
    monkeypatch.setattr(
        triton_packed, "packed_linear", lambda *args, fp8_inputs: calls.append("few, fp8" if fp8_inputs else "few")
    )
    monkeypatch.setattr(packed_weights, "dequantized_linear", lambda *args: calls.append("values"))
    monkeypatch.setattr(packed_weights, "scaled_linear", lambda *args: calls.append("fp8") or library)

    def called(weight: PackedWeight, rows: int, dtype: torch.dtype = torch.bfloat16) -> list[str]:
        calls.clear()
        packed_weights.packed_linear(torch.empty(rows, 256, device="meta", dtype=dtype), weight)
        return calls.copy()

    plain = random_weight("fp8 channel", 32, 256).to("meta")
    rounding = replace(plain, fp8_inputs=True)
    most = triton_packed.MOST_ROWS
    multiplies = True
    library = torch.empty(0)
    assert called(plain, most) == ["few"] and called(plain, most + 1) == ["values"]
    assert called(rounding, most) == ["few, fp8"] and called(rounding, most + 1) == ["fp8"]
    assert called(rounding, most + 1, torch.float32) == ["values"]
    library = None
    assert called(rounding, most + 1) == ["fp8", "values"]
    multiplies = False
    assert called(rounding, 1) == ["few"] and called(rounding, most + 1) == ["values"]
    assert called(random_weight("q4_k", 32, 256).to("meta"), 1) == []  # whose scales are in the data


@pytest.mark.parametrize("dtype", fast_only([], [torch.bfloat16, torch.float16]), ids=str)
def test_products_in_fp8_by_the_library(dtype: torch.dtype) -> None:
    """With a scale for each row, which the CPU's library has as well."""
    weight = random_weight("fp8 channel", 64, 384).to(DEVICE)
    x = torch.randn(133, 384, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
    bias = torch.randn(64, generator=torch.Generator().manual_seed(2)).to(DEVICE, dtype)
    assert weight.scales is not None
    found = scaled_product.scaled_linear(x, weight.data, weight.scales, bias, 384)
    if DEVICE == "cuda" and found is None:
        pytest.skip("this GPU's library has no such product")
    assert found is not None and found.shape == (133, 64)
    rounded, scales = round_inputs(x, 384)
    dense = dequantize(weight).double()
    wide = rounded.double() * scales.double()
    size = wide.abs() @ dense.abs().T + bias.double().abs()
    assert ((found.double() - wide @ dense.T - bias.double()).abs() <= BOUNDS[dtype] * size).all()


def test_what_the_library_multiplies_in_fp8(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """With scales for groups its shape function takes the layouts; a product that is wrong or fails is not used."""
    scaled_product.library_multiplies.cache_clear()

    def rounded(x: Tensor, group_size: int, multiple: int = 1) -> tuple[Tensor, Tensor]:
        rows = -(-x.shape[0] // multiple) * multiple
        return x.new_empty(rows, x.shape[1], dtype=torch.float8_e4m3fn), x.new_empty(
            x.shape[1] // group_size, rows, dtype=torch.float32
        ).t()

    def unsupported(*_: object) -> Tensor:
        raise RuntimeError("no scales for groups")

    with monkeypatch.context() as patch:
        patch.setattr(triton_packed, "round_inputs", rounded)  # a GPU's kernel reads no memory of the CPU
        for variant in ("fp8 blocks", "fp8 channel"):
            weight = random_weight(variant, 64, 384).to("meta")
            x, bias = (torch.empty(size, device="meta", dtype=torch.bfloat16) for size in ((133, 384), (64,)))
            assert weight.scales is not None
            y = scaled_product._product(x, weight.data, weight.scales, bias, weight.group_size)
            assert y.shape == (144, 64) and y.dtype == torch.bfloat16
        device = torch.device("cpu", 0)  # asked for the first time
        patch.setattr(scaled_product, "_product", unsupported)
        with caplog.at_level(logging.INFO):
            assert not scaled_product.library_multiplies(device, torch.bfloat16, True)
            patch.setattr(scaled_product, "_product", lambda x, data, *_: x.new_full((len(x), len(data)), torch.nan))
            assert not scaled_product.library_multiplies(device, torch.bfloat16, False)
    assert "fails" in caplog.messages[0] and "error is inf" in caplog.messages[1]
    scaled_product.library_multiplies.cache_clear()
    weight = random_weight("fp8 blocks", 64, 300)
    assert weight.scales is not None
    x = torch.empty(133, 300, dtype=torch.bfloat16)
    assert scaled_product.scaled_linear(x, weight.data, weight.scales, None, 128) is None, "a last group that is short"


@pytest.mark.parametrize("rows", [1, 33])
@pytest.mark.slow
def test_configurations_of_a_sweep_multiply(rows: int) -> None:
    weight = random_weight("int4 bfloat16 zeros 128", 40, 1024).to(DEVICE)
    x = torch.randn(rows, 1024).to(DEVICE, NARROW)
    for config in packed_variants(packed_config(rows, 40, 1024)):
        check(x, weight, product(x, weight, config=config))
