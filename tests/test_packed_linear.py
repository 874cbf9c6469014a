"""Products with packed weights in C++: accuracy, the order of the sums, rows that depend on themselves alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_cases import VARIANTS, input_multiple, random_weight, same_bits
from torch import Tensor

from nanovllm.ops import _cpu_kernels, cpu_kernels
from nanovllm.ops.packed_weights import (
    GGUF_BLOCKS,
    PackedWeight,
    cpu_packed_linear,
    dequantize,
    gguf_weight,
    packed_linear,
)

ISAS = cpu_kernels.instruction_sets()
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}


@dataclass(frozen=True)
class Case:
    variant: str
    seed: int
    rows: int
    out_features: int
    blocks: int  # of inputs
    dtype: torch.dtype
    has_bias: bool
    gap: int  # elements between the rows of x
    threads: int
    isa: str

    @property
    def in_features(self) -> int:
        multiple = input_multiple(self.variant)
        return self.blocks * multiple if multiple >= 32 else multiple * (37 * self.blocks - 30)


@st.composite
def cases(draw: st.DrawFn, max_rows: int = 40) -> Case:
    """Sizes around every edge of the kernels: panel, tiles of panels and of rows, part and slice."""
    rows = [n for n in (1, 2, 3, 4, 5, 6, 7, 12, 13, 24, 25, 255, 256, 257) if n <= max_rows]
    return Case(
        variant=draw(st.sampled_from(VARIANTS)),
        seed=draw(st.integers(0, 2**20)),
        rows=draw(st.sampled_from(rows)),
        out_features=draw(st.sampled_from([1, 15, 16, 17, 31, 32, 33, 48, 65])),
        blocks=draw(st.integers(1, 11)),
        dtype=draw(st.sampled_from(DTYPES)),
        has_bias=draw(st.booleans()),
        gap=draw(st.sampled_from([0, 1, 7])),
        threads=draw(st.integers(1, 3)),
        isa=draw(st.sampled_from(ISAS)),
    )


def operands(case: Case) -> tuple[Tensor, PackedWeight, Tensor | None]:
    """Rows of very different inputs in each group, a group of zeros among them, and NaN between the rows."""
    generator = torch.Generator().manual_seed(case.seed)
    x = torch.randn(case.rows, case.in_features, generator=generator)
    x *= torch.randn(case.rows, case.in_features, generator=generator).mul(3).exp().clamp(max=1e4)
    x[0, :32] = 0
    buffer = torch.full((case.rows, case.in_features + case.gap), torch.nan, dtype=case.dtype)
    buffer[:, : case.in_features] = x.to(case.dtype)
    bias = torch.randn(case.out_features, generator=generator).to(case.dtype) if case.has_bias else None
    weight = random_weight(case.variant, case.out_features, case.in_features, case.seed).in_panels()
    return buffer[:, : case.in_features], weight, bias


def product(case: Case, x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
    return cpu_packed_linear(x, weight, bias, isa=case.isa, num_threads=case.threads)


def groups_of(x: Tensor, size: int) -> Tensor:
    """fp64 [rows, groups, size], filled up with zeros."""
    return torch.nn.functional.pad(x.double(), (0, -x.shape[1] % size)).unflatten(1, (-1, size))


def input_errors(x: Tensor, scheme: str) -> Tensor:
    """At most so far are the integers of each input from the input, [rows, in]."""
    if scheme == "fp8":  # multiplied in fp32
        return torch.zeros_like(x, dtype=torch.float64)
    groups = groups_of(x, 32)
    largest = groups.abs().amax(dim=-1, keepdim=True)
    if x.dtype == torch.float32:
        errors = (2.0**-28 * largest).expand(groups.shape)
    else:
        exact = 2.0**-7 if x.dtype == torch.bfloat16 else 2.0**-4  # of the largest: larger inputs are not rounded
        errors = torch.where(groups.abs() < exact * largest, 2.0**-15 * largest, 0.0)
    return errors.flatten(1)[:, : x.shape[1]]


def offsets(weight: PackedWeight) -> Tensor:
    """fp64 [out, in]: at most how large the two numbers are that a weight is the sum of, if it is one.

    A weight with a minimum or zero is the sum of that and the rest.
    """
    dense = dequantize(weight).double().abs()
    largest = {"q4_1": 15, "q5_1": 31, "q4_k": 15, "q5_k": 31, "int4": 15, "int8": 128}
    if weight.scheme not in largest or (weight.scheme.startswith("int") and weight.zeros is None):
        return dense
    size = weight.group_size
    groups = groups_of(dequantize(weight), size) if weight.in_features % size == 0 else None
    assert groups is not None
    spread = groups.amax(dim=-1, keepdim=True) - groups.amin(dim=-1, keepdim=True)
    return dense + (4 * dense.amax() + spread).expand(groups.shape).flatten(1)


@settings(max_examples=120)
@given(cases(max_rows=257))
def test_matches_fp64(case: Case) -> None:
    """The bound that csrc/cpu_packed.h states: the rounding of inputs, and of fp32 sums relative to what was added."""
    x, weight, bias = operands(case)
    dense = dequantize(weight).double()
    exact = x.double() @ dense.T + (0 if bias is None else bias.double())
    inputs = input_errors(x, weight.scheme) @ dense.abs().T
    roundings = case.in_features / 32 + 20 if weight.scheme == "fp8" else case.in_features / 16 + 8  # of a sum
    sums = roundings * 2.0**-24 * (x.double().abs() @ offsets(weight).T)
    bound = inputs + sums + ROUNDING[case.dtype] * (exact.abs() + inputs + sums) + 2.0**-24
    assert torch.all((product(case, x, weight, bias).double() - exact).abs() <= bound)


@settings(max_examples=60)
@given(cases(), st.sampled_from(["q4_0", "q4_1", "q5_0", "q5_1"]))
def test_sums_in_the_order_that_it_says(case: Case, scheme: str) -> None:
    """Written out in torch, in fp64, which holds an fp32 number plus the product of two, and rounded to fp32."""
    case = replace(case, variant=scheme, dtype=torch.bfloat16, gap=0)
    x, panels, bias = operands(case)
    data = panels.rows(slice(None)).data.unflatten(1, (-1, GGUF_BLOCKS[scheme].bytes))
    scale = data[..., :2].contiguous().view(torch.float16).float()[..., 0]
    nibbles = data[..., -16:]
    q = torch.cat((nibbles & 15, nibbles >> 4), dim=-1).double()
    if scheme.startswith("q5"):
        fifths = torch.stack([*data[..., -20:-16].unbind(-1)], dim=-1).view(torch.int32)  # begins where an int32 may
        q += 16 * (fifths >> torch.arange(32) & 1)
    q -= {"q4_0": 8, "q5_0": 16}.get(scheme, 0)
    groups = groups_of(x, 32)
    unit = 2.0 ** (groups.abs().amax(dim=-1).log2().floor().clamp(min=-112) - 14)
    n = (groups / unit[..., None]).round()
    total = torch.zeros(case.rows, case.out_features)
    for g in range(case.blocks):
        group_unit = unit[:, g, None]
        total = (total + scale[:, g].double() * (group_unit * (n[:, g] @ q[:, g].T))).float()
        if scheme in ("q4_1", "q5_1"):
            minimum = data[..., 2:4].contiguous().view(torch.float16).double()[:, g, 0]
            total = (total + minimum * (group_unit * n[:, g].sum(dim=-1, keepdim=True))).float()
    expected = (total if bias is None else total + bias.float()).to(x.dtype)
    assert same_bits(product(case, x, panels, bias), expected)


@settings(max_examples=30)
@given(cases())
def test_sums_of_fp8_in_the_order_that_it_says(case: Case) -> None:
    """As above: sums of even and of odd inputs for each group of 32, in fp32."""
    case = replace(case, variant="fp8 channel", dtype=torch.bfloat16, gap=0)
    _, panels, bias = operands(case)
    x = torch.randn(case.rows, case.in_features, generator=torch.Generator().manual_seed(case.seed)).bfloat16()
    assert panels.scales is not None
    weight = panels.rows(slice(None))
    assert weight.scales is not None
    rows = groups_of(x, 32)
    columns = groups_of(weight.data.float(), 32)
    total = torch.zeros(case.rows, case.out_features)
    for g in range(rows.shape[1]):
        even, odd = torch.zeros(2, case.rows, case.out_features)
        for i in range(0, 32, 2):
            even = (even + rows[:, g, i, None] * columns[:, g, i]).float()
            odd = (odd + rows[:, g, i + 1, None] * columns[:, g, i + 1]).float()
        total = (total + weight.scales[:, 0].double() * (even + odd)).float()
    expected = (total if bias is None else total + bias.float()).to(x.dtype)
    assert same_bits(product(case, x, panels, bias), expected)


@settings(max_examples=150)
@given(cases(max_rows=257), st.data())
def test_a_row_depends_on_itself_alone(case: Case, draw: st.DataObject) -> None:
    """Whatever other rows there are, however many threads, on every instruction set."""
    x, weight, bias = operands(case)
    begin = draw.draw(st.integers(0, case.rows - 1))
    end = draw.draw(st.integers(begin + 1, case.rows))
    alone = cpu_packed_linear(x[begin:end].clone(), weight, bias, isa=draw.draw(st.sampled_from(ISAS)), num_threads=1)
    assert same_bits(alone, product(case, x, weight, bias)[begin:end])


@settings(max_examples=40)
@given(cases(), st.integers(0, 299))
def test_an_output_depends_on_its_weights_alone(case: Case, output: int) -> None:
    """And a weight that is not in panels gives the same bits."""
    x, weight, bias = operands(case)
    output %= case.out_features
    one = slice(output, output + 1)
    alone = packed_linear(x, weight.rows(one), None if bias is None else bias[one])
    assert same_bits(alone, product(case, x, weight, bias)[:, one])


@pytest.mark.parametrize("variant", VARIANTS)
def test_panels_lose_nothing(variant: str) -> None:
    in_features = 3 * input_multiple(variant) if input_multiple(variant) > 2 else 106
    weight = random_weight(variant, 83, in_features)
    panels = weight.in_panels()
    assert panels.shape == weight.shape and panels.in_panels() is panels
    assert same_bits(dequantize(panels), dequantize(weight))
    index = torch.tensor([82, 0, 17, 17])
    ours = panels.rows(index)
    theirs = weight.rows(index)
    assert torch.equal(ours.data.view(torch.uint8), theirs.data.view(torch.uint8))
    assert same_bits(dequantize(ours), dequantize(theirs))
    full = random_weight(variant, 96, 32 * in_features)
    assert full.in_panels().nbytes == full.nbytes
    copied = full.in_panels()
    in_place = full.in_panels(in_place=True)
    assert in_place.data.data_ptr() == full.data.data_ptr() != copied.data.data_ptr()
    assert torch.equal(in_place.data.view(torch.uint8), copied.data.view(torch.uint8))
    restored = weight.in_panels().in_rows()
    for name in ("data", "scales", "zeros"):
        ours = getattr(restored, name)
        theirs = getattr(weight, name)
        assert theirs is None if ours is None else torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.parametrize("variant", ["q4_k", "fp8 tensor"])
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_are_not_finite_are_so_alone(dtype: torch.dtype, isa: str, variant: str) -> None:
    weight = random_weight(variant, 20, 512).in_panels()
    x = torch.randn(4, 512).to(dtype)
    clean = cpu_packed_linear(x, weight, isa=isa)
    x[1, 300], x[2, 5] = torch.nan, -torch.inf
    y = cpu_packed_linear(x, weight, isa=isa)
    assert y[1].isnan().all() and not y[2].isfinite().any() and same_bits(y[0::3], clean[0::3])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_smallest_and_the_largest_inputs(dtype: torch.dtype, isa: str) -> None:
    """An integer's unit is at least fp32's smallest normal number; two of them hold fp32's largest only nearly."""
    info = torch.finfo(dtype)
    q = torch.zeros(1, 18, dtype=torch.uint8)
    q[0, :2] = torch.tensor([1.0]).half().view(torch.uint8)
    q[0, 2:] = 8 | 9 << 4  # zeros for the first half, ones for the second
    weight = gguf_weight("q4_0", q).in_panels()
    x = torch.zeros(3, 32, dtype=dtype)
    largest = info.max / 2 if dtype == torch.float32 else info.max
    x[0, 20], x[1, 31], x[2, 16] = largest, info.tiny, info.tiny * 384
    y = cpu_packed_linear(x, weight, isa=isa)
    assert y[0, 0] == largest and y[1, 0] == info.tiny and y[2, 0] == info.tiny * 384


@pytest.mark.parametrize("isa", ISAS)
def test_the_largest_sums_do_not_overflow(isa: str) -> None:
    x = torch.full((2, 64), 255.0 / 128)
    for variant, value in (("int8", -128), ("fp8 tensor", None)):
        weight = random_weight(variant, 16, 64)
        data = torch.full((16, 64), value, dtype=torch.int8) if value else torch.full((16, 64), 0x7E).to(torch.uint8)
        weight = replace(weight, data=data.view(weight.data.dtype))
        exact = x.double() @ dequantize(weight).double().T
        for dtype in DTYPES:
            ours = cpu_packed_linear(x.to(dtype), weight, isa=isa).double()
            assert torch.allclose(ours, exact, rtol=2 * ROUNDING[dtype] + 1e-6, atol=0)


def test_columns_apart_are_gathered_and_nothing_in_gives_nothing_out() -> None:
    weight = random_weight("q8_0", 20, 64).in_panels()
    x = torch.randn(3, 128)[:, ::2]
    bias = torch.randn(40)[::2]
    assert same_bits(packed_linear(x, weight, bias), packed_linear(x.clone(), weight, bias.clone()))
    assert packed_linear(x[:0], weight).shape == (0, 20)
    assert packed_linear(x, weight.rows(slice(0, 0)).in_panels()).shape == (3, 0)


def test_refuses_fp8_weights_that_are_nan() -> None:
    weight = random_weight("fp8 channel", 20, 64)
    weight.data[3, 5] = torch.nan
    with pytest.raises(ValueError, match="An fp8 weight is NaN"):
        weight.in_panels()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"scheme": "q2_k"}, "no CPU kernels for the scheme q2_k"),
        ({"dtype": "int8"}, "no CPU kernels for the dtype int8"),
    ],
)
def test_the_extension_refuses_what_it_cannot_run(changed: dict[str, Any], message: str) -> None:
    data = torch.zeros(2 * 288, dtype=torch.uint8)
    x = torch.zeros(1, 64)
    y = torch.zeros(1, 4)
    of_weight: dict[str, Any] = {
        "scheme": "q4_0", "data": data.data_ptr(), "scales": 0, "scale_dtype": "float32", "zeros": 0,
        "outputs_per_scale": 1, "group_size": 32, "in_features": 64, "out_features": 4,
    }  # fmt: skip
    of_product: dict[str, Any] = {
        "isa": "portable", "dtype": "float32", "x": (x.data_ptr(), 64), "bias": 0, "y": (y.data_ptr(), 4), "rows": 1,
        "threads": 1,
    }  # fmt: skip
    _cpu_kernels.packed_linear(weight=_cpu_kernels.PackedWeight(**of_weight), **of_product)
    with pytest.raises(ValueError) as refused:
        weight = _cpu_kernels.PackedWeight(**{key: changed.get(key, value) for key, value in of_weight.items()})
        _cpu_kernels.packed_linear(weight=weight, **{key: changed.get(key, value) for key, value in of_product.items()})
    assert message in str(refused.value)
