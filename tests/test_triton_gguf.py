"""Products with GGUF weights in planes, in Triton: their layout to the bit, and their values against fp64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from fast import fast_only
from packed_cases import random_weight, same_bits
from plane_bits import planes_by_bits
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from triton_mode import DEVICE, DTYPES, NARROW, TRITON_MARKS

from benchmarks.interpreted_ptx import computed
from nanovllm.formats.gguf.header import TENSOR_TYPES
from nanovllm.formats.gguf.model import GgufMethod, GgufWeight
from nanovllm.layers.packed_matrix import StackedWeights
from nanovllm.ops import packed_weights, triton_gguf
from nanovllm.ops.gguf_planes import PLANES, empty_rows, plane_bytes, planes_to_rows, rows_to_planes
from nanovllm.ops.packed_weights import GGUF_BLOCKS, PackedWeight, dequantize, dequantized_rows, packed_linear
from nanovllm.ops.triton_gguf import (
    OFFSETS,
    GgufConfig,
    _assembly,
    gguf_config,
    gguf_dequantize_,
    gguf_grouped_linear,
    gguf_linear,
)

pytestmark = TRITON_MARKS
# Of the sum of the products' sizes: rounding of the result, and of fp32 sums.
BOUNDS = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
SMALL = GgufConfig(8, 16, 1, 2, 1)  # few programs: the interpreter runs them one by one
OUTPUTS = 20


def inputs_of(scheme: str) -> int:
    """Inputs that are no whole number of units, where a scheme can have them."""
    return 288 if GGUF_BLOCKS[scheme].inputs == 32 else 512


def both(scheme: str, out_features: int = OUTPUTS, in_features: int | None = None) -> tuple[PackedWeight, Tensor]:
    """A weight in planes, and its values in fp64."""
    weight = random_weight(scheme, out_features, in_features or inputs_of(scheme))
    return replace(weight, data=weight.data.clone()).to(DEVICE).in_planes(), dequantize(weight).double().to(DEVICE)


def check(x: Tensor, dense: Tensor, found: Tensor, bias: Tensor | None = None) -> None:
    expected = x.double() @ dense.T
    size = x.double().abs() @ dense.abs().T
    if bias is not None:
        expected = expected + bias.double()
        size = size + bias.double().abs()
    assert found.dtype == x.dtype and found.shape == expected.shape
    assert ((found.double() - expected).abs() <= BOUNDS[x.dtype] * size + 1e-9).all()


def random_rows(rows: int, size: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


# ---- the layout


@pytest.mark.parametrize("scheme", PLANES)
def test_planes_hold_every_bit_of_the_rows(scheme: str) -> None:
    """In the rows' memory if it has room, else in other memory; where blocks are small, with parts of a unit too."""
    block = GGUF_BLOCKS[scheme]
    for in_features in {block.inputs, 256, inputs_of(scheme), 20 * block.inputs}:
        stored = random_weight(scheme, 9, in_features).data
        rows = empty_rows(scheme, 9, in_features, stored.device)
        rows.copy_(stored)
        planes = rows_to_planes(scheme, rows, in_features)
        assert planes.data_ptr() == rows.data_ptr() and planes.is_contiguous()
        assert planes.shape == (9, plane_bytes(scheme, in_features)) and planes.shape[1] % 16 == 0
        assert torch.equal(planes, planes_by_bits(scheme, stored, in_features))
        assert torch.equal(planes_to_rows(scheme, planes, in_features), stored)
        copied = rows_to_planes(scheme, stored[:, : stored.shape[1]].repeat(1, 2)[:, : stored.shape[1]], in_features)
        assert torch.equal(copied, planes)


@pytest.mark.parametrize("scheme", PLANES)
def test_planes_take_no_more_memory_than_the_file(scheme: str) -> None:
    """But up to 15 bytes of a row: of every input size of Llama 3.1 8B, and of 640 up to a whole unit."""
    planes = PLANES[scheme]
    block = GGUF_BLOCKS[scheme]
    assert (planes.block_inputs, planes.block_bytes) == (block.inputs, block.bytes)
    for in_features in (4096, 14336, 9728):
        assert 0 <= plane_bytes(scheme, in_features) - in_features // block.inputs * block.bytes < 16
    assert plane_bytes(scheme, 640) <= -(-640 // 256) * planes.unit_bytes + 15


def test_a_weight_is_put_into_planes_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanovllm.ops.gguf_planes._CHUNK_BYTES", 700)  # two rows at a time
    weight = random_weight("q6_k", 5, 256)
    again = replace(weight, data=weight.data.clone()).in_planes()
    assert torch.equal(again.in_rows().data, weight.data)
    assert again.in_planes() is again and again.shape == weight.shape
    part = again.rows(slice(1, 3))
    assert part.data.data_ptr() == again.data[1].data_ptr() and part.arrivals is None
    assert torch.equal(dequantize(part), dequantize(weight)[1:3])
    assert torch.equal(dequantize(again.rows(torch.tensor([4, 0]))), dequantize(weight)[[4, 0]])


# ---- the values


@pytest.mark.parametrize("scheme", PLANES)
def test_values_are_those_of_the_file(scheme: str) -> None:
    """To the bit in fp32, and rounded once in 16 bits; some rows in any order, into rows that are strided."""
    weight, dense = both(scheme)
    out = torch.zeros(OUTPUTS, weight.in_features + 8, device=DEVICE)
    gguf_dequantize_(weight, out[:, : weight.in_features])
    assert torch.equal(out[:, : weight.in_features].double(), dense) and not out[:, weight.in_features :].any()
    index = torch.tensor([19, 3, 3], device=DEVICE)
    assert torch.equal(dequantized_rows(weight, index, NARROW), dense.to(NARROW)[index])


FAST = {("q4_k", torch.float16), ("q6_k", torch.float16)}


@pytest.mark.parametrize(
    ("scheme", "dtype"),
    [
        pytest.param(scheme, dtype, marks=[] if (scheme, dtype) in FAST else pytest.mark.slow)
        for scheme in PLANES
        for dtype in DTYPES
    ],
    ids=str,
)
def test_products_are_those_of_the_dequantized_weights(scheme: str, dtype: torch.dtype) -> None:
    """More rows and outputs than a tile has, parts of tiles and units left over; rows of x and of the result strided.

    The inputs in one part, and in as many as there are units, where the last program to arrive adds the parts.
    """
    weight, dense = both(scheme)
    x = random_rows(10, weight.in_features + 8, dtype)[:, : weight.in_features]
    bias = random_rows(1, OUTPUTS, dtype, 2)[0]
    check(x, dense, gguf_linear(x, weight, config=SMALL))
    out = torch.zeros(10, OUTPUTS + 16, dtype=dtype, device=DEVICE)
    y = gguf_linear(x, weight, bias, out[:, :OUTPUTS], replace(SMALL, splits=2))
    check(x, dense, y, bias)
    assert y.data_ptr() == out.data_ptr() and not out[:, OUTPUTS:].any()
    assert weight.arrivals is not None and not weight.arrivals.any()
    check(x[:3], dense[:4], gguf_linear(x[:3], weight.rows(slice(4)), config=replace(SMALL, splits=2)))


def test_few_and_many_rows_of_a_product() -> None:
    """`packed_linear` chooses: few rows read the planes, more of them the values in 16 bits."""
    weight, dense = both("q4_0", 8, 32)
    for rows in (1, triton_gguf.MOST_ROWS, triton_gguf.MOST_ROWS + 1):
        x = random_rows(rows, 32, NARROW)
        bias = random_rows(1, 8, NARROW, 2)[0]
        check(x, dense, packed_linear(x, weight, bias), bias)
        out = torch.zeros(rows, 16, dtype=NARROW, device=DEVICE)
        check(x, dense, packed_linear(x, weight, None, out[:, 8:]))
        assert not out[:, :8].any() and out[:, 8:].any()
    assert packed_linear(x[:0], weight).shape == (0, 8)


@pytest.mark.parametrize("scheme", fast_only([], ["q4_k", "q5_0"]))
def test_experts(scheme: str) -> None:
    """Rows of three experts, of which one has none, as the router orders them; biases; rows that are their own."""
    weight, dense = both(scheme, 3 * OUTPUTS)
    of_expert = dense.view(3, OUTPUTS, -1)
    x = random_rows(5, weight.in_features, NARROW)
    rows = torch.tensor([4, 0, 2, 1], device=DEVICE)
    ends = torch.tensor([1, 1, 4], device=DEVICE)
    bias = random_rows(3, OUTPUTS, NARROW, 2)
    expected = torch.tensor([0, 2, 2, 2], device=DEVICE)
    for given in (None, bias):
        y = gguf_grouped_linear(x, weight, ends, rows, given)
        own = gguf_grouped_linear(x[rows], weight, ends, bias=given, out=torch.empty_like(y))
        assert same_bits(y, own)
        for entry, expert in enumerate(expected.tolist()):
            bias_of = None if given is None else given[expert]
            check(x[rows[entry : entry + 1]], of_expert[expert], y[entry : entry + 1], bias_of)


@pytest.mark.skipif(DEVICE == "cpu", reason="numpy's products of another shape may have other bits")
@pytest.mark.parametrize("scheme", PLANES)
def test_the_bits_of_a_row_do_not_depend_on_the_others(scheme: str) -> None:
    weight, _ = both(scheme, 200, 512)
    x = random_rows(64, 512, NARROW)
    y = gguf_linear(x, weight)
    for rows in (1, 8, 9, 16, 17, 33):
        assert same_bits(gguf_linear(x[:rows], weight), y[:rows])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_how_inputs_are_divided_depends_on_the_weight_alone(dtype: torch.dtype) -> None:
    for out_features, in_features in ((4096, 4096), (28672, 4096), (64, 32), (128256, 4096)):
        configs = [gguf_config(rows, out_features, in_features, dtype) for rows in (1, 8, 9, 16, 17, 64)]
        assert len({config.splits for config in configs}) == 1
        assert 1 <= configs[0].splits <= -(-in_features // 256)
        assert configs[0].rows == 8


# ---- the instructions


@pytest.mark.parametrize("scheme", PLANES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_instructions_give_every_number(dtype: torch.dtype, scheme: str) -> None:
    """All bytes of the low plane, with random ones of the high plane, in all segments."""
    planes = PLANES[scheme]
    offset = OFFSETS.get(scheme, 0)
    low = torch.arange(256).view(64, 4)
    high = torch.randint(256, (64, 4), generator=torch.Generator().manual_seed(1))
    words = [each.numpy().astype(np.uint8).view(np.uint32).astype(np.uint64)[:, 0] for each in (low, high)]
    for segment in range(8):
        code = _assembly(segment, planes.bits, offset, dtype == torch.bfloat16)
        pairs = computed(str(getattr(code, "value", code)), *words)
        made = np.stack([pair.astype(np.uint32) for pair in pairs], axis=-1).view(np.int16)
        found = torch.from_numpy(made).view(dtype).float()
        if planes.bits == 8:
            expected = low.to(torch.uint8).view(torch.int8).float()
        else:
            number = low >> segment % 2 * 4 & 15
            number |= {4: 0, 5: (high >> segment & 1) << 4, 6: (high >> segment % 4 * 2 & 3) << 4}[planes.bits]
            expected = (number - offset).float()
        assert torch.equal(found, expected)


# ---- in the network


def test_matrices_are_put_into_planes_where_triton_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of other types write into one result; rows of the matrix come from planes."""
    monkeypatch.setattr(packed_weights, "use_triton", lambda x: True)
    method = GgufMethod({"q": "Q4_0", "k": "Q4_0", "v": "Q8_0"})
    stack = method.create({"q": 8, "k": 4, "v": 6, "plain": 5}, 32, NARROW, torch.device(DEVICE))
    assert isinstance(stack, StackedWeights)
    for index, (_, slot) in enumerate(stack.slots()):
        if slot.randomize is not None:
            slot.randomize(torch.Generator(device=DEVICE).manual_seed(index))
        else:
            slot.view.normal_()
    dense = stack.rows(torch.arange(23, device=DEVICE))
    stack.finish_loading()
    packed = [weight for weight in stack.weights if isinstance(weight, GgufWeight)]
    assert [weight.packed.planes for weight in packed] == [True, True]
    assert torch.equal(stack.rows(torch.arange(23, device=DEVICE)), dense)
    x = random_rows(2, 32, NARROW)
    bias = random_rows(1, 23, NARROW, 2)[0]
    check(x, dense.double(), stack.apply(x, bias), bias)


def test_loading_takes_the_memory_of_the_weights_alone() -> None:
    """On a GPU the rows have room for planes from the beginning."""
    with FakeTensorMode():
        weight = GgufWeight(TENSOR_TYPES["Q6_K"], {"down": 4}, 9728, torch.bfloat16, torch.device("cuda")).packed
    assert weight.shape == (4, 9728) and weight.data.stride() == (plane_bytes("q6_k", 9728), 1)
