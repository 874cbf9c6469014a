"""Weights in the order in which the CPU's kernels read 16 outputs at a time: the same bits as row by row."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cpu_linear import DTYPES, ISAS, same_bits, shifted
from torch import Tensor

from nanovllm.layers.dense_weight import DenseWeight
from nanovllm.ops import cpu_kernels
from nanovllm.ops.cpu_kernels import cpu_linear, interleave_, rows_of


def interleaved(weight: Tensor, offset: int = 0) -> Tensor:
    """A reordered copy, in memory that begins 4 * offset bytes after where the allocator put it."""
    copy = shifted(weight, offset * (1 if weight.dtype == torch.float32 else 2))
    interleave_(copy)
    return copy


@settings(max_examples=150)
@given(st.data(), st.integers(0, 2**20))
def test_the_order_of_the_weights_changes_no_bit(draw: st.DataObject, seed: int) -> None:
    dtype = draw.draw(st.sampled_from(DTYPES))
    isa = draw.draw(st.sampled_from(ISAS))
    rows = draw.draw(st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8, 12, 13, 18, 24, 25, 28]) | st.integers(1, 120))
    outputs = draw.draw(st.sampled_from([16, 17, 31, 32, 48, 63, 64, 80, 95, 288, 300]) | st.integers(16, 200))
    inputs = 32 * draw.draw(st.integers(1, 40))
    generator = torch.Generator().manual_seed(seed)
    x, weight, bias = (torch.randn(size, generator=generator).to(dtype)
                       for size in ((rows, inputs), (outputs, inputs), (outputs,)))  # fmt: skip
    given_bias = bias if draw.draw(st.booleans()) else None
    expected = cpu_linear(x, weight, given_bias, isa=isa, num_threads=1)
    other = interleaved(weight, draw.draw(st.integers(0, 8)))
    threads = draw.draw(st.integers(1, 3))
    assert same_bits(cpu_linear(x, other, given_bias, isa=isa, num_threads=threads, interleaved=True), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("outputs", [16, 37, 64])
def test_rows_and_the_way_back(dtype: torch.dtype, outputs: int) -> None:
    weight = torch.randn(outputs, 96).to(dtype)
    other = interleaved(weight)
    indices = torch.randint(0, outputs, (50,))
    assert not torch.equal(other, weight)
    assert torch.equal(rows_of(other, indices, interleaved=True), weight[indices])
    assert torch.equal(rows_of(weight, indices), weight[indices])
    assert rows_of(other, indices[:0], interleaved=True).shape == (0, 96)
    for outside in (-1, outputs):
        with pytest.raises(IndexError, match=f"Row {outside} is not one of {outputs}"):
            rows_of(weight, torch.tensor([0, outside]))
    interleave_(other, back=True)
    assert torch.equal(other, weight)


def test_a_not_a_number_stays_in_its_output() -> None:
    weight = torch.randn(48, 64)
    weight[17, 5] = torch.nan
    found = cpu_linear(torch.randn(2, 64), interleaved(weight), interleaved=True).isnan()
    assert found[:, 17].all() and found.sum() == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_loaded_weight_is_the_same_matrix(dtype: torch.dtype) -> None:
    weight = DenseWeight({"q_proj": 40, "k_proj": 20}, 64, dtype, torch.device("cpu"))
    for _, slot in weight.slots():
        slot.view.normal_()
    plain = weight.dense.clone()
    x = torch.randn(3, 64).to(dtype)
    expected = weight.apply(x, None)
    indices = torch.tensor([0, 59, 17, 47, 48])
    memory = weight.dense.data_ptr()
    weight.finish_loading()
    weight.finish_loading()  # a second call changes nothing
    (part,) = weight.kernel_parts()
    assert isinstance(part, cpu_kernels._cpu_kernels.DenseWeight)  # read where it lies, not copied
    assert torch.equal(weight.dense, plain) and weight.dense.data_ptr() != memory
    assert same_bits(weight.apply(x, None), expected)
    assert torch.equal(weight.rows(indices), plain[indices])
    assert [name for name, _ in weight.slots()] == ["q_proj.weight", "k_proj.weight"]
    weight.use_torch_products()
    assert weight.dense.data_ptr() == memory and torch.equal(weight.dense, plain)
    assert same_bits(weight.apply(x, None), expected)
