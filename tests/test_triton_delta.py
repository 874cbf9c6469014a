"""The Triton kernels of recurrent layers against plain torch, in the interpreter or on a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from fast import fast_only, fast_pairs
from test_delta_rule import EPS, SHAPES, Layer, rows_of, spec_of
from torch import Tensor
from triton_mode import DEVICE, DTYPES, TRITON_MARKS

from nanovllm.data.network import RecurrentSpec
from nanovllm.ops import torch_delta, triton_delta, triton_delta_chunks
from nanovllm.ops.delta_inputs import DeltaInputs

pytestmark = TRITON_MARKS
BOUNDS = {torch.float32: 2e-5, torch.float16: 6e-3, torch.bfloat16: 4e-2}
RUNS = [(2, range(4)), (0, range(4, 5)), (1, range(5, 11))]  # slots, and their tokens in a step
CHUNK_RUNS = [(2, range(61, 195)), (0, range(4, 5)), (1, range(64, 128)), (3, range(40, 70))]  # with whole chunks
SMALL = spec_of((1, 1, 32, 16, 1))
CHUNK_SHAPES = [(1, 2, 16, 16, 4), (1, 1, 100, 40, 2), (2, 2, 64, 32, 4), (1, 1, 128, 128, 4)]


def random_states(layer: Layer, slots: int = 3) -> tuple[Tensor, Tensor]:
    """Of sequences that have begun."""
    generator = torch.Generator().manual_seed(5)
    states = layer.states(slots)
    for state in states:
        state.copy_(torch.randn(state.shape, generator=generator))
    return states


def on_host(tensors: tuple[Tensor, ...]) -> list[Tensor]:
    return [tensor.cpu() for tensor in tensors]


@pytest.mark.parametrize(("shape", "dtype"), fast_pairs([(SHAPES[0], torch.float32)], SHAPES, DTYPES))
def test_rows_and_states_are_those_of_torch(shape: tuple[int, int, int, int, int], dtype: torch.dtype) -> None:
    """Of several sequences in one step, in any slots."""
    layer, plain = (Layer.random(spec_of(shape), 11, dtype, device=device) for device in (DEVICE, "cpu"))
    states = random_states(layer)
    expected_states = random_states(plain)
    found = layer.run(triton_delta, RUNS, states)
    expected = plain.run(torch_delta, RUNS, expected_states)
    for ours, theirs in zip(on_host((*found, *states)), (*expected, *expected_states), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=BOUNDS[dtype], atol=BOUNDS[dtype])


@pytest.mark.parametrize(("shape", "dtype"), fast_pairs([], CHUNK_SHAPES, DTYPES), ids=str)
def test_whole_chunks_are_those_of_torch(shape: tuple[int, int, int, int, int], dtype: torch.dtype) -> None:
    """Of runs that begin and end anywhere, beside the next token of another sequence."""
    layer, plain = (Layer.random(spec_of(shape), 200, dtype, device=device) for device in (DEVICE, "cpu"))
    states = random_states(layer, 4)
    expected_states = random_states(plain, 4)
    found = layer.run(triton_delta, CHUNK_RUNS, states)
    expected = plain.run(torch_delta, CHUNK_RUNS, expected_states)
    for ours, theirs in zip(on_host((*found, *states)), (*expected, *expected_states), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=BOUNDS[dtype], atol=BOUNDS[dtype])


def hard_inputs(spec: RecurrentSpec, tokens: int, dtype: torch.dtype) -> DeltaInputs:
    """Decays of 0, next to 0 and next to 1, shares of 0 and 1, and keys that repeat, in every order."""
    generator = torch.Generator().manual_seed(7)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(tokens, *shape, generator=generator)

    heads = spec.num_value_heads
    keys = (2, spec.num_key_heads)
    decays = torch.tensor([0.0, 1e-38, 1e-20, 1e-3, 0.5, 1.0 - 1e-6, 1.0])
    decay = decays[(uniform(heads).pow(0.2) * len(decays)).long().clamp(max=len(decays) - 1)]  # most near 1
    qk = (uniform(*keys, spec.key_dim) - 0.5).to(dtype)
    repeated = uniform(1, 1, 1) < 0.7
    qk = torch.where(repeated, qk[:1], qk)  # keys and queries of the first token
    scale = torch.rsqrt(qk.float().square().sum(-1) + 1e-6)
    v = (uniform(heads, spec.value_dim) - 0.5).to(dtype)
    inputs = DeltaInputs(qk, v, decay, uniform(heads).mul(1.4).sub(0.2).clamp(0.0, 1.0), scale)
    return DeltaInputs(*(each.to(DEVICE) for each in inputs if each is not None))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_thousand_tokens_are_those_of_fp64(dtype: torch.dtype) -> None:
    spec = SMALL
    inputs = hard_inputs(spec, 1000, dtype)
    states = torch.zeros(1, *spec.state_shape, device=DEVICE)
    y = triton_delta.delta_rule_(spec, rows_of([0], [1000], states.device, [0]), inputs, states)
    assert inputs.scale is not None
    wide = inputs._replace(qk=inputs.qk.double() * inputs.scale[..., None], scale=None)
    wide = DeltaInputs(*(each.double().cpu() for each in wide if each is not None))
    exact_states = torch.zeros(1, *spec.state_shape, dtype=torch.float64)
    expected = torch_delta.delta_rule_(spec, rows_of([0], [1000], torch.device("cpu")), wide, exact_states)
    bound = max(BOUNDS[torch.float32], torch.finfo(dtype).eps)
    torch.testing.assert_close(y.double().cpu(), expected, rtol=bound, atol=bound)
    torch.testing.assert_close(states.double().cpu(), exact_states, rtol=4e-5, atol=4e-5)


def rule(inputs: DeltaInputs, runs: Sequence[tuple[int, range]], states: Tensor) -> list[Tensor]:
    """The output of each run of the recurrence: a slot, and which of the tokens."""
    rows = torch.cat([torch.arange(tokens.start, tokens.stop) for _, tokens in runs])
    lengths = [len(tokens) for _, tokens in runs]
    where = rows_of([slot for slot, _ in runs], lengths, states.device, [tokens.start for _, tokens in runs])
    given = DeltaInputs(*(each[rows] for each in inputs if each is not None))
    return list(triton_delta.delta_rule_(SMALL, where, given, states).split(lengths))


@pytest.mark.parametrize("dtype", fast_only([torch.float32], DTYPES), ids=str)
def test_bits_do_not_depend_on_cuts_between_chunks_and_after_the_last(dtype: torch.dtype) -> None:
    """Nor on what else is in a step."""
    inputs = hard_inputs(SMALL, 205, dtype)
    states = torch.zeros(2, 2, *SMALL.state_shape, device=DEVICE)
    (whole,) = rule(inputs, [(0, range(205))], states[0])
    cuts = (range(64), range(64, 192), range(192, 197), range(197, 198), range(198, 205))
    parts = [rule(inputs, [(1, range(3, 9)), (0, part)], states[1])[1] for part in cuts]
    assert torch.equal(torch.cat(parts), whole) and torch.equal(states[1, 0], states[0, 0])


@pytest.mark.slow
def test_launches_take_a_part_of_the_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = hard_inputs(SMALL, 200, torch.float32)
    states = torch.ones(2, 4, *SMALL.state_shape, device=DEVICE)
    expected = rule(inputs, CHUNK_RUNS, states[0])
    monkeypatch.setattr(triton_delta_chunks, "CHUNKS_AT_ONCE", 2)
    found = rule(inputs, CHUNK_RUNS, states[1])
    assert torch.equal(torch.cat(found), torch.cat(expected)) and torch.equal(states[0], states[1])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_do_not_depend_on_where_a_prompt_is_cut(dtype: torch.dtype) -> None:
    layer = Layer.random(spec_of(SHAPES[0]), 7, dtype, device=DEVICE)
    states = layer.states()
    cut_states = layer.states()
    (whole,) = layer.run(triton_delta, [(0, range(7))], states)
    cuts = (range(1), range(1, 3), range(3, 4), range(4, 6), range(6, 7))
    parts = [layer.run(triton_delta, [(0, part)], cut_states)[0] for part in cuts]
    for ours, expected in zip((torch.cat(parts), *cut_states), (whole, *states), strict=True):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_gated_norm_is_that_of_torch(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    x, wide = (torch.randn(9, size, generator=generator).to(DEVICE, dtype) for size in (3 * 40, 2 * 3 * 40))
    z = wide[:, 120:]
    weight = torch.randn(40, generator=generator).to(DEVICE, dtype)
    found = triton_delta.gated_rms_norm(x, z, weight, EPS)
    tolerance = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(found, torch_delta.gated_rms_norm(x, z, weight, EPS), rtol=tolerance, atol=tolerance)


def test_a_step_of_few_rows_leaves_other_slots_alone() -> None:
    layer = Layer.random(spec_of(SHAPES[0]), 3, torch.float32, device=DEVICE)
    states = random_states(layer)
    before = [state.clone() for state in states]
    layer.run(triton_delta, [(1, range(3))], states)
    for ours, old in zip(states, before, strict=True):
        assert torch.equal(ours[0], old[0]) and torch.equal(ours[2], old[2]) and not torch.equal(ours[1], old[1])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_padded_rows_of_a_decode_step_write_no_state(dtype: torch.dtype) -> None:
    """Slot -1, as in a recorded step of fewer sequences than it has rows. Others have the bits of a row alone."""
    layer = Layer.random(spec_of(SHAPES[0]), 4, dtype, device=DEVICE)
    states = random_states(layer)
    alone = random_states(layer)
    padded = layer.run(triton_delta, [(2, range(1)), (-1, range(1, 2)), (0, range(2, 3)), (-1, range(3, 4))], states)
    expected = [
        layer.run(triton_delta, [(slot, tokens)], alone)[0] for slot, tokens in ((2, range(1)), (0, range(2, 3)))
    ]
    assert torch.equal(torch.cat(padded[::2]), torch.cat(expected)) and torch.cat(padded).isfinite().all()
    for ours, theirs in zip(states, alone, strict=True):
        assert torch.equal(ours, theirs)
