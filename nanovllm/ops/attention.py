"""The attention seam: what a backend computes, in one convention for all of them.

LSE is the natural-log sum of exp of the scaled scores, fp32, `[heads, tokens]`. Causal masks are aligned bottom-right:
a query at position p sees the keys at positions up to p, and with a sliding window w only those after p - w. A row that
sees no key has output 0 and LSE -inf.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class KVSegment:
    """Consecutive KV blocks of one sequence, and the query rows that attend to them.

    `blocks` index a pool `[blocks, 2, kv_heads, block_size, head_dim]` (K, then V). They hold the keys at positions
    [first_position, kv_end); memory beyond kv_end is undefined and must not matter.
    """

    query_start: int  # first row in the flat batch
    query_len: int
    query_position: int  # position of the first row
    first_position: int
    kv_end: int
    blocks: Sequence[int]


class SegmentTable:
    """Segments of disjoint query rows, as objects and as the index tensors that kernels take; made once a step."""

    def __init__(self, segments: Sequence[KVSegment]) -> None:
        self.segments = tuple(segments)
        self.blocks = torch.tensor([block for s in segments for block in s.blocks], dtype=torch.int64)
        rows: list[tuple[int, ...]] = []
        start = 0
        for s in segments:
            count = len(s.blocks)
            rows.append((s.query_start, s.query_len, start, count, s.first_position, s.kv_end, s.query_position))
            start += count
        # query_start, query_len, block_start, block_count, first_position, kv_end, query_position
        self.spans = torch.tensor(rows, dtype=torch.int64).reshape(-1, 7)


@dataclass(slots=True)
class AttentionState:
    """Attention over the keys seen so far: normalised output and LSE, both fp32."""

    out: Tensor  # [tokens, heads, head_dim]
    lse: Tensor  # [heads, tokens]

    @classmethod
    def empty(cls, q: Tensor) -> AttentionState:
        """The state of queries q `[tokens, heads, head_dim]` before any key was seen."""
        lse = torch.full((q.shape[1], q.shape[0]), float("-inf"), dtype=torch.float32, device=q.device)
        return cls(torch.zeros(q.shape, dtype=torch.float32, device=q.device), lse)

    def output(self, q: Tensor) -> Tensor:
        """The output in the dtype of the queries and in their memory: they are not needed any more."""
        return q.copy_(self.out)


class AttentionBackend(Protocol):
    """Attention over KV blocks. A row's result depends on its own query and keys only: not on the batch, not on where
    the blocks live, and not on how they were grouped into calls."""

    name: str

    def attend(
        self, q: Tensor, pool: Tensor, table: SegmentTable, state: AttentionState, scale: float, window: int | None
    ) -> None:
        """Merge attention over the table's segments into `state`, in place.

        q: [tokens, heads, head_dim]; pool: [blocks, 2, kv_heads, block_size, head_dim], each block contiguous.
        """
        ...
