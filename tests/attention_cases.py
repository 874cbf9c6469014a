"""Attention problems with known answers, for every test of attention backends."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random

import torch
from torch import Tensor

from nanovllm.ops.attention import AttentionBackend, AttentionMetadata, AttentionState, SequenceMetadata
from nanovllm.ops.kv_quantization import dequantize_rows, quantize_rows_torch
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
    """Sequences whose K/V are scattered over a pool that is NaN everywhere else."""

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
        self.sequences: list[SequenceMetadata] = []
        self.keys: list[tuple[Tensor, Tensor]] = []
        start = 1  # rows before, between and after the sequences are of none
        for (context, new), count in zip(shape.lengths, counts, strict=True):
            blocks = order[:count]
            order = order[count:]
            k = random(context + new, shape.kv_heads, shape.head_dim)
            v = random(context + new, shape.kv_heads, shape.head_dim)
            for position in range(context + new):
                where = blocks[position // shape.block_size], position % shape.block_size
                self.pool[where[0], 0, :, where[1]], self.pool[where[0], 1, :, where[1]] = k[position], v[position]
            self.sequences.append(SequenceMetadata(start, new, context, 0, context + new, blocks))
            self.keys.append((k, v))
            start += new + 1
        self.q = random(start, shape.heads, shape.head_dim).to(device)
        self.pool = self.pool.to(device)

    def attend(
        self,
        backend: AttentionBackend,
        tables: list[list[SequenceMetadata]] | None = None,
        sinks: Tensor | None = None,
    ) -> AttentionState:
        """The state after one call for each list of sequences; by default all in one call."""
        state = AttentionState.empty(self.q, sinks)
        for sequences in tables or [self.sequences]:
            backend.attend(self.q, self.pool, AttentionMetadata(sequences), state, self.shape.scale, self.shape.window)
        return state

    def check(self, state: AttentionState, sinks: Tensor | None = None) -> None:
        """Every row of a sequence is what fp64 says, every other row is empty."""
        out_bound, lse_bound = BOUNDS[self.q.dtype]
        q = self.q.cpu()
        state = AttentionState(state.out.cpu(), state.lse.cpu())
        unused = torch.ones(q.shape[0], dtype=torch.bool)
        for seq, (k, v) in zip(self.sequences, self.keys, strict=True):
            rows = slice(seq.query_start, seq.query_start + seq.query_len)
            unused[rows] = False
            out, lse = reference_attention(q[rows], k, v, self.shape.scale, seq.context_len, window=self.shape.window)
            if sinks is not None:
                with_sinks = torch.logaddexp(lse, sinks.cpu().double().unsqueeze(1))
                out = out * torch.exp(lse - with_sinks).T.unsqueeze(-1)
                lse = with_sinks
            assert (state.out[rows] - out).abs().max() <= out_bound
            assert (state.lse[:, rows] - lse).abs().max() <= lse_bound
        empty = AttentionState.empty(q, None if sinks is None else sinks.cpu())
        assert (state.out[unused] == 0).all() and torch.equal(state.lse[:, unused], empty.lse[:, unused])


def quantised(shape: Shape, dtype: torch.dtype, stored: torch.dtype, seed: int = 2, device: str = "cpu") -> Case:
    """A case whose pool is in 8 bits and whose known answers are those of the stored values."""
    case = Case(shape, dtype, seed, device)
    case.pool = quantize_rows_torch(case.pool, stored)
    case.keys = [(_stored_values(k, stored), _stored_values(v, stored)) for k, v in case.keys]
    return case


def _stored_values(x: Tensor, stored: torch.dtype) -> Tensor:
    return dequantize_rows(quantize_rows_torch(x, stored), torch.float32)


def part(seq: SequenceMetadata, first: int, last: int, block_size: int) -> SequenceMetadata:
    """The same rows over the blocks [first, last) only."""
    end = min(seq.kv_end, seq.first_position + last * block_size)
    begin = seq.first_position + first * block_size
    return replace(seq, first_position=begin, kv_end=end, block_table=seq.block_table[first:last])


def split(seq: SequenceMetadata, cuts: list[int], block_size: int) -> list[SequenceMetadata]:
    edges = sorted({0, len(seq.block_table), *(cut for cut in cuts if cut < len(seq.block_table))})
    return [part(seq, *edge, block_size) for edge in pairwise(edges)]


def same_bits(a: AttentionState, b: AttentionState) -> bool:
    return torch.equal(a.out, b.out) and torch.equal(a.lse, b.lse)
