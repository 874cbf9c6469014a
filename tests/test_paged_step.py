"""Attention of few rows in one call a layer gives the bits of the operators that it stands for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nanovllm.ops.attention import AttentionMetadata, AttentionState, SequenceMetadata
from nanovllm.ops.cpu_attention import NativeAttention, PagedStep
from nanovllm.ops.row_kernels import store_kv

LAYERS = 3
BLOCKS = 7
KV_HEADS = 2
BLOCK_SIZE = 5
HEADS = 6
HEAD_DIM = 48
# Of each sequence: new tokens, tokens before them, blocks.
SEQUENCES = ((1, 12, (6, 0, 3)), (4, 0, (2,)), (1, 0, (5,)), (3, 3, (1, 4)))
ROWS = sum(new for new, _, _ in SEQUENCES)


def tensors(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    pool = random(LAYERS, BLOCKS, 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    k, v = random(2, ROWS, KV_HEADS, HEAD_DIM)
    return pool, random(ROWS, HEADS, HEAD_DIM), k, v


def table_and_slots() -> tuple[AttentionMetadata, Tensor]:
    sequences = []
    slots = []
    for new, before, blocks in SEQUENCES:
        sequences.append(SequenceMetadata(len(slots), new, before, 0, before + new, blocks))
        slots += [blocks[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE for at in range(before, before + new)]
    return AttentionMetadata(sequences), torch.tensor(slots)


def step_of(pool: Tensor, window: int | None = None) -> PagedStep:
    table, slots = table_and_slots()
    return PagedStep(pool, slots, table, pool.dtype, HEADS, 0.2, window)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_every_layer_has_the_bits_of_the_single_operators(dtype: torch.dtype, window: int | None) -> None:
    """The last layer with sinks."""
    pool, q, k, v = tensors(dtype)
    table, slots = table_and_slots()
    expected_pool = pool.clone()
    step = step_of(pool, window)
    for layer in range(LAYERS):
        sinks = torch.linspace(-1, 3, HEADS) if layer == LAYERS - 1 else None
        queries = q.clone()
        state = AttentionState.empty(q, sinks)
        store_kv(expected_pool[layer], k, v, slots)
        NativeAttention().attend(q, expected_pool[layer], table, state, 0.2, window)
        output = step.attend(layer, queries, k, v, sinks)
        assert output.data_ptr() == queries.data_ptr()
        assert torch.equal(output, q.clone().copy_(state.out))
    assert torch.equal(pool, expected_pool)
