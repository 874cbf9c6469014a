"""Every attention backend keeps the seam's promises: exact against fp64, and the same bits however work is grouped."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from nanovllm.ops import select_cpu_backend
from nanovllm.ops.attention import AttentionBackend, AttentionState, KVSegment, SegmentTable
from nanovllm.ops.native_attention import NativeAttention
from nanovllm.ops.reference_attention import reference_attention
from nanovllm.ops.torch_attention import TorchAttention

BACKENDS: tuple[AttentionBackend, ...] = (NativeAttention(), TorchAttention())
# Absolute bounds on (output, LSE) against fp64 on the same inputs, for keys, queries and values of size 1.
BOUNDS = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (2e-2, 2e-4)}
BOTH_DTYPES = pytest.mark.parametrize("dtype", BOUNDS, ids=str)
EVERY_BACKEND = pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: type(backend).__name__)


@dataclass(frozen=True)
class Shape:
    head_dim: int
    kv_heads: int
    group: int
    block_size: int
    window: int | None
    lengths: tuple[tuple[int, int], ...]  # (context, new tokens) of each sequence

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5


SHAPES = st.builds(
    Shape,
    head_dim=st.sampled_from([16, 32, 48, 64, 80, 96, 112, 128]),
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 3, 4, 7]),
    block_size=st.sampled_from([1, 5, 16, 17, 32, 64]),
    window=st.one_of(st.none(), st.integers(1, 70)),
    lengths=st.lists(st.tuples(st.integers(0, 100), st.integers(1, 70)), min_size=1, max_size=3).map(tuple),
)


class Case:
    """Sequences whose K/V lie scattered over a pool that is NaN everywhere else."""

    def __init__(self, shape: Shape, dtype: torch.dtype, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)

        def random(*size: int) -> Tensor:
            return torch.randn(size, generator=generator).to(dtype)

        self.shape = shape
        counts = [-(-sum(lengths) // shape.block_size) for lengths in shape.lengths]
        order = list(range(sum(counts) + 2))
        Random(seed).shuffle(order)
        block = (2, shape.kv_heads, shape.block_size, shape.head_dim)
        self.pool = torch.full((len(order), *block), float("nan"), dtype=dtype)
        self.segments: list[KVSegment] = []
        self.keys: list[tuple[Tensor, Tensor]] = []
        start = 1  # rows before, between and after the sequences belong to nobody
        for (context, new), count in zip(shape.lengths, counts, strict=True):
            blocks, order = order[:count], order[count:]
            k, v = (
                random(context + new, shape.kv_heads, shape.head_dim),
                random(context + new, shape.kv_heads, shape.head_dim),
            )
            for position in range(context + new):
                where = blocks[position // shape.block_size], position % shape.block_size
                self.pool[where[0], 0, :, where[1]], self.pool[where[0], 1, :, where[1]] = k[position], v[position]
            self.segments.append(KVSegment(start, new, context, 0, context + new, blocks))
            self.keys.append((k, v))
            start += new + 1
        self.q = random(start, shape.heads, shape.head_dim)

    def attend(self, backend: AttentionBackend, tables: list[list[KVSegment]] | None = None) -> AttentionState:
        """The state after one call for each list of segments; by default all in one call."""
        state = AttentionState.empty(self.q)
        for segments in tables or [self.segments]:
            backend.attend(self.q, self.pool, SegmentTable(segments), state, self.shape.scale, self.shape.window)
        return state

    def check(self, state: AttentionState) -> None:
        """Every row of a sequence is what fp64 says, every other row is empty."""
        out_bound, lse_bound = BOUNDS[self.q.dtype]
        nobody = torch.ones(self.q.shape[0], dtype=torch.bool)
        for segment, (k, v) in zip(self.segments, self.keys, strict=True):
            rows = slice(segment.query_start, segment.query_start + segment.query_len)
            nobody[rows] = False
            out, lse = reference_attention(
                self.q[rows], k, v, self.shape.scale, segment.query_position, window=self.shape.window
            )
            assert (state.out[rows] - out).abs().max() <= out_bound
            assert (state.lse[:, rows] - lse).abs().max() <= lse_bound
        assert (state.out[nobody] == 0).all() and (state.lse[:, nobody] == -math.inf).all()


def part(segment: KVSegment, first: int, last: int, block_size: int) -> KVSegment:
    """The same rows over the blocks [first, last) only."""
    end = min(segment.kv_end, segment.first_position + last * block_size)
    begin = segment.first_position + first * block_size
    return replace(segment, first_position=begin, kv_end=end, blocks=segment.blocks[first:last])


def split(segment: KVSegment, cuts: list[int], block_size: int) -> list[KVSegment]:
    edges = sorted({0, len(segment.blocks), *(cut for cut in cuts if cut < len(segment.blocks))})
    return [part(segment, *edge, block_size) for edge in pairwise(edges)]


def same_bits(a: AttentionState, b: AttentionState) -> bool:
    return torch.equal(a.out, b.out) and torch.equal(a.lse, b.lse)


# ---- exactness


@EVERY_BACKEND
@BOTH_DTYPES
@given(shape=SHAPES, seed=st.integers(0, 10_000))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_attention_is_exact(backend: AttentionBackend, dtype: torch.dtype, shape: Shape, seed: int) -> None:
    case = Case(shape, dtype, seed)
    case.check(case.attend(backend))


@EVERY_BACKEND
@BOTH_DTYPES
@given(shape=SHAPES, seed=st.integers(0, 10_000), cuts=st.lists(st.integers(1, 20), min_size=1, max_size=4))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_attention_carries_on_from_earlier_blocks(
    backend: AttentionBackend, dtype: torch.dtype, shape: Shape, seed: int, cuts: list[int]
) -> None:
    case = Case(shape, dtype, seed)
    tables = [[piece] for segment in case.segments for piece in split(segment, cuts, shape.block_size)]
    case.check(case.attend(backend, tables))


@EVERY_BACKEND
@pytest.mark.parametrize("block_size, context, new", [(64, 63, 1), (64, 64, 1), (64, 0, 64), (64, 65, 130), (1, 5, 3)])
@pytest.mark.parametrize("window", [None, 1, 2, 63, 64, 65])
def test_attention_at_the_edges_of_blocks_and_windows(
    backend: AttentionBackend, block_size: int, context: int, new: int, window: int | None
) -> None:
    case = Case(Shape(16, 1, 2, block_size, window, ((context, new),)), torch.float32, 3)
    case.check(case.attend(backend))


@pytest.mark.parametrize("head_dim", [2, 8, 20, 72, 100])
def test_the_torch_backend_takes_any_head_size(head_dim: int) -> None:
    case = Case(Shape(head_dim, 2, 2, 16, None, ((20, 30), (5, 1))), torch.float32, 1)
    case.check(case.attend(TorchAttention()))


def test_a_window_smaller_than_the_mask_bound_is_cut_into_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanovllm.ops.torch_attention._MASK_ELEMENTS", 100)
    case = Case(Shape(16, 1, 1, 32, 20, ((7, 90),)), torch.float32, 1)
    case.check(case.attend(TorchAttention()))


@EVERY_BACKEND
def test_strided_queries_are_taken_as_they_are(backend: AttentionBackend) -> None:
    """Rows of a wider tensor, as a merged projection gives them."""
    case = Case(Shape(32, 2, 2, 16, None, ((9, 12), (40, 1))), torch.float32, 1)
    wide = torch.full((case.q.shape[0], 7, 32), float("nan"))
    wide[:, 2:6] = case.q
    case.q = wide[:, 2:6]
    case.check(case.attend(backend))


@EVERY_BACKEND
def test_large_scores_do_not_overflow(backend: AttentionBackend) -> None:
    shape = Shape(64, 1, 2, 16, None, ((50, 20),))
    case = Case(shape, torch.float32, 1)
    case.q *= 400
    (k, v), segment = case.keys[0], case.segments[0]
    rows = slice(segment.query_start, segment.query_start + segment.query_len)
    out, lse = reference_attention(case.q[rows], k, v, shape.scale, segment.query_position)
    state = case.attend(backend)
    assert lse.abs().max() > 500
    torch.testing.assert_close(state.lse[:, rows].double(), lse, rtol=1e-6, atol=1e-4)
    torch.testing.assert_close(state.out[rows].double(), out, rtol=0, atol=2e-3)


@EVERY_BACKEND
def test_rows_that_see_no_key_keep_their_state(backend: AttentionBackend) -> None:
    """Blocks after a row's position, or left behind by its window, change nothing."""
    case = Case(Shape(16, 1, 1, 16, 10, ((40, 8),)), torch.float32, 1)
    segment = case.segments[0]
    early, late = part(segment, 0, 1, 16), replace(segment, query_position=0, first_position=32, blocks=[0])
    case.pool[0] = 1.0
    assert same_bits(case.attend(backend, [[early]]), AttentionState.empty(case.q))
    assert same_bits(case.attend(backend, [[late]]), AttentionState.empty(case.q))
    assert same_bits(case.attend(backend, [[segment], [early]]), case.attend(backend))


# ---- the same bits however the work is cut


@EVERY_BACKEND
@BOTH_DTYPES
@given(shape=SHAPES, seed=st.integers(0, 10_000), cuts=st.lists(st.integers(1, 20), min_size=1, max_size=4))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_grouping_of_blocks_and_company_of_other_rows_change_no_bit(
    backend: AttentionBackend, dtype: torch.dtype, shape: Shape, seed: int, cuts: list[int]
) -> None:
    case = Case(shape, dtype, seed)
    together = case.attend(backend)
    alone = [[piece] for segment in case.segments for piece in split(segment, cuts, shape.block_size)]
    assert same_bits(case.attend(backend, alone), together)
    assert same_bits(case.attend(backend, [case.segments[::-1]]), together)


@EVERY_BACKEND
def test_the_place_of_blocks_changes_no_bit(backend: AttentionBackend) -> None:
    case = Case(Shape(64, 2, 2, 32, None, ((100, 40), (0, 7))), torch.float32, 1)
    together = case.attend(backend)
    order = torch.randperm(len(case.pool), generator=torch.Generator().manual_seed(1))
    where = order.argsort().tolist()
    case.pool = case.pool[order]
    case.segments = [replace(s, blocks=[where[block] for block in s.blocks]) for s in case.segments]
    assert same_bits(case.attend(backend), together)
    # One block at a time in a slot of its own, as it streams through a ring.
    state = AttentionState.empty(case.q)
    for segment in case.segments:
        for index, block in enumerate(segment.blocks):
            slot = case.pool[block].clone().unsqueeze(0)
            table = SegmentTable([replace(part(segment, index, index + 1, 32), blocks=[0])])
            backend.attend(case.q, slot, table, state, case.shape.scale, None)
    assert same_bits(state, together)


@BOTH_DTYPES
@given(shape=SHAPES, seed=st.integers(0, 10_000), size=st.integers(1, 40))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_the_chunking_of_rows_changes_no_bit_of_the_native_backend(
    dtype: torch.dtype, shape: Shape, seed: int, size: int
) -> None:
    case = Case(shape, dtype, seed)
    chunks = []
    for segment in case.segments:
        for first in range(0, segment.query_len, size):
            rows = min(size, segment.query_len - first)
            start, position = segment.query_start + first, segment.query_position + first
            kv_end = position + rows  # what a chunk could see when it was computed
            blocks = segment.blocks[: -(-kv_end // shape.block_size)]
            chunks.append([KVSegment(start, rows, position, 0, kv_end, blocks)])
    assert same_bits(case.attend(NativeAttention(), chunks), case.attend(NativeAttention()))


def test_the_backend_is_chosen_by_head_size() -> None:
    for head_dim in (16, 64, 80, 96, 112, 128, 256):
        assert isinstance(select_cpu_backend(head_dim), NativeAttention)
    for head_dim in (8, 20, 72, 100):
        assert isinstance(select_cpu_backend(head_dim), TorchAttention)
