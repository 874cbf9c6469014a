"""The Triton kernels of recurrent layers against plain torch, in the interpreter or on a GPU."""

from __future__ import annotations

import pytest
import torch
from fast import fast_only, fast_pairs
from test_delta_rule import EPS, SHAPES, Layer, spec_of
from torch import Tensor
from triton_mode import DEVICE, DTYPES, TRITON_MARKS

from nanovllm.ops import torch_delta, triton_delta

pytestmark = TRITON_MARKS
BOUNDS = {torch.float32: 2e-5, torch.float16: 6e-3, torch.bfloat16: 4e-2}
RUNS = [(2, range(4)), (0, range(4, 5)), (1, range(5, 11))]  # slots, and their tokens in a step


def random_states(layer: Layer, slots: int = 3) -> tuple[Tensor, Tensor]:
    """Of sequences that have begun."""
    generator = torch.Generator().manual_seed(5)
    states = layer.states(slots)
    for each in states:
        each.copy_(torch.randn(each.shape, generator=generator))
    return states


def on_host(tensors: tuple[Tensor, ...]) -> list[Tensor]:
    return [tensor.cpu() for tensor in tensors]


@pytest.mark.parametrize(("shape", "dtype"), fast_pairs([(SHAPES[0], torch.float32)], SHAPES, DTYPES))
def test_rows_and_states_are_those_of_torch(shape: tuple[int, int, int, int, int], dtype: torch.dtype) -> None:
    """Of several sequences in one step, in any slots."""
    layer, plain = (Layer.random(spec_of(shape), 11, dtype, device=device) for device in (DEVICE, "cpu"))
    states, expected_states = random_states(layer), random_states(plain)
    found, expected = layer.run(triton_delta, RUNS, states), plain.run(torch_delta, RUNS, expected_states)
    for ours, theirs in zip(on_host((*found, *states)), (*expected, *expected_states), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=BOUNDS[dtype], atol=BOUNDS[dtype])


@pytest.mark.parametrize("dtype", fast_only([torch.float32], DTYPES), ids=str)
def test_bits_do_not_depend_on_where_a_prompt_is_cut(dtype: torch.dtype) -> None:
    layer = Layer.random(spec_of(SHAPES[0]), 7, dtype, device=DEVICE)
    states, cut_states = layer.states(), layer.states()
    (whole,) = layer.run(triton_delta, [(0, range(7))], states)
    cuts = (range(1), range(1, 3), range(3, 4), range(4, 6), range(6, 7))
    parts = [layer.run(triton_delta, [(0, part)], cut_states)[0] for part in cuts]
    for ours, expected in zip((torch.cat(parts), *cut_states), (whole, *states), strict=True):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_gated_norm_is_that_of_torch(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    x, wide = (torch.randn(9, size, generator=generator).to(DEVICE, dtype) for size in (3 * 40, 2 * 3 * 40))
    z, weight = wide[:, 120:], torch.randn(40, generator=generator).to(DEVICE, dtype)
    found = triton_delta.gated_rms_norm(x, z, weight, EPS)
    tolerance = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(found, torch_delta.gated_rms_norm(x, z, weight, EPS), rtol=tolerance, atol=tolerance)


def test_a_step_of_few_rows_leaves_other_slots_alone() -> None:
    layer = Layer.random(spec_of(SHAPES[0]), 3, torch.float32, device=DEVICE)
    states = random_states(layer)
    before = [each.clone() for each in states]
    layer.run(triton_delta, [(1, range(3))], states)
    for ours, old in zip(states, before, strict=True):
        assert torch.equal(ours[0], old[0]) and torch.equal(ours[2], old[2]) and not torch.equal(ours[1], old[1])
