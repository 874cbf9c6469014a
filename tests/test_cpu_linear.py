"""The C++ linear layer: its order of summation, rows that depend on themselves alone, and what it refuses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nanovllm.errors import ConfigError
from nanovllm.layers.dense_weight import linear
from nanovllm.ops import _cpu_kernels, cpu_kernels
from nanovllm.ops.cpu_kernels import cpu_linear

ISAS = cpu_kernels.instruction_sets()
FUSED = [isa for isa in ISAS if isa in ("avx512", "avx2")]
SUM_INPUTS = 384  # of a sum block, twice as many where pairs of bf16 are multiplied
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@dataclass(frozen=True)
class Case:
    seed: int
    rows: int
    in_features: int
    out_features: int
    dtype: torch.dtype
    has_bias: bool
    gap: int  # elements between the rows of x
    offset: int  # elements by which buffers are shifted from where the allocator put them
    threads: int
    isa: str


@st.composite
def cases(draw: st.DrawFn, max_rows: int = 60, max_in: int = 1600) -> Case:
    """Sizes around every edge of the kernels: span, sum block, panel and block of outputs, pass and tile of rows."""
    inputs = [1, 2, 3, 15, 16, 17, 31, 32, 33, 383, 384, 385, 767, 768, 769, 800, 1153]
    outputs = [1, 7, 8, 9, 15, 16, 17, 32, 47, 48, 49, 95, 97, 287, 288, 289, 300]
    rows = [1, 2, 6, 7, 9, 10, 12, 13, 18, 19, 24, 25, 27, 28]
    return Case(
        seed=draw(st.integers(0, 2**20)),
        rows=draw(st.sampled_from([n for n in rows if n <= max_rows]) | st.integers(1, max_rows)),
        in_features=draw(st.sampled_from([n for n in inputs if n <= max_in]) | st.integers(1, max_in)),
        out_features=draw(st.sampled_from(outputs) | st.integers(1, 130)),
        dtype=draw(st.sampled_from(DTYPES)),
        has_bias=draw(st.booleans()),
        gap=draw(st.sampled_from([0, 0, 1, 7])),
        offset=draw(st.sampled_from([0, 1, 2, 8, 16])),
        threads=draw(st.integers(1, 3)),
        isa=draw(st.sampled_from(ISAS)),
    )


def shifted(tensor: Tensor, offset: int, gap: int = 0) -> Tensor:
    """The tensor with its first element `offset` elements into a buffer, and NaN in all places around it."""
    rows, width = tensor.reshape(-1, tensor.shape[-1]).shape
    buffer = torch.full((offset + rows * (width + gap) + 64,), torch.nan, dtype=tensor.dtype)
    view = buffer[offset : offset + rows * (width + gap)].view(rows, width + gap)[:, :width]
    view.copy_(tensor.reshape(rows, width))
    return view.reshape(tensor.shape) if gap == 0 else view


def operands(case: Case) -> tuple[Tensor, Tensor, Tensor | None]:
    """x, weight and bias whose sums all but cancel: what is left is rounding, and any other order shows."""
    generator = torch.Generator().manual_seed(case.seed)
    half = -(-case.in_features // 2)
    x, weight = (torch.randn(n, half, generator=generator).to(case.dtype) for n in (case.rows, case.out_features))
    x = torch.cat((x, x), dim=1)[:, : case.in_features]
    weight = torch.cat((weight, -weight), dim=1)[:, : case.in_features]
    bias = (torch.randn(case.out_features, generator=generator) * 2.0**-17).to(case.dtype) if case.has_bias else None
    x = shifted(x, case.offset, case.gap)
    weight = shifted(weight, case.offset)
    return x, weight, None if bias is None else shifted(bias, case.offset)


def product(case: Case, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return cpu_linear(x, weight, bias, isa=case.isa, num_threads=case.threads)


def in_order(case: Case, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The sum as csrc/cpu_linear.h has it, one rounding after the other.

    A product of two 16-bit numbers is exact in fp64, and so is its sum with an fp32 number to far below fp32's last
    place: rounding that to fp32 is a fused multiply-add. With AVX512-bf16 the second product of a pair comes first.
    """
    pairs = case.isa == "avx512bf16" and case.dtype == torch.bfloat16
    total = None
    for first in range(0, case.in_features, SUM_INPUTS * (2 if pairs else 1)):
        end = min(first + SUM_INPUTS * (2 if pairs else 1), case.in_features)
        order = [k ^ 1 for k in range(first, end + end % 2)] if pairs else list(range(first, end))
        block = torch.zeros(case.rows, case.out_features)
        for k in (k for k in order if k < case.in_features):
            exact = x[:, k, None].double() * weight[:, k].double()
            block = (block.double() + (exact.float().double() if case.isa == "portable" else exact)).float()
        total = block if total is None else total + block
    assert total is not None
    return (total if bias is None else total + bias.float()).to(case.dtype)


def same_bits(ours: Tensor, theirs: Tensor) -> bool:
    as_int = torch.int32 if ours.dtype == torch.float32 else torch.int16
    return torch.equal(ours.contiguous().view(as_int), theirs.contiguous().view(as_int))


# ---- the sums


@settings(max_examples=60)
@given(cases(max_rows=30, max_in=900))
def test_sums_in_the_order_that_it_says(case: Case) -> None:
    x, weight, bias = operands(case)
    if case.dtype == torch.float32:  # products of fewer bits, so that they are exact in fp64 with room for the sum
        x, weight = (tensor.bfloat16().float() for tensor in (x, weight))
    assert same_bits(product(case, x, weight, bias), in_order(case, x, weight, bias))


@settings(max_examples=100)
@given(cases(max_rows=300, max_in=2100))
def test_matches_fp64(case: Case) -> None:
    x, weight, bias = operands(case)
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    size = x.double().abs() @ weight.double().abs().T  # rounding of fp32 sums is relative to what was added
    rounding = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}[case.dtype]
    bound = (case.in_features + 2) * 2.0**-24 * size + rounding * exact.abs() + 2.0**-24
    assert torch.all((product(case, x, weight, bias).double() - exact).abs() <= bound)


@pytest.mark.slow
@settings(max_examples=60)
@given(cases(max_rows=300, max_in=20_000))
def test_matches_fp64_for_long_sums(case: Case) -> None:
    test_matches_fp64.hypothesis.inner_test(case)


@settings(max_examples=100)
@given(cases(max_rows=80), st.data())
def test_a_row_depends_on_itself_alone(case: Case, draw: st.DataObject) -> None:
    """Whatever other rows there are, however many threads, wherever the buffers lie."""
    x, weight, bias = operands(case)
    begin = draw.draw(st.integers(0, case.rows - 1))
    end = draw.draw(st.integers(begin + 1, case.rows))
    alone = cpu_linear(
        shifted(x[begin:end], draw.draw(st.integers(0, 17))), weight.clone(), bias, isa=case.isa, num_threads=1
    )
    assert same_bits(alone, product(case, x, weight, bias)[begin:end])


@settings(max_examples=60)
@given(cases(max_rows=80), st.integers(0, 299))
def test_an_output_depends_on_its_weights_alone(case: Case, output: int) -> None:
    x, weight, bias = operands(case)
    output %= case.out_features
    one = slice(output, output + 1)
    alone = cpu_linear(x, weight[one], None if bias is None else bias[one], isa=case.isa)
    assert same_bits(alone, product(case, x, weight, bias)[:, one])


@pytest.mark.skipif(len(FUSED) < 2, reason="this machine has not got AVX-512 and AVX2")
@settings(max_examples=60)
@given(cases(max_rows=80))
def test_avx512_and_avx2_give_the_same_bits(case: Case) -> None:
    x, weight, bias = operands(case)
    assert same_bits(*(cpu_linear(x, weight, bias, isa=isa) for isa in FUSED))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [3, 40])
def test_what_is_not_finite_goes_where_torch_lets_it_go(dtype: torch.dtype, isa: str, rows: int) -> None:
    generator = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(n, 45, generator=generator).to(dtype) for n in (rows, 50))
    x[1, 44], x[2, 3], weight[7, 9], weight[8, 10] = torch.nan, torch.inf, -torch.inf, torch.nan
    expected = F.linear(x.float(), weight.float())
    ours = cpu_linear(x, weight, isa=isa)
    assert torch.equal(ours.isnan(), expected.isnan()) and torch.equal(ours.isinf(), expected.isinf())
    assert torch.equal(ours[ours.isinf()].float(), expected[expected.isinf()])


@pytest.mark.parametrize("isa", ISAS)
def test_rounds_to_16_bits_as_torch_does(isa: str) -> None:
    """Every kind of number through a product with one, whose sum is the number itself."""
    bits = torch.cat((torch.arange(0, 2**31, 65_537 * 7), torch.tensor([0x477FEFFF, 0x477FF000, 0x7F7FFFFF, 1])))
    numbers = bits.to(torch.int32).view(torch.float32)
    numbers = torch.cat((numbers, -numbers))
    for dtype in (torch.bfloat16, torch.float16):
        # The high and the low half of the number, each exact in the dtype where it is in range.
        high = numbers.to(dtype)
        low = (numbers - high.float()).to(dtype)
        x = torch.stack((high, low), dim=1)
        x = x[x.isfinite().all(dim=1)]
        exact = x.double().sum(dim=1).float()
        normal = exact.abs() >= 2.0**-126  # AVX512-bf16 takes smaller ones for zero
        ours = cpu_linear(x, torch.ones(1, 2, dtype=dtype), isa=isa)[:, 0]
        assert torch.equal(ours[normal], exact[normal].to(dtype))


def test_nothing_in_gives_nothing_out_and_other_tensors_go_to_torch() -> None:
    x = torch.zeros(3, 64)
    weight = torch.zeros(70, 64)
    for rows, outputs in ((0, 70), (3, 0), (0, 0)):
        assert cpu_linear(x[:rows], weight[:outputs]).shape == (rows, outputs)
    assert linear(x.to("meta"), weight.to("meta")).shape == (3, 70)
    assert linear(x.double(), weight.double()).dtype == torch.float64


# ---- refusals


def bf16(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"x": torch.zeros(2, 8)}, "all bfloat16, float16 or float32; got x torch.float32"),
    ({"weight": bf16(4, 8).to("meta")}, "weight torch.bfloat16 (4, 8) with strides (8, 1) on meta"),
    ({"bias": torch.zeros(4)}, "bias torch.float32 (4,)"),
    ({"x": bf16(8)}, "a product takes x [rows, in]"),
    ({"x": bf16(2, 7)}, "got x torch.bfloat16 (2, 7)"),
    ({"x": bf16(2, 0), "weight": bf16(4, 0)}, "in being positive"),
    ({"bias": bf16(8)[::2]}, "bias torch.bfloat16 (4,) with strides (2,)"),
    ({"x": bf16(2, 16)[:, ::2]}, "(2, 8) with strides (16, 2)"),
    ({"isa": "mmx"}, "Instruction set 'mmx' does not run on this machine"),
]


def test_refuses_what_does_not_fit() -> None:
    good: dict[str, Any] = {"x": bf16(2, 8), "weight": bf16(4, 8), "bias": bf16(4)}
    cpu_linear(**good)
    for changed, message in REFUSED:
        with pytest.raises(ValueError) as refused:
            cpu_linear(**(good | changed))
        assert message in str(refused.value)


def test_the_environment_names_the_best_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANOVLLM_CPU_ISA", "portable")
    assert _cpu_kernels.instruction_sets() == ["portable"]
    monkeypatch.setenv("NANOVLLM_CPU_ISA", "")
    everything = _cpu_kernels.instruction_sets()
    assert everything[-1] == "portable" and set(ISAS) <= set(everything)
    monkeypatch.setenv("NANOVLLM_CPU_ISA", "sse9")
    with pytest.raises(ValueError, match="NANOVLLM_CPU_ISA=sse9 does not run on this machine; choose one of"):
        _cpu_kernels.instruction_sets()
    with pytest.raises(ConfigError, match="NANOVLLM_CPU_ISA=sse9"):
        cpu_kernels.instruction_sets.__wrapped__()  # what was asked before is not remembered
