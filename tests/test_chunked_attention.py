"""Merging attention states: exact at the edges, in any order, on any shape, with Triton as in plain torch."""

from __future__ import annotations

import math
from random import Random

import pytest
import torch
from torch import Tensor
from triton_mode import DEVICE, TRITON_MARKS

from nanovllm.ops import merge
from nanovllm.ops.merge import merge_attention_outputs
from nanovllm.ops.reference_attention import reference_attention

TOKENS = 5
HEADS = 3
HEAD_DIM = 16
INF = math.inf
SHAPES = [(1, 1, 16), (5, 3, 64), (33, 4, 80), (17, 8, 96), (16, 2, 112), (40, 7, 128), (3, 2, 256)]
DTYPES = (torch.float32, torch.float16, torch.bfloat16)  # of the part that is merged

pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in subtract")  # inf - inf, which is discarded


def state(value: float, lse: float, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return torch.full((TOKENS, HEADS, HEAD_DIM), value, dtype=dtype), torch.full((HEADS, TOKENS), lse)


# (output, LSE) of both sides and what they make together.
EDGES = {
    "right side empty": ((3.0, 0.5), (0.0, -INF), (3.0, 0.5)),
    "left side empty": ((0.0, -INF), (3.0, 0.5), (3.0, 0.5)),
    "both sides empty": ((0.0, -INF), (0.0, -INF), (0.0, -INF)),
    "LSE of exactly 0": ((2.0, 0.0), (4.0, 0.0), (3.0, math.log(2))),
    "LSE 0 and an empty side": ((2.0, 0.0), (0.0, -INF), (2.0, 0.0)),
    "left side infinite": ((2.0, INF), (4.0, 7.0), (2.0, INF)),
    "right side infinite": ((2.0, 7.0), (4.0, INF), (4.0, INF)),
    "both sides infinite": ((2.0, INF), (4.0, INF), (3.0, INF)),
    "infinite and empty": ((2.0, INF), (0.0, -INF), (2.0, INF)),
    "empty and infinite": ((0.0, -INF), (2.0, INF), (2.0, INF)),
    "one far above the other": ((2.0, -1e4), (4.0, 1e4), (4.0, 1e4)),
    "largest finite": ((2.0, 3e38), (4.0, -3e38), (2.0, 3e38)),
    "very negative, equal": ((2.0, -1e30), (4.0, -1e30), (3.0, -1e30)),
    "a ratio of 3": ((0.0, math.log(1)), (4.0, math.log(3)), (3.0, math.log(4))),
}


@pytest.fixture(params=["torch", pytest.param("Triton", marks=TRITON_MARKS)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The device that the version under test computes on."""
    with_triton = request.param == "Triton"
    monkeypatch.setattr(merge, "use_triton", lambda tensor: with_triton)
    return DEVICE if with_triton else "cpu"


def exact(o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    """The merge in fp64, from the sums themselves: fine for LSEs of moderate size."""
    w1, w2 = (torch.exp(lse.double()).T.unsqueeze(-1) for lse in (lse1, lse2))
    return (o1.double() * w1 + o2.double() * w2) / (w1 + w2), torch.logaddexp(lse1.double(), lse2.double())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes_and_dtypes(device: str, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    o1, o2 = torch.rand(2, *shape, generator=generator)
    o2 = o2.to(dtype)
    lse1, lse2 = torch.randn(2, shape[1], shape[0], generator=generator) * 3
    expected_out, expected_lse = exact(o1, lse1, o2, lse2)
    out, lse, part_out, part_lse = (tensor.to(device) for tensor in (o1.clone(), lse1.clone(), o2, lse2))
    merge_attention_outputs(out, lse, part_out, part_lse)
    assert (out.cpu() - expected_out).abs().max() <= 1e-6
    assert (lse.cpu() - expected_lse).abs().max() <= 2e-6
    assert torch.equal(part_out.cpu(), o2) and torch.equal(part_lse.cpu(), lse2), "the other side is left alone"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_edges(device: str, dtype: torch.dtype) -> None:
    for left, right, merged in EDGES.values():
        sides = [tensor.to(device) for side in (left, right) for tensor in state(*side)]
        expected_out, expected_lse = state(*merged)
        merge_attention_outputs(sides[0], sides[1], sides[2].to(dtype), sides[3])
        torch.testing.assert_close(sides[0].cpu(), expected_out, rtol=1e-6, atol=0)
        torch.testing.assert_close(sides[1].cpu(), expected_lse, rtol=1e-6, atol=0)


def test_views_of_a_larger_state_are_merged_in_place_and_no_rows_are_no_work(device: str) -> None:
    out = torch.zeros(9, 6, 16, device=device)
    lse = torch.full((6, 9), -INF, device=device)
    part_out, part_lse = (tensor.to(device) for tensor in state(3.0, 1.0))
    merge_attention_outputs(out[2:7, 1:4], lse[1:4, 2:7], part_out, part_lse)
    assert (out[2:7, 1:4] == 3).all() and (lse[1:4, 2:7] == 1).all()
    assert out.count_nonzero() == 5 * 3 * 16 and (lse > -INF).sum() == 5 * 3
    merge_attention_outputs(out[:0], lse[:, :0], out[:0], lse[:, :0])


def parts(count: int, keys_each: int, seed: int) -> tuple[list[tuple[Tensor, Tensor]], tuple[Tensor, Tensor]]:
    """fp32 (output, LSE) over each of `count` pieces of the keys, and fp64 attention over all of them."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(TOKENS, HEADS, HEAD_DIM, generator=generator)
    k, v = torch.randn(2, count * keys_each, HEADS, HEAD_DIM, generator=generator)
    last = count * keys_each  # every query sees every key
    pieces = []
    for piece in range(count):
        keys = slice(piece * keys_each, (piece + 1) * keys_each)
        out, lse = reference_attention(q, k[keys], v[keys], 0.5, last)
        pieces.append((out.float(), lse.float()))
    return pieces, reference_attention(q, k, v, 0.5, last)


def merged(pieces: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    out, lse = (tensor.to(pieces[0][0].device) for tensor in state(0.0, -INF))
    for piece_out, piece_lse in pieces:
        merge_attention_outputs(out, lse, piece_out, piece_lse)
    return out, lse


@pytest.mark.parametrize("count", [1, 2, 16, 256])
def test_many_parts_stay_far_below_what_one_cast_to_bfloat16_costs(count: int) -> None:
    """Each merge may round once in fp32: 256 of them together stay 100 times below bfloat16's 4e-3."""
    pieces, (expected_out, expected_lse) = parts(count, 4, count)
    out, lse = merged(pieces)
    assert (out - expected_out).abs().max() < 2e-7 + 6e-8 * count
    assert (lse - expected_lse).abs().max() < 5e-7 + 1e-7 * count


def test_order_and_empty_parts_do_not_matter(device: str) -> None:
    pieces, (expected_out, expected_lse) = parts(8, 3, 1)
    pieces += [state(0.0, -INF)] * 3
    for seed in range(2):
        Random(seed).shuffle(pieces)
        out, lse = merged([(part_out.to(device), part_lse.to(device)) for part_out, part_lse in pieces])
        assert (out.cpu() - expected_out).abs().max() < 2.5e-6
        assert (lse.cpu() - expected_lse).abs().max() < 5e-6


def test_an_empty_part_changes_no_bit() -> None:
    pieces, _ = parts(3, 4, 2)
    out, lse = merged(pieces)
    again = out.clone(), lse.clone()
    merge_attention_outputs(*again, *state(0.0, -INF))
    assert torch.equal(again[0], out) and torch.equal(again[1], lse)
