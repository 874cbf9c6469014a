"""Every attention backend keeps the seam's promises: exact against fp64, and the same bits however work is grouped."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from attention_cases import Case, Shape, part, same_bits, split
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from triton_mode import DEVICE, NARROW, TRITON_MARKS

from nanovllm.errors import ConfigError
from nanovllm.ops.attention import (
    MAX_DECODE_ROWS,
    AttentionBackend,
    AttentionMetadata,
    AttentionState,
)
from nanovllm.ops.backends import cuda_backends, first_right, select_backend
from nanovllm.ops.cpu_attention import NativeAttention
from nanovllm.ops.flash_attention import FlashAttention
from nanovllm.ops.reference_attention import reference_attention
from nanovllm.ops.torch_attention import TorchAttention
from nanovllm.ops.triton_attention import TritonAttention


def plain_flash(q: Tensor, k: Tensor, v: Tensor, scale: float, left: int, right: int) -> tuple[Tensor, Tensor]:
    """What flash-attn 2 computes, from the definition: masks aligned bottom-right, LSE +inf for a row without keys."""
    queries = q.shape[0]
    keys = k.shape[0]
    assert queries > 0 and keys > 0 and k.stride(2) == v.stride(2) == 1
    assert left >= -1 and right >= -1, "flash-attn takes any negative number for no bound"
    shift = torch.arange(keys) - torch.arange(queries).unsqueeze(1) - (keys - queries)
    hidden = torch.zeros(queries, keys, dtype=torch.bool)
    hidden |= (shift > right) if right >= 0 else False
    hidden |= (shift < -left) if left >= 0 else False
    group = q.shape[1] // k.shape[1]
    scores = torch.einsum("thd,shd->hts", q.double(), k.double().repeat_interleave(group, 1)) * scale
    scores.masked_fill_(hidden, -math.inf)
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse.unsqueeze(-1)).nan_to_num(0.0)
    out = torch.einsum("hts,shd->thd", weights, v.double().repeat_interleave(group, 1))
    return out.to(q.dtype), lse.masked_fill(lse == -math.inf, math.inf).float()


EVERY_DTYPE = (torch.float32, torch.float16, torch.bfloat16)
ON_CPU: tuple[AttentionBackend, ...] = (
    NativeAttention(),
    TorchAttention(),
    FlashAttention("plain flash attention", plain_flash, None, EVERY_DTYPE),
)
# Without a GPU, Triton's interpreter computes; it, as compilation for every shape, is too slow for random ones.
OTHERS = cuda_backends(torch.device("cuda"), 128) if DEVICE == "cuda" else [TritonAttention()]
SLOW_IN_TRITON = [pytest.mark.slow] if DEVICE == "cpu" else []
EVERY_BACKEND = pytest.mark.parametrize(
    "backend",
    [*ON_CPU, *(pytest.param(backend, marks=TRITON_MARKS) for backend in OTHERS)],
    ids=lambda backend: backend.name,
)
# Of whose mechanism another test runs in Triton's interpreter, which takes seconds.
EVERY_BACKEND_AT_LENGTH = pytest.mark.parametrize(
    "backend",
    [*ON_CPU, *(pytest.param(backend, marks=[*TRITON_MARKS, *SLOW_IN_TRITON]) for backend in OTHERS)],
    ids=lambda backend: backend.name,
)
CPU_DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def make_case(backend: AttentionBackend, shape: Shape, seed: int, narrow: bool = False) -> Case:
    """On the backend's device, in fp32 or in a narrow dtype that it takes."""
    on_cpu = backend in ON_CPU
    dtype = torch.float32 if not narrow else torch.bfloat16 if on_cpu else NARROW
    return Case(shape, dtype, seed, "cpu" if on_cpu else DEVICE)


SHAPES = st.builds(
    Shape,
    head_dim=st.sampled_from([16, 32, 48, 64, 80, 96, 112, 128]),
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 3, 4, 7]),
    block_size=st.sampled_from([1, 5, 16, 17, 32, 64]),
    window=st.one_of(st.none(), st.integers(1, 70)),
    lengths=st.lists(st.tuples(st.integers(0, 100), st.integers(1, 70)), min_size=1, max_size=3).map(tuple),
)


# Edges of tiles, blocks, partitions and windows, with few query rows and with many.
FIXED = {
    "small heads": Shape(16, 1, 2, 16, None, ((0, 3), (20, 1), (5, 70))),
    "80 of 128, a full partition": Shape(80, 2, 2, 512, None, ((511, 1), (5, 66))),
    "window": Shape(64, 1, 3, 32, 20, ((70, 66), (63, 10))),
    "window of one": Shape(64, 1, 1, 32, 1, ((31, 2), (0, 65))),
    "tiny blocks": Shape(128, 1, 1, 5, None, ((30, 4), (0, 65))),
    "large heads": Shape(256, 1, 1, 64, None, ((10, 67), (64, 1))),
    "a group of seven": Shape(96, 1, 7, 32, 33, ((63, 3),)),
    "uneven blocks": Shape(112, 1, 4, 17, None, ((16, 1), (17, 1), (0, 1))),
    "partitions": Shape(64, 1, 1, 1100, 900, ((1040, 66), (1300, 1))),
    "most of the few": Shape(64, 1, 1, 64, None, ((9, MAX_DECODE_ROWS), (0, MAX_DECODE_ROWS + 1))),
}

NARROW_TOO = FIXED if DEVICE == "cuda" else ("80 of 128, a full partition", "window")  # of products, not of masks
FIXED_CASES = [*((name, False) for name in FIXED), *((name, True) for name in NARROW_TOO)]
FAST_IN_TRITON = (("uneven blocks", False),)


def with_backends(cases: Iterable[Any], fast: Collection[Any]) -> Iterator[Any]:
    """Each backend with each case. Without a GPU Triton's interpreter takes seconds for most: only `fast` ones run."""
    for backend, case in product([*ON_CPU, *OTHERS], cases):
        is_slow = backend in OTHERS and DEVICE == "cpu" and case not in fast
        marks = [*(TRITON_MARKS if backend in OTHERS else ()), *([pytest.mark.slow] if is_slow else ())]
        yield pytest.param(backend, case, marks=marks, id=f"{backend.name}-{case}")


# ---- exactness


@pytest.mark.parametrize("backend, name", with_backends(("small heads", "window"), fast=()))
def test_sinks_take_a_share_of_every_row(backend: AttentionBackend, name: str) -> None:
    """Sinks above, among and far below the scores; the bits do not depend on how the blocks are grouped."""
    case = make_case(backend, FIXED[name], 1)
    sinks = torch.tensor([8.0, 1.0, -60.0][: case.shape.heads], device=case.q.device)
    together = case.attend(backend, sinks=sinks)
    size = case.shape.block_size
    case.check(together, sinks)
    blocks = [[part(seq, at, at + 1, size)] for seq in case.sequences for at in range(len(seq.block_table))]
    assert same_bits(case.attend(backend, blocks, sinks), together)


@pytest.mark.parametrize("backend, fixed", with_backends(FIXED_CASES, FAST_IN_TRITON))
def test_fixed_shapes(backend: AttentionBackend, fixed: tuple[str, bool]) -> None:
    """Exact in one call, and the same bits one block at a time and one sequence at a time."""
    name, narrow = fixed
    case = make_case(backend, FIXED[name], 1, narrow)
    together = case.attend(backend)
    case.check(together)
    block_size = case.shape.block_size
    cuts = [1, 2, 5, 11]
    alone = [[piece] for seq in case.sequences for piece in split(seq, cuts, block_size)]
    assert same_bits(case.attend(backend, alone), together)


@pytest.mark.parametrize("backend", ON_CPU, ids=lambda backend: backend.name)
@CPU_DTYPES
@given(shape=SHAPES, seed=st.integers(0, 10_000), cuts=st.lists(st.integers(1, 20), min_size=1, max_size=4))
@settings(max_examples=15)
def test_attention_is_exact_and_grouping_of_blocks_and_other_rows_change_no_bit(
    backend: AttentionBackend, dtype: torch.dtype, shape: Shape, seed: int, cuts: list[int]
) -> None:
    case = Case(shape, dtype, seed)
    alone = case.attend(backend, [[piece] for seq in case.sequences for piece in split(seq, cuts, shape.block_size)])
    case.check(alone)
    if backend is not ON_CPU[2]:  # whose products are torch's, which sums by the shapes of a call
        assert same_bits(case.attend(backend), alone)
        assert same_bits(case.attend(backend, [case.sequences[::-1]]), alone)


EDGES = ((32, 31, 1), (32, 32, 1), (32, 0, 32), (32, 33, 98), (1, 5, 3))


@pytest.mark.parametrize("backend, edge", with_backends(EDGES, fast=EDGES[3:4]))
@pytest.mark.parametrize("window", [None, 1, 32, pytest.param(33, marks=pytest.mark.slow)])
def test_attention_at_the_edges_of_blocks_and_windows(
    backend: AttentionBackend, edge: tuple[int, int, int], window: int | None
) -> None:
    block_size, context, new = edge
    case = make_case(backend, Shape(16, 1, 2, block_size, window, ((context, new),)), 3)
    case.check(case.attend(backend))


@pytest.mark.parametrize("head_dim", [2, 8, 20, 72, 100])
def test_the_torch_backend_takes_any_head_size(head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In calls of all rows, and of a few with each block."""
    for limit in (1 << 20, 100):
        monkeypatch.setattr("nanovllm.ops.torch_attention._MASK_ELEMENTS", limit)
        for window in (None, 20):
            case = Case(Shape(head_dim, 2, 2, 16, window, ((20, 30), (5, 1), (7, 90))), torch.float32, 1)
            case.check(case.attend(TorchAttention()))


@EVERY_BACKEND
def test_strided_queries_are_taken_as_they_are(backend: AttentionBackend) -> None:
    """Rows of a wider tensor, as a merged projection gives them."""
    case = make_case(backend, Shape(32, 1, 2, 16, None, ((9, 1), (3, MAX_DECODE_ROWS + 1))), 1)
    wide = torch.full((case.q.shape[0], 5, 32), float("nan"), device=case.q.device)
    wide[:, 2:4] = case.q
    case.q = wide[:, 2:4]
    case.check(case.attend(backend))


@EVERY_BACKEND_AT_LENGTH
@pytest.mark.parametrize("new", [20, MAX_DECODE_ROWS + 6])
def test_large_scores_do_not_overflow(backend: AttentionBackend, new: int) -> None:
    shape = Shape(64, 1, 2, 16, None, ((50, new),))
    case = make_case(backend, shape, 1)
    case.q *= 400
    (k, v) = case.keys[0]
    seq = case.sequences[0]
    rows = slice(seq.query_start, seq.query_start + seq.query_len)
    out, lse = reference_attention(case.q[rows].cpu(), k, v, shape.scale, seq.context_len)
    state = case.attend(backend)
    assert lse.abs().max() > 500
    torch.testing.assert_close(state.lse[:, rows].double().cpu(), lse, rtol=1e-6, atol=1e-4)
    torch.testing.assert_close(state.out[rows].double().cpu(), out, rtol=0, atol=2e-3)


@EVERY_BACKEND
@pytest.mark.parametrize("new", [8, MAX_DECODE_ROWS + 6])
def test_rows_that_see_no_key_keep_their_state(backend: AttentionBackend, new: int) -> None:
    """Blocks after a row's position, or left behind by its window, change nothing."""
    case = make_case(backend, Shape(16, 1, 1, 16, 10, ((40, new),)), 1)
    seq = case.sequences[0]
    early = part(seq, 0, 1, 16)
    late = replace(seq, context_len=0, first_position=96, kv_end=112, block_table=[0])
    case.pool[0] = 1.0
    assert same_bits(case.attend(backend, [[early]]), AttentionState.empty(case.q))
    assert same_bits(case.attend(backend, [[late]]), AttentionState.empty(case.q))
    assert same_bits(case.attend(backend, [[seq], [early]]), case.attend(backend))


# ---- the same bits however the work is cut


@EVERY_BACKEND_AT_LENGTH
def test_the_addresses_of_blocks_change_no_bit(backend: AttentionBackend) -> None:
    case = make_case(backend, Shape(32, 1, 2, 32, None, ((20, MAX_DECODE_ROWS + 6), (40, 3))), 1)
    together = case.attend(backend)
    order = torch.randperm(len(case.pool), generator=torch.Generator().manual_seed(1)).to(case.pool.device)
    where = order.argsort().tolist()
    case.pool = case.pool[order]
    case.sequences = [replace(s, block_table=[where[block] for block in s.block_table]) for s in case.sequences]
    assert same_bits(case.attend(backend), together)
    # One block at a time in a slot of its own, as it streams through a ring.
    state = AttentionState.empty(case.q)
    for seq in case.sequences:
        for index, block in enumerate(seq.block_table):
            slot = case.pool[block].clone().unsqueeze(0)
            table = AttentionMetadata([replace(part(seq, index, index + 1, 32), block_table=[0])])
            backend.attend(case.q, slot, table, state, case.shape.scale, None)
    assert same_bits(state, together)


# ---- the choice


def test_the_cpu_backend_is_chosen_by_head_size() -> None:
    cpu = torch.device("cpu")
    for head_dim in (16, 64, 80, 96, 112, 128, 256):
        assert isinstance(select_backend(cpu, head_dim), NativeAttention)
    for head_dim in (8, 20, 72, 100):
        assert isinstance(select_backend(cpu, head_dim), TorchAttention)


class Wrong(NativeAttention):
    """Loses the LSE's base on the way, or the whole call."""

    def __init__(self, name: str, fails: bool) -> None:
        super().__init__()
        self.name = name
        self._fails = fails

    def attend(
        self, q: Tensor, pool: Tensor, table: AttentionMetadata, state: AttentionState, scale: float, window: int | None
    ) -> None:
        if self._fails:
            raise RuntimeError("no kernel image is available")
        super().attend(q, pool, table, state, scale, window)
        state.lse *= math.log2(math.e)


def test_a_backend_that_fails_or_is_wrong_is_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    cpu = torch.device("cpu")
    failing = Wrong("failing", True)
    wrong = Wrong("base 2", False)
    assert first_right([failing, wrong, ON_CPU[1]], cpu, 64) is ON_CPU[1]
    assert "failing is not used because it fails: no kernel image" in caplog.text
    assert "base 2 is not used because its error is" in caplog.text
    with pytest.raises(ConfigError, match=r"no attention backend works for heads of 64 \(tried: failing, base 2\)"):
        first_right([failing, wrong], cpu, 64)


def test_a_narrow_kernel_alone_refuses_fp32() -> None:
    case = Case(Shape(16, 1, 1, 16, None, ((0, 5),)), torch.float32, 1)
    with pytest.raises(ConfigError, match="dtype='float32': narrow computes in float16 and bfloat16 only"):
        case.attend(FlashAttention("narrow", plain_flash, None))
    case.check(case.attend(FlashAttention("narrow", plain_flash, TorchAttention())))


@pytest.mark.cuda
def test_the_device_has_a_backend() -> None:
    """The name is what the log says."""
    for head_dim in (64, 80, 96, 112, 128, 256):
        print(head_dim, select_backend(torch.device("cuda"), head_dim).name)
