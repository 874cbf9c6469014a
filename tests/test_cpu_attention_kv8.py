"""CPU attention to K and V in 8 bits: the values of the stored elements, and bits that depend on nothing else."""

from __future__ import annotations

import pytest
import torch
from attention_cases import Case, Shape, quantised, same_bits, split
from torch import Tensor

from nanovllm.ops.attention import AttentionMetadata, AttentionState, SequenceMetadata
from nanovllm.ops.cpu_attention import NativeAttention
from nanovllm.ops.kv_quantization import dequantize_rows, quantize_rows_torch
from nanovllm.ops.reference_attention import reference_attention

STORED = (torch.int8, torch.float8_e4m3fn)
MODEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
BLOCK = 16
SHAPES = [  # a step of few rows reads the elements where they are, many rows multiply what is packed once
    Shape(64, 2, 3, 32, None, ((0, 40), (69, 1), (100, 9), (5, 70))),
    Shape(64, 1, 2, 16, 21, ((50, 30), (80, 1))),
    Shape(128, 2, 4, 48, None, ((130, 2), (0, 1), (1, 60))),
    Shape(80, 1, 1, 144, None, ((300, 1), (150, 5), (0, 20))),  # 80 is no multiple of the vectors' bytes
]


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("dtype", MODEL_DTYPES)
@pytest.mark.parametrize("stored", STORED)
def test_attention_to_stored_values(stored: torch.dtype, dtype: torch.dtype) -> None:
    for shape in SHAPES:
        case = quantised(shape, dtype, stored)
        state = case.attend(NativeAttention())
        case.check(state)
        in_parts = [split(seq, [1, 2], shape.block_size) for seq in case.sequences]
        tables = [[parts[i] for parts in in_parts if i < len(parts)] for i in range(max(map(len, in_parts)))]
        assert same_bits(case.attend(NativeAttention(), tables), state), "bits depend on the grouping of blocks"
        alone = [[seq] for seq in case.sequences]
        assert same_bits(case.attend(NativeAttention(), alone), state), "bits depend on the batch"
        for tokens in (1, 3):
            chunks = [[chunk] for seq in case.sequences for chunk in chunked(seq, tokens)]
            assert same_bits(case.attend(NativeAttention(), chunks), state), "few rows differ from many"
        assert same_bits(case.attend(NativeAttention(3)), state), "bits depend on the threads"


def chunked(seq: SequenceMetadata, tokens: int) -> list[SequenceMetadata]:
    """The same rows in chunks of `tokens`; each sees the KV up to its own end only."""
    starts = range(0, seq.query_len, tokens)
    return [
        SequenceMetadata.full(
            seq.query_start + start, min(tokens, seq.query_len - start), seq.context_len + start, seq.block_table
        )
        for start in starts
    ]


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("heads", [4, 16])  # few rows, and more than go over the elements where they are
@pytest.mark.parametrize("stored", STORED)
def test_every_byte_has_its_value(stored: torch.dtype, heads: int) -> None:
    """Each byte as an element of the only key, which a query head picks out, and as one of its value."""
    numbers = torch.arange(256, dtype=torch.uint8)
    numbers = numbers[(numbers & 0x7F) != 0x7F] if stored == torch.float8_e4m3fn else numbers[numbers != 128]
    for shift in range(4):  # to each place in a word
        bytes_ = torch.cat([numbers, numbers[:16]]).roll(shift)[: len(numbers) // 16 * 16 + 16].view(-1, 16)
        rows = torch.zeros(len(bytes_), 2, 1, BLOCK, 20, dtype=torch.uint8)
        rows[..., 16:] = torch.tensor([0.5]).view(torch.uint8)
        rows[:, :, 0, 0, :16] = bytes_[:, None]
        expected = bytes_.view(stored).float() * 0.5
        for block in range(len(bytes_)):
            for first in range(0, 16, heads):
                q = torch.eye(16)[None, first : first + heads].contiguous()
                state = one_row(q, rows.view(stored), block)
                assert torch.allclose(state.out[0], expected[block].expand(heads, -1), rtol=1e-6, atol=0)
                assert torch.allclose(state.lse[:, 0], expected[block, first : first + heads], rtol=1e-6, atol=0)


def one_row(q: Tensor, pool: Tensor, block: int) -> AttentionState:
    state = AttentionState.empty(q)
    table = AttentionMetadata([SequenceMetadata(0, 1, 0, 0, 1, [block])])
    NativeAttention(1).attend(q, pool, table, state, 1.0, None)
    return state


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("stored", STORED)
def test_what_is_not_finite_reaches_those_who_see_it_and_no_others(stored: torch.dtype, bad: float) -> None:
    shape = Shape(64, 1, 2, 32, None, ((20, 9),))
    case = quantised(shape, torch.float32, stored)
    (seq,) = case.sequences
    good = case.attend(NativeAttention())
    for plane in (0, 1):
        damaged = replace_row(case, seq, position=25, plane=plane, element=bad, stored=stored)
        state = AttentionState.empty(case.q)
        NativeAttention().attend(case.q, damaged, AttentionMetadata([seq]), state, shape.scale, None)
        before = slice(seq.query_start, seq.query_start + 5)
        after = slice(seq.query_start + 5, seq.query_start + 9)
        assert torch.equal(state.out[before], good.out[before]) and torch.equal(
            state.lse[:, before], good.lse[:, before]
        )
        assert state.out[after].isnan().any(dim=-1).all()


def replace_row(
    case: Case, seq: SequenceMetadata, *, position: int, plane: int, element: float, stored: torch.dtype
) -> Tensor:
    """The pool with a key's or value's row that holds one element that is not finite."""
    row = torch.ones(1, case.shape.head_dim)
    row[0, 7] = element
    pool = case.pool.clone()
    size = case.shape.block_size
    pool[seq.block_table[position // size], plane, :, position % size] = quantize_rows_torch(row, stored)
    return pool


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("stored", STORED)
def test_unequal_numbers_in_a_row(stored: torch.dtype) -> None:
    """Queries, and values of a tile, that differ a thousandfold: errors stay small beside the largest."""
    shape = Shape(64, 1, 2, 32, None, ((60, 1), (70, 9)))
    large = 1000.0
    case = quantised(shape, torch.float32, stored)
    case.q[..., 5] *= large
    for seq, (_, v) in zip(case.sequences, case.keys, strict=True):
        rows = case.pool[seq.block_table[0], 1, 0]
        rows[7] = quantize_rows_torch(large * dequantize_rows(rows[7:8], torch.float32), stored)[0]
        v[7] *= large
    state = case.attend(NativeAttention())
    for seq, (k, v) in zip(case.sequences, case.keys, strict=True):
        rows = slice(seq.query_start, seq.query_start + seq.query_len)
        out, lse = reference_attention(case.q[rows], k, v, shape.scale, seq.context_len)
        assert (state.out[rows] - out).abs().max() <= large * 1e-4
        assert (state.lse[:, rows] - lse).abs().max() <= large * 1e-6


def test_a_scale_may_be_the_smallest_or_the_largest() -> None:
    """Of subnormal numbers, and of numbers whose sum over a block nearly overflows: outputs are finite and right."""
    for stored in STORED:
        for size in (1e-40, 2e37):
            values = torch.linspace(-size, size, BLOCK * 16).view(BLOCK, 16)
            pool = torch.zeros(1, 2, 1, BLOCK, 20, dtype=stored)
            pool[0, 0, 0] = quantize_rows_torch(torch.zeros(BLOCK, 16), stored)
            pool[0, 1, 0] = quantize_rows_torch(values, stored)
            state = AttentionState.empty(torch.ones(1, 1, 16))
            table = AttentionMetadata([SequenceMetadata(0, 1, BLOCK - 1, 0, BLOCK, [0])])
            NativeAttention().attend(torch.ones(1, 1, 16), pool, table, state, 1.0, None)
            error = (state.out[0, 0].double() - values.double().mean(0)).abs().max()
            assert state.out.isfinite().all() and error <= size * 0.04 + 1e-38
