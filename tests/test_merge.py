"""Merging attention states: exact at the edges, and no worse for many parts in any order."""

from __future__ import annotations

import math
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nanovllm.ops.merge import merge_states_
from nanovllm.ops.reference_attention import reference_attention

TOKENS, HEADS, HEAD_DIM = 5, 3, 16
INF = math.inf


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


def test_rows_and_heads_are_merged_each_by_its_own_weight() -> None:
    """One call over all edges at once gives what each gives alone."""
    table = torch.tensor([[*left, *right, *merged] for left, right, merged in EDGES.values()])
    left_out, left_lse, right_out, right_lse, out, lse = table.unbind(1)

    def outputs(values: Tensor) -> Tensor:  # [tokens, heads, head_dim], a different edge in each (token, head)
        return torch.stack([values, values.flip(0)], dim=1).unsqueeze(-1).repeat(1, 1, HEAD_DIM)

    def lses(values: Tensor) -> Tensor:
        return torch.stack([values, values.flip(0)])

    state_out, state_lse = outputs(left_out), lses(left_lse)
    merge_states_(state_out, state_lse, outputs(right_out), lses(right_lse))
    torch.testing.assert_close(state_out, outputs(out), rtol=1e-6, atol=0)
    torch.testing.assert_close(state_lse, lses(lse), rtol=1e-6, atol=0)


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
    out, lse = state(0.0, -INF)
    for piece_out, piece_lse in pieces:
        merge_states_(out, lse, piece_out, piece_lse)
    return out, lse


@pytest.mark.parametrize("count", [1, 2, 16, 256])
def test_many_parts_stay_far_below_what_one_cast_to_bfloat16_costs(count: int) -> None:
    """Each merge may round once in fp32: 256 of them together stay 100 times below bfloat16's 4e-3."""
    pieces, (expected_out, expected_lse) = parts(count, 4, count)
    out, lse = merged(pieces)
    assert (out - expected_out).abs().max() < 2e-7 + 6e-8 * count
    assert (lse - expected_lse).abs().max() < 5e-7 + 1e-7 * count


@given(random=st.randoms(use_true_random=False), num_empty=st.integers(0, 5))
@settings(max_examples=40)
def test_order_and_empty_parts_do_not_matter(random: Random, num_empty: int) -> None:
    pieces, (expected_out, expected_lse) = parts(40, 3, 1)
    pieces += [state(0.0, -INF)] * num_empty
    random.shuffle(pieces)
    out, lse = merged(pieces)
    assert (out - expected_out).abs().max() < 2.5e-6
    assert (lse - expected_lse).abs().max() < 5e-6


def test_an_empty_part_changes_no_bit() -> None:
    pieces, _ = parts(3, 4, 2)
    out, lse = merged(pieces)
    again = out.clone(), lse.clone()
    merge_states_(*again, *state(0.0, -INF))
    assert torch.equal(again[0], out) and torch.equal(again[1], lse)
