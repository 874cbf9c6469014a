"""The gated delta rule and what surrounds it: against Transformers and fp64; the same bits however tokens come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from fast import fast_pairs
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cpu_rows import same_bits, threads
from torch import Tensor
from transformers.models.qwen3_5 import modeling_qwen3_5 as theirs

from nanovllm.data.network import RECURRENT_CHUNK, RecurrentSpec
from nanovllm.layers.forward_context import ForwardContext
from nanovllm.layers.state_rows import part_sizes, parts_of_states, runs_of_rows
from nanovllm.ops import cpu_delta, torch_delta
from nanovllm.ops.attention import SequenceMetadata
from nanovllm.ops.delta_inputs import DecayWeights, DeltaInputs, StateRows
from nanovllm.ops.recurrent_kernels import RecurrentKernels

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EPS = 1e-6
# key heads, value heads, key dim, value dim, kernel
SHAPES = [(2, 4, 16, 8, 4), (1, 1, 128, 128, 4), (3, 3, 7, 40, 2), (2, 2, 33, 64, 1), (1, 4, 64, 100, 3)]


def spec_of(shape: tuple[int, int, int, int, int]) -> RecurrentSpec:
    return RecurrentSpec(*shape)


@dataclass
class Layer:
    """Random weights and inputs of a layer, its tokens all of one sequence."""

    spec: RecurrentSpec
    x: Tensor
    b: Tensor
    a: Tensor
    weight: Tensor
    decay: DecayWeights

    @classmethod
    def random(cls, spec: RecurrentSpec, tokens: int, dtype: torch.dtype, seed: int = 0, device: str = "cpu") -> Layer:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        heads = spec.num_value_heads
        wide = normal(tokens, spec.channels + 2 * heads).to(device, dtype)  # x, b and a are views of one product
        decay = DecayWeights(normal(heads).exp().to(device), normal(heads).to(device))
        x, b, a = wide.split((spec.channels, heads, heads), dim=1)
        return cls(spec, x, b, a, (normal(spec.conv_kernel, spec.channels) / 2).to(device, dtype), decay)

    def states(self, slots: int = 1) -> tuple[Tensor, Tensor]:
        """Empty states, whose slots lie apart."""
        conv = self.x.new_zeros(slots, 2, *self.spec.conv_shape)
        return conv[:, 0], torch.zeros(slots, 2, *self.spec.state_shape, device=self.x.device)[:, 0]

    def run(
        self, kernels: RecurrentKernels, runs: Sequence[tuple[int, range]], states: tuple[Tensor, Tensor]
    ) -> list[Tensor]:
        """The output of each run: a slot, and which of the tokens."""
        rows = torch.cat([torch.arange(tokens.start, tokens.stop) for _, tokens in runs])
        x, b, a = (tensor[rows] for tensor in (self.x, self.b, self.a))
        lengths = [len(tokens) for _, tokens in runs]
        where = rows_of([slot for slot, _ in runs], lengths, self.x.device, [tokens.start for _, tokens in runs])
        inputs = kernels.delta_inputs_(self.spec, where, x, self.weight, states[0], b, a, self.decay)
        return list(kernels.delta_rule_(self.spec, where, inputs, states[1]).split(lengths))


def rows_of(
    slots: Sequence[int], lengths: Sequence[int], device: torch.device, positions: Sequence[int] | None = None
) -> StateRows:
    return runs_of_rows(lengths, torch.tensor(slots).to(device), positions)


def exact(layer: Layer) -> tuple[Tensor, DeltaInputs, Tensor, Tensor]:
    """Output, inputs and both states after all tokens, in fp64 and written independently."""
    spec = layer.spec
    x = layer.x.double()
    kept = torch.zeros(spec.conv_kernel - 1, spec.channels, dtype=torch.float64)
    seen = torch.cat((kept, x))
    mixed = sum(seen[tap : tap + len(x)] * layer.weight[tap].double() for tap in range(spec.conv_kernel))
    assert isinstance(mixed, Tensor)
    mixed = (mixed * mixed.sigmoid()).to(layer.x.dtype).double()
    q, k, v = mixed.split((spec.key_size, spec.key_size, spec.value_size), dim=-1)
    q, k = (x.unflatten(-1, (spec.num_key_heads, spec.key_dim)) for x in (q, k))
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q = q / spec.key_dim**0.5
    v = v.unflatten(-1, (spec.num_value_heads, spec.value_dim))
    step = torch.log1p((layer.a.double() + layer.decay.bias).exp())
    decay = (-layer.decay.rate * step).exp()
    beta = layer.b.double().sigmoid().to(layer.x.dtype).double()
    state = torch.zeros(spec.state_shape, dtype=torch.float64)
    out = []
    for token in range(len(x)):
        for head in range(spec.num_value_heads):
            of_head = head // (spec.num_value_heads // spec.num_key_heads)
            decayed = state[head] * decay[token, head]
            written = beta[token, head] * (v[token, head] - k[token, of_head] @ decayed)
            state[head] = decayed + torch.outer(k[token, of_head], written)
            out.append(q[token, of_head] @ state[head])
    inputs = DeltaInputs(torch.stack((q, k), 1), v, decay, beta)
    return torch.stack(out).view(len(x), -1), inputs, seen[len(x) :].T, state


@pytest.mark.parametrize("kernels", [cpu_delta, torch_delta], ids=["cpp", "torch"])
@pytest.mark.parametrize(("shape", "dtype"), fast_pairs([(SHAPES[0], DTYPES[0])], SHAPES, DTYPES))
def test_rows_equal_fp64(shape: tuple[int, int, int, int, int], dtype: torch.dtype, kernels: RecurrentKernels) -> None:
    layer = Layer.random(spec_of(shape), 45, dtype)
    conv, states = layer.states()
    (out,) = layer.run(kernels, [(0, range(45))], (conv, states))
    expected, inputs, kept, state = exact(layer)
    where = rows_of([0], [45], layer.x.device)
    fresh = layer.states()[0]
    computed = kernels.delta_inputs_(layer.spec, where, layer.x, layer.weight, fresh, layer.b, layer.a, layer.decay)
    one_ulp = torch.finfo(dtype).eps
    for ours, wide in zip(computed[:4], inputs[:4], strict=True):
        torch.testing.assert_close(ours.double(), wide, rtol=2 * one_ulp, atol=2 * one_ulp)
    torch.testing.assert_close(conv[0].double(), kept, rtol=0, atol=0)
    bound = {torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float16: 6e-3}[dtype]
    torch.testing.assert_close(states[0].double(), state, rtol=bound, atol=bound)
    torch.testing.assert_close(out.double(), expected, rtol=bound, atol=bound)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_recurrence_equals_transformers(shape: tuple[int, int, int, int, int]) -> None:
    """From a state that is not empty, over more tokens than a chunk of its chunked form."""
    layer = Layer.random(spec_of(shape), 150, torch.float32)
    conv, states = layer.states()
    where = rows_of([0], [150], layer.x.device)
    inputs = cpu_delta.delta_inputs_(layer.spec, where, layer.x, layer.weight, conv, layer.b, layer.a, layer.decay)
    states.copy_(torch.randn(states.shape, generator=torch.Generator().manual_seed(1)))
    (q, k) = inputs.qk[None].unbind(2)
    before = states.clone()
    given = (q * layer.spec.key_dim**0.5, k, inputs.v[None], inputs.decay[None].log(), inputs.beta[None])
    y = cpu_delta.delta_rule_(layer.spec, where, inputs, states)
    for rule in (theirs.torch_recurrent_gated_delta_rule, theirs.torch_chunk_gated_delta_rule):
        out, state = rule(*given, initial_state=before, output_final_state=True)
        torch.testing.assert_close(y, out[0].flatten(1), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(states, state, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_gates_equal_transformers(shape: tuple[int, int, int, int, int], dtype: torch.dtype) -> None:
    spec = spec_of(shape)
    generator = torch.Generator().manual_seed(2)
    x, z = torch.randn(2, 9, spec.value_size, generator=generator).to(dtype)
    norm = theirs.Qwen3_5RMSNormGated(spec.value_dim, EPS).to(dtype)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(spec.value_dim, generator=generator))
        expected = norm(x.unflatten(1, (-1, spec.value_dim)), z.unflatten(1, (-1, spec.value_dim))).flatten(1)
    tolerance = 4 * torch.finfo(dtype).eps
    gated = x * z.sigmoid()
    for kernels in (cpu_delta, torch_delta):
        y = kernels.gated_rms_norm(x, z, norm.weight.detach(), EPS)
        torch.testing.assert_close(y, expected, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(kernels.sigmoid_gate_(x.clone(), z), gated, rtol=tolerance, atol=tolerance)


@given(st.lists(st.tuples(st.integers(1, 200), st.integers(0, 200)), min_size=1, max_size=4))
def test_whole_chunks_of_runs_are_known(runs: list[tuple[int, int]]) -> None:
    """By the positions of all rows, one by one."""
    lengths, positions = ([*column] for column in zip(*runs, strict=True))
    rows = rows_of(range(len(runs)), lengths, torch.device("cpu"), positions)
    starts = rows.starts.tolist()
    firsts = []
    sides = []
    chunks = rows.chunks
    for start, end, position in zip(starts, starts[1:], positions, strict=False):
        edges = [row for row in range(start, end + 1) if (position + row - start) % RECURRENT_CHUNK == 0]
        firsts.append(edges[:-1])
        sides.append((edges[0], edges[-1]) if len(edges) > 1 else (end, end))
    assert (chunks is not None) == any(firsts)
    if chunks is not None:
        assert chunks.first_rows.tolist() == [row for first in firsts for row in first]
        assert chunks.starts.tolist() == [sum(map(len, firsts[:index])) for index in range(len(runs) + 1)]
        assert list(zip(chunks.begins.tolist(), chunks.ends.tolist(), strict=True)) == sides
        assert chunks.any_before == any(begin > start for (begin, _), start in zip(sides, starts, strict=False))
        assert chunks.any_after == any(stop < end for (_, stop), end in zip(sides, starts[1:], strict=True))


@settings(max_examples=50)
@given(
    runs=st.lists(st.tuples(st.integers(1, 300), st.integers(0, 200)), min_size=1, max_size=5),
    most=st.integers(RECURRENT_CHUNK, 200),
)
def test_parts_of_a_step_cut_no_whole_chunk(runs: list[tuple[int, int]], most: int) -> None:
    """So the chunks of all parts are those of the sequences alone."""
    starts = [sum(length for length, _ in runs[:index]) for index in range(len(runs))]
    sequences = tuple(
        SequenceMetadata.full(start, length, position, ())
        for start, (length, position) in zip(starts, runs, strict=True)
    )
    slots = torch.arange(len(runs))
    states = SimpleNamespace(slots=slots, kept=None)
    ctx = ForwardContext(slots, sequences, kv_cache=None, states=states)  # type: ignore[arg-type]
    sizes = part_sizes(ctx, most)
    assert sum(sizes) == sum(length for length, _ in runs) and all(0 < size <= most for size in sizes)
    lengths, positions = ([*column] for column in zip(*runs, strict=True))
    alone = rows_of(range(len(runs)), lengths, torch.device("cpu"), positions)
    expected = [] if alone.chunks is None else alone.chunks.first_rows.tolist()
    begins = [sum(sizes[:index]) for index in range(len(sizes))]
    parts = zip(begins, parts_of_states(ctx, sizes), strict=True)
    chunks = [(begin, part.rows.chunks) for begin, part in parts if part.rows.chunks is not None]
    assert [begin + row for begin, chunk in chunks for row in chunk.first_rows.tolist()] == expected


def cut(tokens: int, edges: Sequence[int]) -> list[range]:
    return [range(begin, end) for begin, end in pairwise(sorted({0, tokens, *edges}))]


@settings(max_examples=30)
@given(
    shape=st.sampled_from(SHAPES),
    dtype=st.sampled_from(DTYPES),
    edges=st.lists(st.integers(1, 69), max_size=6),
    before=st.integers(0, 5),
    count=st.integers(1, 3),
)
def test_bits_depend_on_the_tokens_alone(
    shape: tuple[int, int, int, int, int], dtype: torch.dtype, edges: list[int], before: int, count: int
) -> None:
    """Cut anywhere, beside another sequence, with any number of threads; states included."""
    layer = Layer.random(spec_of(shape), 70, dtype)
    alone = layer.states()
    cut_states = layer.states(2)
    with threads(1):
        (expected,) = layer.run(cpu_delta, [(0, range(70))], alone)
    outputs = []
    with threads(count):
        for part in cut(70, edges):
            others = [(0, range(20, 20 + before))] * (before > 0)
            cut_states[0][0], cut_states[1][0] = 0, 0
            outputs.append(layer.run(cpu_delta, [*others, (1, part)], cut_states)[-1])
    assert same_bits(torch.cat(outputs), expected)
    for ours, whole in zip(cut_states, alone, strict=True):
        assert same_bits(ours[1], whole[0])


def test_tensors_that_do_not_fit_are_refused() -> None:
    layer = Layer.random(spec_of(SHAPES[0]), 5, torch.float32)
    conv, states = layer.states()
    where = rows_of([0], [5], layer.x.device)
    given = (layer.x, layer.weight, conv, layer.b, layer.a, layer.decay)
    with pytest.raises(ValueError, match="delta_inputs_ takes"):
        cpu_delta.delta_inputs_(layer.spec, where, layer.x[:, 1:], *given[1:])
    with pytest.raises(ValueError, match="int64 on the CPU"):
        cpu_delta.delta_inputs_(layer.spec, where._replace(slots=where.slots.int()), *given)
    with pytest.raises(ValueError, match="A slot must lie within the 1 of the states, got 1"):
        cpu_delta.delta_inputs_(layer.spec, where._replace(slots=where.slots + 1), *given)
    inputs = cpu_delta.delta_inputs_(layer.spec, where, *given)
    with pytest.raises(ValueError, match="delta_rule_ takes"):
        cpu_delta.delta_rule_(layer.spec, where, inputs, states.double())
    with pytest.raises(ValueError, match="gated_rms_norm takes"):
        cpu_delta.gated_rms_norm(layer.x, layer.x[:4], layer.x[0], EPS)
    with pytest.raises(ValueError, match="sigmoid_gate_ takes"):
        cpu_delta.sigmoid_gate_(layer.x, layer.x.double())
