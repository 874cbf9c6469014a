"""Packed weights: their values against the formats' own formulas, rows of them, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from packed_cases import VARIANTS, input_multiple, random_weight, same_bits

from nanovllm.ops.packed_weights import (
    FP8_BLOCK,
    GGUF_BLOCKS,
    PackedWeight,
    dequantize,
    gguf_weight,
    packed_linear,
)


@pytest.mark.parametrize("scheme", GGUF_BLOCKS)
def test_gguf_values_are_those_of_the_gguf_package(scheme: str) -> None:
    """Random bytes: every scale, minimum and value, subnormal and infinite halves too."""
    gguf = pytest.importorskip("gguf")
    block = GGUF_BLOCKS[scheme]
    data = torch.randint(0, 256, (37, 5 * block.bytes), dtype=torch.uint8)
    kind = gguf.GGMLQuantizationType[scheme.upper()]
    assert gguf.GGML_QUANT_SIZES[kind] == (block.inputs, block.bytes)
    with np.errstate(all="ignore"):
        expected = torch.from_numpy(gguf.quants.dequantize(data.numpy(), kind))
    ours = dequantize(gguf_weight(scheme, data))
    assert torch.equal(ours.isnan(), expected.isnan()) and expected.isfinite().float().mean() > 0.5
    assert same_bits(ours.nan_to_num(), expected.nan_to_num())


def test_integers_are_scaled_differences_from_zero() -> None:
    """Written out one weight at a time, in Python's fp64 and rounded once: a 5-bit difference times a half is exact."""
    weight = random_weight("int4 zeros", 5, 96)
    assert weight.scales is not None and weight.zeros is not None
    for output in range(5):
        for i in range(96):
            byte = int(weight.data[output, i // 2])
            q = byte & 15 if i % 2 == 0 else byte >> 4
            scale = float(weight.scales[output, i // 32])
            zero = int(weight.zeros[output, i // 32])
            assert float(dequantize(weight)[output, i]) == (q - zero) * scale
    symmetric = replace(weight, zeros=None)
    assert same_bits(dequantize(symmetric), dequantize(replace(weight, zeros=torch.full_like(weight.zeros, 8))))


def test_signed_bytes_times_their_scale() -> None:
    weight = random_weight("int8", 3, 64)
    assert weight.scales is not None
    assert same_bits(dequantize(weight), weight.data.float() * weight.scales.float().repeat_interleave(32, dim=1))


def test_fp8_scales_of_blocks_cover_128_outputs_and_inputs() -> None:
    weight = random_weight("fp8 blocks", 300, 200)
    assert weight.scales is not None and weight.scales.shape == (300, 2)
    dense = dequantize(weight)
    for output, i in ((0, 0), (127, 127), (128, 127), (127, 128), (299, 199)):
        expected = weight.data[output, i].float() * weight.scales[output, i // 128]
        assert dense[output, i] == expected
    assert torch.equal(weight.scales[:128], weight.scales[:1].expand(128, 2)), "as packed_cases makes them"


@pytest.mark.parametrize("variant", VARIANTS)
def test_rows_are_those_of_the_whole(variant: str) -> None:
    """A shard, and the rows of an embedding."""
    weight = random_weight(variant, 300, 2 * input_multiple(variant) * (FP8_BLOCK if "fp8" in variant else 1))
    dense = dequantize(weight)
    for index in (slice(100, 229), slice(0, 0), torch.tensor([299, 3, 3, 128])):
        part = weight.rows(index)
        assert same_bits(dequantize(part), dense[index])
        assert part.shape == dense[index].shape
        assert same_bits(dequantize(part.rows(slice(1, 3))), dense[index][1:3])
    parts = (weight.data, weight.scales, weight.zeros)
    assert weight.nbytes == sum(part.numel() * part.element_size() for part in parts if part is not None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_product_is_that_of_the_values(variant: str, dtype: torch.dtype) -> None:
    weight = random_weight(variant, 70, 256)
    x = torch.randn(5, 256).to(dtype)
    bias = torch.randn(70).to(dtype)
    ours = packed_linear(x, weight, bias).double()
    exact = x.double() @ dequantize(weight).double().T + bias.double()
    rounding = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}[dtype]
    sizes = x.double().abs() @ dequantize(weight).double().abs().T
    assert ours.dtype == torch.float64 and torch.all((ours - exact).abs() <= rounding * exact.abs() + 1e-4 * sizes)
    assert packed_linear(x[:0], weight).shape == (0, 70)


def int4(**changed: Any) -> PackedWeight:
    parts: dict[str, Any] = {
        "scheme": "int4",
        "data": torch.zeros(4, 32, dtype=torch.uint8),
        "scales": torch.ones(4, 2, dtype=torch.float16),
        "zeros": None,
        "group_size": 32,
        "in_features": 64,
    }
    return PackedWeight(**(parts | changed))


GGUF = {"scheme": "q4_0", "data": torch.zeros(4, 36, dtype=torch.uint8), "scales": None}
FP8 = {"scheme": "fp8", "data": torch.zeros(4, 64).to(torch.float8_e4m3fn), "scales": torch.ones(4, 1)}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"scheme": "q2_k"}, "Scheme must be one of int4, int8, fp8, mxfp4, q4_0"),
    ({"data": torch.zeros(4, 32)}, "64 inputs of int4 do not fit data torch.float32 (4, 32)"),
    ({"group_size": 0}, "must be positive, got 64 and 0"),
    ({"in_features": 65, "group_size": 65}, "65 inputs of int4 do not fit"),
    ({"group_size": 16}, "got 16"),
    ({"scales": None}, "got None"),
    ({"scales": torch.ones(4, 1)}, "[4, 2], got torch.float32 (4, 1)"),
    ({"zeros": torch.zeros(4, 2)}, "The zeros of int4 must be torch.uint8 [4, 2], got torch.float32"),
    (GGUF | {"in_features": 96}, "96 inputs of q4_0 do not fit"),
    (GGUF | {"group_size": 64}, "q4_0 has groups of 32"),
    (FP8 | {"group_size": 64, "scales": torch.ones(4, 1).half()}, "The scales of fp8 must be torch.float32"),
    (FP8 | {"group_size": 32}, "of fp8 of 128, or all, got 32"),
]


def test_refuses_parts_that_do_not_fit() -> None:
    int4(), int4(**GGUF), int4(**FP8, group_size=64)
    for changed, message in REFUSED:
        with pytest.raises(ValueError) as refused:
            int4(**changed)
        assert message in str(refused.value)
