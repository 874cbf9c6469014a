"""A layer's rows in two calls: the bits of the single operators, in every dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_cases import input_multiple, random_weight
from torch import Tensor

from nanovllm.data.network import RecurrentSpec
from nanovllm.layers.dense_weight import linear
from nanovllm.layers.rotary import rotated_order
from nanovllm.ops import cpu_delta
from nanovllm.ops.cpu_kernels import (
    MAX_LAYER_ROWS,
    FewRowLayer,
    HeadLayout,
    LayerNorms,
    add_rms_norm_,
    few_row_layer,
    place_heads,
    rms_norm,
)
from nanovllm.ops.delta_inputs import DecayWeights, StateRows
from nanovllm.ops.packed_weights import kernel_weight, packed_linear
from nanovllm.ops.row_kernels import GATED_UNITS

EPS = 1e-6
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 32
HIDDEN = 96
INTERMEDIATE = 160
PLAIN = HeadLayout(HEAD_DIM, HEAD_DIM)
Tensors = dict[str, Tensor]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def bf16(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def weights(
    seed: int, *, bias: bool, qk_norm: bool, output_norms: bool = False, gated: bool = False
) -> tuple[LayerNorms, tuple]:
    heads = bf16(seed + 1, HEADS + KV_HEADS, HEAD_DIM) if qk_norm else None
    outputs = [bf16(seed + 20 + i, HIDDEN) if output_norms else None for i in range(2)]
    norms = LayerNorms(bf16(seed, HIDDEN), heads, bf16(seed + 2, HIDDEN), *outputs, EPS)
    shapes = (
        ((HEADS * (1 + gated) + 2 * KV_HEADS) * HEAD_DIM, HIDDEN),
        (HIDDEN, HEADS * HEAD_DIM),
        (2 * INTERMEDIATE, HIDDEN),
        (HIDDEN, INTERMEDIATE),
    )
    products = tuple(
        (bf16(seed + 3 + i, *shape), bf16(seed + 9 + i, shape[0]) if bias else None) for i, shape in enumerate(shapes)
    )
    return norms, products


def in_parts(products: tuple) -> list:
    return [([weight], bias) for weight, bias in products]


def in_dtype(dtype: torch.dtype, tensors: Any) -> Any:
    """All tensors of nested tuples in another dtype."""
    if isinstance(tensors, LayerNorms):
        return LayerNorms(*(in_dtype(dtype, tensor) for tensor in tensors))
    if isinstance(tensors, tuple):
        return tuple(in_dtype(dtype, tensor) for tensor in tensors)
    return tensors.to(dtype) if isinstance(tensors, Tensor) else tensors


def rows_of(seed: int, tokens: int) -> Tensors:
    angles = torch.randn(tokens, 1, HEAD_DIM // 2, generator=torch.Generator().manual_seed(seed))
    return {
        "x": bf16(seed + 1, tokens, HIDDEN + 32)[:, :HIDDEN],
        "cos": torch.cat((angles.cos(), angles.cos()), dim=-1),
        "sin": angles.sin(),
        "attended": bf16(seed + 2, tokens, HEADS * HEAD_DIM),
    }


def empty(rows: Tensors) -> tuple[Tensor, Tensor, Tensor]:
    x = rows["x"]
    q, k, v = (x.new_full((len(x), heads, HEAD_DIM), 9.0) for heads in (HEADS, KV_HEADS, KV_HEADS))
    return q, k, v


def one_by_one(
    norms: LayerNorms, product: Callable[[int, Tensor], Tensor], rows: Tensors, activation: str = "silu"
) -> tuple[Tensor, ...]:
    """q, k, v and the residual stream, as the operators make them. product: with the weight of a number."""

    def normed(x: Tensor, weight: Tensor | None) -> Tensor:
        return x if weight is None else rms_norm(x, weight, EPS)

    q, k, v = empty(rows)
    projected = product(0, normed(rows["x"], norms.input)).unflatten(-1, (-1, HEAD_DIM))
    place_heads(projected, norms.heads, EPS, rows["cos"], rows["sin"], q, k, v)
    x = rows["x"].clone()
    hidden = add_rms_norm_(x, normed(product(1, rows["attended"]), norms.attention_output), norms.mlp, EPS)
    x += normed(product(3, GATED_UNITS[activation](product(2, hidden))), norms.mlp_output)
    return q, k, v, x


def dense(products: tuple) -> Callable[[int, Tensor], Tensor]:
    return lambda i, x: linear(x, *products[i])


def in_two_calls(layer: FewRowLayer, rows: Tensors) -> tuple[Tensor, ...]:
    q, k, v = empty(rows)
    layer.project(rows["x"], rows["cos"], rows["sin"], q, k, v)
    x = rows["x"].clone()
    layer.finish_(x, rows["attended"])
    return q, k, v, x


def same_bits(a: Tensor, b: Tensor) -> bool:
    as_int = torch.int32 if a.dtype == torch.float32 else torch.int16
    return torch.equal(a.view(as_int), b.view(as_int))


@settings(max_examples=40)
@given(
    st.integers(0, 2**30), st.integers(0, MAX_LAYER_ROWS), st.booleans(), st.booleans(), st.booleans(),
    st.booleans(), st.sampled_from(sorted(GATED_UNITS)), st.sampled_from(DTYPES),
)  # fmt: skip
def test_bits_are_those_of_the_operators(
    seed: int,
    tokens: int,
    bias: bool,
    qk_norm: bool,
    output_norms: bool,
    wide_norms: bool,
    activation: str,
    dtype: torch.dtype,
) -> None:
    norms, products = in_dtype(dtype, weights(seed, bias=bias, qk_norm=qk_norm, output_norms=output_norms))
    if wide_norms:
        norms = in_dtype(torch.float32, norms)
    layer = few_row_layer(norms, in_parts(products), dtype, PLAIN, activation)
    assert layer is not None
    rows = rows_of(seed + 20, tokens)
    rows |= {name: rows[name].to(dtype) for name in ("x", "attended")}
    assert layer.takes(rows["x"])
    expected = one_by_one(norms, dense(products), rows, activation)
    for ours, theirs in zip(in_two_calls(layer, rows), expected, strict=True):
        assert same_bits(ours, theirs)


@settings(max_examples=30)
@given(
    st.integers(0, 2**30), st.integers(0, MAX_LAYER_ROWS), st.sampled_from([2, 8, 30, HEAD_DIM]), st.booleans(),
    st.booleans(), st.sampled_from(DTYPES),
)  # fmt: skip
def test_gated_and_partly_rotated_heads_have_the_bits_of_the_operators(
    seed: int, tokens: int, rotary_dim: int, gated: bool, bias: bool, dtype: torch.dtype
) -> None:
    norms, products = in_dtype(dtype, weights(seed, bias=bias, qk_norm=True, gated=gated))
    norms = in_dtype(torch.float32, norms)
    rows = rows_of(seed + 20, tokens)
    layer = few_row_layer(norms, in_parts(products), dtype, HeadLayout(HEAD_DIM, rotary_dim, gated), "silu")
    assert layer is not None
    x = rows["x"].to(dtype)
    angles = (rows["cos"], rows["sin"])
    ours, theirs = (empty({"x": x}) for _ in "ab")
    gates = x.new_full((tokens, HEADS * HEAD_DIM + 16), 9.0)[:, : HEADS * HEAD_DIM] if gated else None
    layer.project(x, *angles, *ours, gates)

    heads = linear(rms_norm(x, norms.input, EPS), *products[0]).unflatten(1, (-1, HEAD_DIM))
    of_q, of_k_and_v = heads.split((HEADS * (1 + gated), 2 * KV_HEADS), dim=1)
    q, *gate = of_q.unflatten(1, (HEADS, -1)).unbind(2)
    heads = torch.cat((q, of_k_and_v), dim=1)
    turned = heads[:, : HEADS + KV_HEADS]
    turned.copy_(turned[..., rotated_order(rotary_dim, HEAD_DIM, x.device)])
    place_heads(heads, norms.heads, EPS, *angles, *theirs)
    for one, other in zip((*ours, *([] if gates is None else [gates])), (*theirs, *gate), strict=True):
        assert same_bits(one, other.reshape(one.shape))


def test_gates_and_their_memory_come_together() -> None:
    for gated in (False, True):
        norms, products = weights(0, bias=False, qk_norm=False, gated=gated)
        rows = rows_of(1, 2)
        x = rows["x"]
        gates = None if gated else torch.empty(2, HEADS * HEAD_DIM, dtype=torch.bfloat16)
        layer = few_row_layer(norms, in_parts(products), x.dtype, HeadLayout(HEAD_DIM, HEAD_DIM, gated), "silu")
        assert layer is not None
        with pytest.raises(ValueError, match=f"gates are written where .* gated={gated}"):
            layer.project(x, rows["cos"], rows["sin"], *empty(rows), gates)
        other = few_row_layer(norms, in_parts(products), x.dtype, HeadLayout(HEAD_DIM, HEAD_DIM, not gated), "silu")
        assert other is not None
        with pytest.raises(ValueError, match="must give the heads of q"):
            other.project(x, rows["cos"], rows["sin"], *empty(rows), gates)


@pytest.mark.parametrize("dtype", DTYPES)
def test_recurrence_has_the_bits_of_the_operators(dtype: torch.dtype, instruction_set: str) -> None:
    """Two sequences, of which one has several tokens, in slots that lie apart."""
    spec = RecurrentSpec(num_key_heads=2, num_value_heads=4, key_dim=16, value_dim=24, conv_kernel=4)
    norms, products = in_dtype(dtype, weights(3, bias=False, qk_norm=False))
    widths = [spec.channels, spec.value_size, spec.num_value_heads, spec.num_value_heads]
    products = ((bf16(40, sum(widths), HIDDEN).to(dtype), None), *products[1:])
    layer = few_row_layer(norms, in_parts(products), dtype, PLAIN, "silu")
    assert layer is not None
    conv, norm = (bf16(41 + i, *shape).to(dtype) for i, shape in enumerate([(4, spec.channels), (spec.value_dim,)]))
    decay = DecayWeights(bf16(43, spec.num_value_heads).float().exp(), bf16(44, spec.num_value_heads).float())
    rows = StateRows(torch.tensor([2, 0]), torch.tensor([0, 3, 4]), torch.tensor([0, 0, 0, 1]))
    x = bf16(45, 4, HIDDEN).to(dtype)
    states, expected = ((bf16(46, 3, *spec.conv_shape).to(dtype), bf16(47, 3, *spec.state_shape).float()) for _ in "ab")
    ours = cpu_delta.FewRows(spec, conv, decay, norm)(layer, x, rows, states)

    projected = linear(rms_norm(x, norms.input, EPS), products[0][0])
    mixed, z, b, a = projected.split(widths, dim=1)
    inputs = cpu_delta.delta_inputs_(spec, rows, mixed, conv, expected[0], b, a, decay)
    theirs = cpu_delta.gated_rms_norm(cpu_delta.delta_rule_(spec, rows, inputs, expected[1]), z, norm, EPS)
    for one, other in zip((*ours, *states), (theirs, projected, *expected), strict=True):
        assert same_bits(one, other)


def test_weights_that_are_written_later_count_and_other_rows_are_not_taken() -> None:
    norms, products = weights(0, bias=False, qk_norm=True)
    layer = few_row_layer(norms, in_parts(products), torch.bfloat16, PLAIN, "silu")
    assert layer is not None
    rows = rows_of(1, 3)
    before = in_two_calls(layer, rows)
    products[3][0].neg_()
    for x in (bf16(0, MAX_LAYER_ROWS + 1, HIDDEN), bf16(0, 1, HIDDEN).float(), bf16(0, 1, 9), bf16(0, HIDDEN, 2).T):
        assert not layer.takes(x)
    after = in_two_calls(layer, rows)
    expected = one_by_one(norms, dense(products), rows)
    assert same_bits(after[3], expected[3]) and not same_bits(after[3], before[3])


def test_there_is_none_for_weights_that_the_kernels_do_not_take() -> None:
    norms, products = weights(0, bias=False, qk_norm=False)
    for cast in (lambda weight: weight.double(), lambda weight: weight.to("meta")):
        casted = tuple((cast(weight), bias) for weight, bias in products)
        assert few_row_layer(norms, in_parts(casted), torch.bfloat16, PLAIN, "silu") is None
    without = [*in_parts(products)[:3], (None, None)]
    assert few_row_layer(norms, without, torch.bfloat16, PLAIN, "silu") is None


PACKED = ("q4_k", "q6_k", "q8_0", "q5_0", "q5_1", "int4 zeros", "fp8 channel")


@settings(max_examples=20)
@given(st.integers(0, 2**20), st.integers(0, MAX_LAYER_ROWS), st.booleans(), st.sampled_from(DTYPES))
def test_packed_weights_give_the_bits_of_the_operators(seed: int, tokens: int, bias: bool, dtype: torch.dtype) -> None:
    """The first product has a packed and a dense weight, one below the other, as a file with several types has."""
    norms, products = in_dtype(dtype, weights(seed, bias=bias, qk_norm=True))
    packed = []
    for i, (weight, _) in enumerate(products):
        fitting = [variant for variant in PACKED if weight.shape[1] % input_multiple(variant) == 0]
        packed.append(random_weight(fitting[(seed + i) % len(fitting)], *weight.shape, seed).in_panels())
    split = 64
    parts = [[kernel_weight(weight)] for weight in packed]
    first = packed[0].rows(slice(0, split)).in_panels()
    parts[0] = [kernel_weight(first), products[0][0][split:]]
    given = [(of, b) for of, (_, b) in zip(parts, products, strict=True)]
    layer = few_row_layer(norms, given, dtype, PLAIN, "silu")
    assert layer is not None
    rows = rows_of(seed + 20, tokens)
    rows |= {name: rows[name].to(dtype) for name in ("x", "attended")}

    def product(i: int, x: Tensor) -> Tensor:
        weight, b = products[i]
        if i:
            return packed_linear(x, packed[i], b)
        low, high = (None, None) if b is None else (b[:split], b[split:])
        return torch.cat((packed_linear(x, first, low), linear(x, weight[split:], high)), dim=1)

    for ours, theirs in zip(in_two_calls(layer, rows), one_by_one(norms, product, rows), strict=True):
        assert same_bits(ours, theirs)
