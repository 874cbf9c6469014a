"""merge_attention_outputs: exact at the edges, in any order, on any shape, with Triton as in plain torch."""

from __future__ import annotations

import math
from random import Random

import pytest
import torch
from test_merge import EDGES, parts, state
from torch import Tensor
from triton_mode import DEVICE, TRITON_MARKS

from nanovllm.kvcache import chunked_attention
from nanovllm.kvcache.chunked_attention import merge_attention_outputs
from nanovllm.ops import merge
from nanovllm.ops.merge import merge_states_

INF = math.inf
SHAPES = [(1, 1, 16), (5, 3, 64), (33, 4, 80), (17, 8, 96), (16, 2, 112), (40, 7, 128), (3, 2, 256)]
BOUNDS = {torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 8e-3}  # of one rounding of values of size 1

pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in subtract")  # inf - inf, which is discarded


@pytest.fixture(params=["torch", pytest.param("Triton", marks=TRITON_MARKS)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The device that the version under test computes on."""
    with_triton = request.param == "Triton"
    for module in (merge, chunked_attention):
        monkeypatch.setattr(module, "use_triton", lambda tensor: with_triton)
    return DEVICE if with_triton else "cpu"


def exact(o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    """The merge in fp64, from the sums themselves: fine for LSEs of moderate size."""
    w1, w2 = (torch.exp(lse.double()).T.unsqueeze(-1) for lse in (lse1, lse2))
    return (o1.double() * w1 + o2.double() * w2) / (w1 + w2), torch.logaddexp(lse1.double(), lse2.double())


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes_and_dtypes(device: str, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    o1, o2 = torch.rand(2, *shape, generator=generator).to(dtype)
    lse1, lse2 = torch.randn(2, shape[1], shape[0], generator=generator) * 3
    expected_out, expected_lse = exact(o1, lse1, o2, lse2)
    given = [tensor.to(device) for tensor in (o1, lse1, o2, lse2)]
    before = [tensor.clone() for tensor in given]
    out, lse = merge_attention_outputs(*given)
    assert out.dtype == dtype and lse.dtype == torch.float32
    assert (out.cpu() - expected_out).abs().max() <= BOUNDS[dtype]
    assert (lse.cpu() - expected_lse).abs().max() <= 2e-6
    assert all(map(torch.equal, given, before)), "the inputs are left alone"


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_edges(device: str, dtype: torch.dtype) -> None:
    for left, right, merged in EDGES.values():
        sides = [tensor.to(device) for side in (left, right) for tensor in state(*side)]
        expected_out, expected_lse = state(*merged)
        out, lse = merge_attention_outputs(*sides)
        merge_states_(sides[0], sides[1], sides[2].to(dtype), sides[3])  # in place, into fp32
        for found_out, found_lse in ((out, lse), sides[:2]):
            torch.testing.assert_close(found_out.cpu(), expected_out, rtol=1e-6, atol=0)
            torch.testing.assert_close(found_lse.cpu(), expected_lse, rtol=1e-6, atol=0)


def test_views_of_a_larger_state_are_merged_in_place_and_no_rows_are_no_work(device: str) -> None:
    out, lse = torch.zeros(9, 6, 16, device=device), torch.full((6, 9), -INF, device=device)
    part_out, part_lse = (tensor.to(device) for tensor in state(3.0, 1.0))
    merge_states_(out[2:7, 1:4], lse[1:4, 2:7], part_out, part_lse)
    assert (out[2:7, 1:4] == 3).all() and (lse[1:4, 2:7] == 1).all()
    assert out.count_nonzero() == 5 * 3 * 16 and (lse > -INF).sum() == 5 * 3
    assert merge_attention_outputs(out[:0], lse[:, :0], out[:0], lse[:, :0])[0].shape == (0, 6, 16)


@pytest.mark.slow
def test_256_parts_in_any_order(device: str) -> None:
    pieces, (expected_out, expected_lse) = parts(256, 4, 3)
    pieces += [state(0.0, -INF)] * 3
    for seed in range(2):
        Random(seed).shuffle(pieces)
        out, lse = (tensor.to(device) for tensor in state(0.0, -INF))
        for part_out, part_lse in pieces:
            merge_states_(out, lse, part_out.to(device), part_lse.to(device))
        assert (out.cpu() - expected_out).abs().max() < 2e-5
        assert (lse.cpu() - expected_lse).abs().max() < 3e-5


def test_shapes_that_do_not_fit_are_refused() -> None:
    out, lse = state(1.0, 0.0)
    for bad in ((out[:2], lse, out, lse), (out, lse.T, out, lse), (out, lse, out, lse[:, :1])):
        with pytest.raises(ValueError, match=r"outputs must be \[tokens, heads, head_dim\] and LSEs"):
            merge_attention_outputs(*bad)
