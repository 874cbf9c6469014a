"""Attention problems with known answers, for every test of attention backends."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random

import torch
from torch import Tensor

from nanovllm.ops.attention import AttentionBackend, AttentionMetadata, AttentionState, KVMetadata
from nanovllm.ops.reference_attention import reference_attention

# Absolute bounds on (output, LSE) against fp64 on the same inputs, for keys, queries and values of size 1.
BOUNDS = {torch.float32: (1e-5, 1e-5), torch.float16: (4e-3, 2e-4), torch.bfloat16: (2e-2, 2e-4)}


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


class Case:
    """Sequences whose K/V lie scattered over a pool that is NaN everywhere else."""

    def __init__(self, shape: Shape, dtype: torch.dtype, seed: int, device: str = "cpu") -> None:
        generator = torch.Generator().manual_seed(seed)

        def random(*size: int) -> Tensor:
            return torch.randn(size, generator=generator).to(dtype)

        self.shape = shape
        counts = [-(-sum(lengths) // shape.block_size) for lengths in shape.lengths]
        order = list(range(sum(counts) + 2))
        Random(seed).shuffle(order)
        block = (2, shape.kv_heads, shape.block_size, shape.head_dim)
        self.pool = torch.full((len(order), *block), float("nan"), dtype=dtype)
        self.segments: list[KVMetadata] = []
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
            self.segments.append(KVMetadata(start, new, context, 0, context + new, blocks))
            self.keys.append((k, v))
            start += new + 1
        self.q = random(start, shape.heads, shape.head_dim).to(device)
        self.pool = self.pool.to(device)

    def attend(self, backend: AttentionBackend, tables: list[list[KVMetadata]] | None = None) -> AttentionState:
        """The state after one call for each list of segments; by default all in one call."""
        state = AttentionState.empty(self.q)
        for segments in tables or [self.segments]:
            backend.attend(self.q, self.pool, AttentionMetadata(segments), state, self.shape.scale, self.shape.window)
        return state

    def check(self, state: AttentionState) -> None:
        """Every row of a sequence is what fp64 says, every other row is empty."""
        out_bound, lse_bound = BOUNDS[self.q.dtype]
        q, state = self.q.cpu(), AttentionState(state.out.cpu(), state.lse.cpu())
        nobody = torch.ones(q.shape[0], dtype=torch.bool)
        for segment, (k, v) in zip(self.segments, self.keys, strict=True):
            rows = slice(segment.query_start, segment.query_start + segment.query_len)
            nobody[rows] = False
            out, lse = reference_attention(
                q[rows], k, v, self.shape.scale, segment.query_position, window=self.shape.window
            )
            assert (state.out[rows] - out).abs().max() <= out_bound
            assert (state.lse[:, rows] - lse).abs().max() <= lse_bound
        assert (state.out[nobody] == 0).all() and (state.lse[:, nobody] == -math.inf).all()


def part(segment: KVMetadata, first: int, last: int, block_size: int) -> KVMetadata:
    """The same rows over the blocks [first, last) only."""
    end = min(segment.kv_end, segment.first_position + last * block_size)
    begin = segment.first_position + first * block_size
    return replace(segment, first_position=begin, kv_end=end, blocks=segment.blocks[first:last])


def split(segment: KVMetadata, cuts: list[int], block_size: int) -> list[KVMetadata]:
    edges = sorted({0, len(segment.blocks), *(cut for cut in cuts if cut < len(segment.blocks))})
    return [part(segment, *edge, block_size) for edge in pairwise(edges)]


def same_bits(a: AttentionState, b: AttentionState) -> bool:
    return torch.equal(a.out, b.out) and torch.equal(a.lse, b.lse)
