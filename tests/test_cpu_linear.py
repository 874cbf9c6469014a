"""The C++ linear layer on few bf16 rows: its order of summation, torch's bits, and who is asked before it is used."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nanovllm.layers.linear import SMALL_PRODUCT, linear
from nanovllm.ops import _cpu_linear, cpu_linear
from nanovllm.ops.cpu_linear import MAX_ROWS, available, few_row_linear, sums_like_torch

needs_instructions = pytest.mark.skipif(not available(), reason="this processor has no AVX512-bf16")
LIKE_TORCH = available() and sums_like_torch(640, False)
needs_like_torch = pytest.mark.skipif(not LIKE_TORCH, reason="torch sums in another order on this processor")
SMALL_BIAS = 2.0**-17  # of the size of the rounding that shows the order; a larger one would hide it


@dataclass(frozen=True)
class Case:
    seed: int
    rows: int
    in_features: int
    out_features: int
    has_bias: bool
    gap: int  # elements between the rows of x
    threads: int


@st.composite
def cases(draw: st.DrawFn, max_rows: int = MAX_ROWS, max_in: int = 2100, min_out: int = 1) -> Case:
    """Sizes around every edge of the kernel: pair, vector, block of a sum, tile of outputs, pass of rows."""
    edges = [1, 2, 3, 31, 32, 33, 63, 64, 65, 511, 512, 513, 1023, 1024, 1025, 1056, 2048, 2049]
    return Case(
        seed=draw(st.integers(0, 2**20)),
        rows=draw(st.integers(1, max_rows)),
        in_features=draw(st.sampled_from([n for n in edges if n <= max_in]) | st.integers(1, max_in)),
        out_features=draw(st.sampled_from([min_out, 15, 16, 17, 31, 32, 33, 48, 49]) | st.integers(min_out, 130)),
        has_bias=draw(st.booleans()),
        gap=draw(st.sampled_from([0, 0, 1, 7])),
        threads=draw(st.integers(1, 3)),
    )


def cancelling(case: Case, rows: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """x, weight and bias whose sums all but cancel: what is left is rounding, and any other order shows."""
    generator = torch.Generator().manual_seed(case.seed)
    half = -(-case.in_features // 2)
    x, weight = (torch.randn(n, half, generator=generator).bfloat16() for n in (rows, case.out_features))
    apart = torch.full((rows, case.in_features + case.gap), torch.nan, dtype=torch.bfloat16)
    apart[:, : case.in_features] = torch.cat((x, x), dim=1)[:, : case.in_features]
    weight = torch.cat((weight, -weight), dim=1)[:, : case.in_features].contiguous()
    bias = (torch.randn(case.out_features, generator=generator) * SMALL_BIAS).bfloat16() if case.has_bias else None
    return apart[:, : case.in_features], weight, bias


def in_order(x: Tensor, weight: Tensor, bias: Tensor | None, block: int) -> Tensor:
    """The sum as csrc/cpu_linear.h has it, one fp32 addition after the other.

    A product of two bf16 is exact in fp32. Within a pair the instruction adds the second product first.
    """
    blocks = []
    for columns, factors in zip(x.float().split(block, dim=1), weight.float().split(block, dim=1), strict=True):
        total = torch.zeros(x.shape[0], weight.shape[0])
        for first in range(0, columns.shape[1], 2):
            for k in range(min(first + 2, columns.shape[1]) - 1, first - 1, -1):
                total += columns[:, k, None] * factors[:, k]
        blocks.append(total)
    total = blocks[0]
    for later in blocks[1:]:
        total = total + later
    return (total if bias is None else total + bias.float()).bfloat16()


def same_bits(ours: Tensor, theirs: Tensor) -> bool:
    return torch.equal(ours.view(torch.int16), theirs.view(torch.int16))


# ---- the kernel


@needs_instructions
@settings(deadline=None, max_examples=60)
@given(cases(max_in=1100))
def test_sums_in_the_order_that_it_says(case: Case) -> None:
    x, weight, bias = cancelling(case, case.rows)
    block = 512 if case.in_features <= 1024 else 1024
    ours = few_row_linear(x, weight, bias, num_threads=case.threads)
    assert same_bits(ours, in_order(x, weight, bias, block))


@needs_like_torch
@settings(deadline=None, max_examples=300)
@given(cases(min_out=2))
def test_bits_are_those_of_torch_on_many_rows(case: Case) -> None:
    rows = max(2 * MAX_ROWS, SMALL_PRODUCT // (case.in_features * case.out_features) + 1)
    x, weight, bias = cancelling(case, rows)
    ours = few_row_linear(x[: case.rows], weight, bias, num_threads=case.threads)
    assert same_bits(ours, F.linear(x, weight, bias)[: case.rows])


@needs_instructions
@settings(deadline=None, max_examples=100)
@given(cases())
def test_matches_fp64(case: Case) -> None:
    x, weight, bias = cancelling(case, case.rows)
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    size = x.double().abs() @ weight.double().abs().T  # rounding of fp32 sums is relative to what was added
    ours = few_row_linear(x, weight, bias, num_threads=case.threads)
    assert torch.all((ours.double() - exact).abs() <= case.in_features * 2.0**-24 * size + 2.0**-8 * exact.abs())


@needs_instructions
@pytest.mark.parametrize("rows", [MAX_ROWS, MAX_ROWS + 1, 100])
def test_takes_more_rows_than_it_is_fast_for(rows: int) -> None:
    x, weight, bias = cancelling(Case(1, rows, 70, 40, True, 0, 1), rows)
    one_by_one = torch.cat([few_row_linear(row, weight, bias) for row in x.split(1)])
    assert same_bits(few_row_linear(x, weight, bias), one_by_one)


@needs_instructions
def test_nothing_in_gives_nothing_out() -> None:
    x, weight = torch.ones(3, 5, dtype=torch.bfloat16), torch.ones(4, 5, dtype=torch.bfloat16)
    assert few_row_linear(x[:0], weight).shape == (0, 4)
    assert few_row_linear(x, weight[:0]).shape == (3, 0)
    assert few_row_linear(x[:0], weight[:0]).shape == (0, 0)


@needs_instructions
def test_a_nan_reaches_its_row_and_no_other() -> None:
    x, weight = torch.ones(3, 40, dtype=torch.bfloat16), torch.ones(20, 40, dtype=torch.bfloat16)
    x[1, 39] = torch.nan
    assert few_row_linear(x, weight).isnan().any(dim=1).tolist() == [False, True, False]


# ---- refusals


def bf16(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another dtype": ({"x": torch.zeros(2, 8)}, "must be bfloat16 on the CPU, got torch.float32 on cpu"),
    "a tensor without memory": ({"weight": bf16(4, 8).to("meta")}, "got torch.bfloat16 on meta"),
    "another dtype of the bias": ({"bias": torch.zeros(4)}, "got torch.float32"),
    "a vector": ({"x": bf16(8)}, "x must be [rows, in]"),
    "other inputs": ({"x": bf16(2, 7)}, "got (2, 7) and (4, 8)"),
    "no inputs": ({"x": bf16(2, 0), "weight": bf16(4, 0)}, "in being positive"),
    "other outputs": ({"bias": bf16(5)}, "bias must be [4] as weight has outputs, got (5,)"),
    "a transposed weight": ({"weight": bf16(8, 4).T}, "must be contiguous, got a weight with strides (1, 4)"),
    "a strided bias": ({"bias": bf16(8)[::2]}, "weight and bias must be contiguous"),
    "columns apart": ({"x": bf16(2, 16)[:, ::2]}, "got strides (16, 2)"),
    "no threads": ({"num_threads": 0}, "threads be positive"),
}


@needs_instructions
@pytest.mark.parametrize("case", REFUSED)
def test_refuses_what_does_not_fit(case: str) -> None:
    good: dict[str, Any] = {"x": bf16(2, 8), "weight": bf16(4, 8), "bias": bf16(4)}
    few_row_linear(**good)
    changed, message = REFUSED[case]
    with pytest.raises(ValueError) as refused:
        few_row_linear(**(good | changed))
    assert message in str(refused.value)


@needs_instructions
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"rows": -1}, "must not be negative"),
        ({"out_features": -1}, "must not be negative"),
        ({"in_features": 0}, "inputs and threads be positive"),
        ({"sum_block": 0}, "multiple of 32 or hold all inputs, got 0"),
        ({"sum_block": 16}, "multiple of 32 or hold all inputs, got 16"),
    ],
)
def test_the_extension_refuses_sizes_that_it_cannot_run(changed: dict[str, int], message: str) -> None:
    x, weight, y = bf16(2, 40), bf16(4, 40), bf16(2, 4)
    arguments = {
        "x": x.data_ptr(), "x_stride": 40, "weight": weight.data_ptr(), "bias": 0, "y": y.data_ptr(), "y_stride": 4,
        "rows": 2, "in_features": 40, "out_features": 4, "sum_block": 40, "threads": 1,
    }  # fmt: skip
    _cpu_linear.few_row_linear(**arguments)
    with pytest.raises(ValueError) as refused:
        _cpu_linear.few_row_linear(**(arguments | changed))
    assert message in str(refused.value)


# ---- who is asked before it is used


@pytest.fixture
def kernel_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of every product that the kernel gets."""
    calls: list[int] = []

    def count(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        calls.append(x.shape[0])
        return few_row_linear(x, weight, bias)

    monkeypatch.setattr(cpu_linear, "few_row_linear", count)
    return calls


@needs_like_torch
def test_few_rows_take_the_kernel(kernel_calls: list[int]) -> None:
    weight = bf16(70, 640)
    for rows in (0, 1, MAX_ROWS, MAX_ROWS + 1):
        assert linear(bf16(rows, 640), weight).shape == (rows, 70)
    assert kernel_calls == [0, 1, MAX_ROWS]


@pytest.mark.parametrize("answer", ["sums_like_torch", "available"])
def test_torch_is_used_where_the_kernel_may_not_be(
    answer: str, kernel_calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_linear, answer, lambda *_: False)
    x, weight, bias = cancelling(Case(2, 3, 640, 70, True, 0, 1), 3)
    assert same_bits(linear(x, weight, bias), F.linear(x, weight, bias))
    assert kernel_calls == []


def test_other_tensors_go_to_torch(kernel_calls: list[int]) -> None:
    x, weight = torch.randn(3, 64), torch.randn(70, 64)
    assert torch.allclose(linear(x, weight), x @ weight.T, atol=1e-5)
    assert linear(x.half(), weight.half()).dtype == torch.float16
    assert linear(bf16(3, 64).to("meta"), bf16(70, 64).to("meta")).shape == (3, 70)
    assert linear(bf16(64, 3).T, bf16(70, 64)).shape == (3, 70)
    assert linear(bf16(3, 64), bf16(1, 64)).shape == (3, 1)
    assert kernel_calls == []


@needs_instructions
@pytest.mark.parametrize("in_features", [1, 7, 640, 1500])
@pytest.mark.parametrize("has_bias", [False, True])
def test_the_probe_tells_orders_apart(in_features: int, has_bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked of sums in this kernel's order, in one that cuts them elsewhere, backwards, and without rounding."""
    ask = sums_like_torch.__wrapped__  # what was asked before is not remembered
    block = 512 if in_features <= 1024 else 1024

    def backwards(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return in_order(x.flip(1), weight.flip(1), bias, block)

    def exact(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        total = x.double() @ weight.double().T
        return (total if bias is None else total + bias.double()).bfloat16()

    same = {"in order": lambda *a: in_order(*a, block)}
    other = {"cut elsewhere": lambda *a: in_order(*a, 96), "backwards": backwards, "exact": exact}
    for name, kernel in (same | other).items():
        monkeypatch.setattr(F, "linear", kernel)
        one_order_only = in_features == 1 or (in_features < 96 and name == "cut elsewhere")
        assert ask(in_features, has_bias) == (name in same or one_order_only), name


# ---- rows do not matter


def without_kernel(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(cpu_linear, "available", lambda: False)


@pytest.mark.parametrize("with_kernel", [True, False])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("in_features", "out_features"), [(32, 32), (64, 8), (100, 8), (640, 70), (1500, 64), (3072, 64)]
)
def test_a_row_alone_is_the_row_among_many(
    in_features: int, out_features: int, has_bias: bool, with_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shapes of which torch sums one row, or a few, in another order than many."""
    if not with_kernel:
        without_kernel(monkeypatch)
    x, weight, bias = cancelling(Case(3, 128, in_features, out_features, has_bias, 0, 1), 128)
    many = linear(x, weight, bias)
    for rows in (1, 2, 3, 5, 8, 17, MAX_ROWS, MAX_ROWS + 1, 100):
        assert same_bits(linear(x[:rows], weight, bias), many[:rows]), rows


@settings(deadline=None, max_examples=150)
@given(
    cases(max_rows=70, max_in=1600, min_out=2),
    st.sampled_from([torch.bfloat16, torch.bfloat16, torch.float16, torch.float32]),
    st.booleans(),
    st.data(),
)
def test_a_row_does_not_depend_on_its_company(
    case: Case, dtype: torch.dtype, with_kernel: bool, draw: st.DataObject
) -> None:
    if dtype == torch.float32:  # with odd sizes a sum in fp32 depends on how its row is aligned
        case = replace(case, in_features=-(-case.in_features // 16) * 16, out_features=case.out_features + 16)
    x, weight, bias = (None if tensor is None else tensor.to(dtype) for tensor in cancelling(case, case.rows))
    assert x is not None and weight is not None
    begin = draw.draw(st.integers(0, case.rows - 1))
    end = draw.draw(st.integers(begin + 1, case.rows))
    with pytest.MonkeyPatch.context() as patch:
        if not with_kernel:
            without_kernel(patch)
        assert torch.equal(linear(x[begin:end], weight, bias), linear(x, weight, bias)[begin:end])
