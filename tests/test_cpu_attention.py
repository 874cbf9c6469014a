"""The C++ attention of the CPU: against fp64, and the same to the bit however the work is cut."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nanovllm.ops import cpu_kernels
from nanovllm.ops.attention import AttentionMetadata, SequenceMetadata
from nanovllm.ops.cpu_attention import attend_batch
from nanovllm.ops.reference_attention import reference_attention

ISAS = cpu_kernels.instruction_sets()
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
OUTPUT_BOUND = {torch.bfloat16: 1e-2, torch.float16: 1e-5, torch.float32: 1e-5}
LSE_BOUND = 1e-4


@dataclass(frozen=True)
class Case:
    """One sequence: keys at positions [first_position, kv_end), query rows from query_position on."""

    seed: int
    isa: str
    dtype: torch.dtype
    kv_heads: int
    group: int
    head_dim: int
    block_size: int
    first_position: int
    keys: int
    tokens: int
    query_position: int
    window: int

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group

    @property
    def kv_end(self) -> int:
        return self.first_position + self.keys

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5


@st.composite
def cases(draw: st.DrawFn, max_keys: int = 400, max_tokens: int = 70) -> Case:
    """Sizes around every edge of the kernel: block, tile (128 keys), vector, register tile."""
    keys = draw(st.sampled_from([0, 1, 2, 15, 16, 17, 127, 128, 129]) | st.integers(0, max_keys))
    first_position = draw(st.sampled_from([0, 0, 5, 64]))
    return Case(
        seed=draw(st.integers(0, 2**20)),
        isa=draw(st.sampled_from(ISAS)),
        dtype=draw(st.sampled_from(DTYPES)),
        kv_heads=draw(st.integers(1, 3)),
        group=draw(st.integers(1, 8)),
        head_dim=draw(st.sampled_from([16, 32, 48, 64, 80, 96, 112, 128, 256])),
        block_size=draw(st.sampled_from([16, 17, 32, 64, 100, 128, 200, 256, 512])),
        first_position=first_position,
        keys=keys,
        tokens=draw(st.sampled_from([0, 1, 2, 3]) | st.integers(0, max_tokens)),
        query_position=draw(st.integers(0, first_position + keys + 5)),
        window=draw(st.sampled_from([0, 0, 1, 16, 100]) | st.integers(1, max_keys)),
    )


@dataclass(frozen=True)
class Data:
    """Query, keys and values of a case, and the same keys and values in blocks whose unwritten rows are NaN."""

    q: Tensor
    k: Tensor
    v: Tensor
    pool: Tensor  # [blocks, 2, kv_heads, block_size, head_dim]


def make_data(case: Case) -> Data:
    generator = torch.Generator().manual_seed(case.seed)
    kv_shape = (case.keys, case.kv_heads, case.head_dim)
    q = torch.randn(case.tokens, case.heads, case.head_dim, generator=generator).to(case.dtype)
    k, v = (torch.randn(kv_shape, generator=generator).to(case.dtype) for _ in range(2))
    blocks = -(-case.keys // case.block_size)
    pool = torch.full((blocks, 2, case.kv_heads, case.block_size, case.head_dim), math.nan, dtype=case.dtype)
    for i in range(blocks):
        rows = slice(i * case.block_size, min(case.keys, (i + 1) * case.block_size))
        for plane, source in enumerate((k, v)):
            pool[i, plane, :, : rows.stop - rows.start] = source[rows].transpose(0, 1)
    return Data(q, k, v, pool)


def block_addresses(blocks: Iterable[Tensor]) -> Tensor:
    return torch.tensor([block.data_ptr() for block in blocks], dtype=torch.int64)


def attend(
    q: Tensor, blocks: Tensor, first_position: int, kv_end: int, query_position: int, *, out: Tensor, lse: Tensor,
    **options: Any,
) -> None:  # fmt: skip
    """`attend_batch` of the rows of one sequence over consecutive blocks, given by their addresses."""
    row = [0, q.shape[0], 0, blocks.numel(), first_position, kv_end, query_position]
    attend_batch(q, blocks, torch.tensor([row]), out=out, lse=lse, **options)


def empty_state(case: Case) -> tuple[Tensor, Tensor]:
    """An output and LSE full of NaN, so that missing writes show."""
    return torch.full((case.tokens, case.heads, case.head_dim), math.nan), torch.full(
        (case.heads, case.tokens), math.nan
    )


def run(case: Case, data: Data, blocks: Tensor | None = None, **options: Any) -> tuple[Tensor, Tensor]:
    """All rows over all blocks in one call."""
    out, lse = empty_state(case)
    options.setdefault("num_threads", 1)
    attend(
        data.q, block_addresses(data.pool) if blocks is None else blocks, kv_heads=case.kv_heads,
        block_size=case.block_size, first_position=case.first_position, kv_end=case.kv_end,
        query_position=case.query_position, scale=case.scale, window=case.window, out=out, lse=lse, isa=case.isa,
        **options,
    )  # fmt: skip
    return out, lse


def assert_same_bits(ours: tuple[Tensor, Tensor], theirs: tuple[Tensor, Tensor]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine.contiguous().view(torch.int32), other.contiguous().view(torch.int32))


def assert_close(case: Case, data: Data, result: tuple[Tensor, Tensor]) -> None:
    expected, expected_lse = reference_attention(
        data.q, data.k, data.v, case.scale, case.query_position, case.first_position, case.window or None
    )
    out, lse = result
    assert torch.equal(lse.isneginf(), expected_lse.isneginf())
    assert torch.equal(out[lse.isneginf().T], torch.zeros_like(out[lse.isneginf().T]))
    size = max(1.0, data.v.double().abs().max().item()) if data.v.numel() else 1.0
    assert torch.allclose(out.double(), expected, rtol=0, atol=OUTPUT_BOUND[case.dtype] * size)
    assert torch.allclose(lse.double(), expected_lse, rtol=1e-6, atol=LSE_BOUND)


@settings(max_examples=150)
@given(cases())
def test_matches_fp64(case: Case) -> None:
    data = make_data(case)
    assert_close(case, data, run(case, data))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_matches_fp64_on_long_decode_and_prefill(isa: str, dtype: torch.dtype) -> None:
    decode = Case(1, isa, dtype, 1, 2, 64, 256, 0, 8000, 1, 7999, 0)
    prefill = replace(decode, keys=900, tokens=200, query_position=700, head_dim=80)
    for case in (decode, prefill):
        data = make_data(case)
        assert_close(case, data, run(case, data))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("size", [30.0, 1e-3])
def test_matches_fp64_on_sharp_and_flat_softmax(isa: str, size: float) -> None:
    case = Case(3, isa, torch.float32, 1, 2, 64, 64, 0, 500, 9, 491, 0)
    data = make_data(case)
    data.q.mul_(size)
    expected, expected_lse = reference_attention(data.q, data.k, data.v, case.scale, case.query_position)
    out, lse = run(case, data)
    # Scores of a hundred carry fp32 errors of 1e-5, which are the relative errors of the probabilities.
    assert torch.allclose(out.double(), expected, rtol=0, atol=1e-5 * max(1.0, size / 3))
    assert torch.allclose(lse.double(), expected_lse, rtol=1e-6, atol=LSE_BOUND)


@settings(max_examples=100)
@given(cases(), st.data())
def test_grouping_of_blocks_into_calls_changes_no_bit(case: Case, draw: st.DataObject) -> None:
    data = make_data(case)
    blocks = block_addresses(data.pool)
    cuts = draw.draw(st.sets(st.integers(0, len(blocks))))
    out, lse = empty_state(case)
    for call, (begin, end) in enumerate(pairwise(sorted(cuts | {0, len(blocks)}) if len(blocks) else [0, 0])):
        first = case.first_position + begin * case.block_size
        attend(
            data.q, blocks[begin:end], kv_heads=case.kv_heads, block_size=case.block_size, first_position=first,
            kv_end=min(case.kv_end, first + (end - begin) * case.block_size), query_position=case.query_position,
            scale=case.scale, window=case.window, out=out, lse=lse, isa=case.isa, carry=call > 0,
            num_threads=draw.draw(st.integers(1, 3)),
        )  # fmt: skip
    assert_same_bits((out, lse), run(case, data))


@settings(max_examples=100)
@given(cases(), st.data())
def test_chunking_of_query_rows_changes_no_bit(case: Case, draw: st.DataObject) -> None:
    data = make_data(case)
    out, lse = empty_state(case)
    cuts = draw.draw(st.sets(st.integers(0, case.tokens)))
    for begin, end in pairwise(sorted(cuts | {0, case.tokens})):
        rows = replace(case, tokens=end - begin, query_position=case.query_position + begin)
        out[begin:end], lse[:, begin:end] = run(rows, replace(data, q=data.q[begin:end]))
    assert_same_bits((out, lse), run(case, data))


@settings(max_examples=100)
@given(cases(max_keys=1500, max_tokens=8), st.integers(2, 7))
def test_threads_change_no_bit(case: Case, threads: int) -> None:
    data = make_data(case)
    assert_same_bits(run(case, data, num_threads=threads), run(case, data))


@settings(max_examples=60)
@given(cases(), st.randoms(use_true_random=False))
def test_addresses_of_blocks_change_no_bit(case: Case, random: Any) -> None:
    data = make_data(case)
    moved = torch.empty(data.pool.numel() + 64, dtype=case.dtype)
    order = list(range(len(data.pool)))
    random.shuffle(order)
    start = random.randrange(64)  # any element may begin a block: no alignment is asked for
    slots = moved[start : start + data.pool.numel()].view(data.pool.shape)
    for block, slot in enumerate(order):
        slots[slot] = data.pool[block]
    assert_same_bits(run(case, data, block_addresses(slots[slot] for slot in order)), run(case, data))


@settings(max_examples=60)
@given(
    cases(max_keys=200, max_tokens=12),
    st.lists(st.tuples(st.integers(0, 200), st.integers(0, 12)), max_size=5),
    st.data(),
)
def test_other_sequences_in_the_batch_change_no_bit(
    case: Case, others: list[tuple[int, int]], draw: st.DataObject
) -> None:
    members = [case] + [
        replace(case, seed=case.seed + i, keys=keys, tokens=tokens, query_position=case.first_position + keys // 2)
        for i, (keys, tokens) in enumerate(others)
    ]
    members = draw.draw(st.permutations(members))
    data = [make_data(member) for member in members]
    # the first and the last row are of no sequence
    sequences = []
    start = 1
    for member, its in zip(members, data, strict=True):
        addresses = block_addresses(its.pool).tolist()
        positions = member.query_position, member.first_position, member.kv_end
        sequences.append(SequenceMetadata(start, member.tokens, *positions, addresses))
        start += member.tokens
    metadata = AttentionMetadata(sequences)
    q = torch.cat([torch.zeros(1, case.heads, case.head_dim, dtype=case.dtype), *(its.q for its in data)])
    q = torch.cat([q, q[:1]])
    out = torch.full(q.shape, -7.0)
    lse = torch.full((case.heads, len(q)), -7.0)
    attend_batch(
        q, metadata.blocks, metadata.rows, kv_heads=case.kv_heads,
        block_size=case.block_size, scale=case.scale, window=case.window, out=out, lse=lse, isa=case.isa,
        num_threads=draw.draw(st.integers(1, 4)),
    )  # fmt: skip
    for member, its, row in zip(members, data, sequences, strict=True):
        mine = slice(row.query_start, row.query_start + row.query_len)
        assert_same_bits((out[mine], lse[:, mine]), run(member, its))
    for stranger in (0, len(q) - 1):
        assert torch.all(out[stranger] == -7.0)
        assert torch.all(lse[:, stranger] == -7.0)


@settings(max_examples=60)
@given(cases())
def test_strided_tensors_are_read_and_written_in_place(case: Case) -> None:
    data = make_data(case)
    wide_q = torch.full((case.tokens, 2 * case.heads + 1, case.head_dim + 16), math.nan, dtype=case.dtype)
    q = wide_q[:, 1::2, : case.head_dim]
    q.copy_(data.q)
    wide_out = torch.full((2 * case.tokens, case.heads, case.head_dim + 3), -7.0)
    wide_lse = torch.full((case.tokens, case.heads + 2), -7.0)
    out = wide_out[::2, :, 3:]
    lse = wide_lse[:, 1:-1].T
    attend(
        q, block_addresses(data.pool), kv_heads=case.kv_heads, block_size=case.block_size,
        first_position=case.first_position, kv_end=case.kv_end, query_position=case.query_position, scale=case.scale,
        window=case.window, out=out, lse=lse, isa=case.isa, num_threads=1,
    )  # fmt: skip
    assert_same_bits((out, lse), run(case, data))
    assert torch.all(wide_out[1::2] == -7.0)
    assert torch.all(wide_out[..., :3] == -7.0)
    assert torch.all(wide_lse[:, [0, -1]] == -7.0)


@pytest.mark.parametrize("isa", ISAS)
def test_a_nan_in_a_visible_key_is_not_hidden(isa: str) -> None:
    case = Case(6, isa, torch.float32, 1, 2, 32, 64, 0, 50, 10, 40, 0)
    data = make_data(case)
    data.pool[0, 0, 0, 45] = math.nan
    out, _ = run(case, data)
    assert torch.all(out[:5].isfinite())
    assert torch.all(out[5:].isnan())


BLOCK = torch.zeros(2, 2, 16, 32)


def tensors(**shapes: Any) -> dict[str, Any]:
    """Arguments of a good call, some replaced."""
    good: dict[str, Any] = {
        "q": torch.zeros(2, 4, 32), "blocks": block_addresses([BLOCK]), "out": torch.zeros(2, 4, 32),
        "lse": torch.zeros(4, 2), "kv_heads": 2, "block_size": 16, "first_position": 0, "kv_end": 16,
        "query_position": 14, "scale": 1.0,
    }  # fmt: skip
    return good | shapes


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"q": torch.zeros(2, 4, 24), "out": torch.zeros(2, 4, 24)}, "multiple of 16"),
        ({"q": torch.zeros(2, 4, 32, dtype=torch.float64)}, "float64"),
        ({"out": torch.zeros(3, 4, 32)}, r"out torch.float32 \(3, 4, 32\)"),
        ({"out": torch.zeros(2, 32, 4).transpose(1, 2)}, r"strides \(128, 1, 4\)"),
        ({"lse": torch.zeros(2, 4)}, r"lse torch.float32 \(2, 4\)"),
        ({"kv_heads": 3}, "kv_heads=3"),
        ({"window": -1}, "window=-1"),
        ({"scale": math.inf}, "scale=inf"),
        ({"num_threads": 0}, "num_threads=0"),
        ({"isa": "avx9"}, "'avx9' does not run on this machine"),
        ({"kv_end": 17}, "kv_end must lie within its blocks of 16 tokens"),
        ({"query_position": -1}, "no negative number"),
        ({"blocks": torch.zeros(1)}, "blocks torch.float32"),
    ],
)
def test_refuses_what_does_not_fit(changed: dict[str, Any], message: str) -> None:
    attend(**tensors())
    with pytest.raises(ValueError, match=message):
        attend(**tensors(**changed))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[1, 2, 0, 1, 0, 16, 14]], "within the 2 rows of q"),
        ([[0, 2, 1, 1, 0, 16, 14]], "within the 1 given"),
        ([[0, 2, 0, 1, 0, 16, 14], [1, 1, 0, 1, 0, 16, 14]], "share a query row, got two with row 1"),
    ],
)
def test_refuses_rows_outside_of_the_batch(rows: list[list[int]], message: str) -> None:
    q, blocks, out, lse = (tensors()[name] for name in ("q", "blocks", "out", "lse"))
    with pytest.raises(ValueError, match=message):
        attend_batch(q, blocks, torch.tensor(rows), kv_heads=2, block_size=16, scale=1.0, out=out, lse=lse)
