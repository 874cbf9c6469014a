"""What one forward pass knows beyond its token ids. It is passed to the model, never kept in a global."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class SequenceMetadata:
    """One sequence's rows in the flat batch, and where its KV cache lives.

    Rows `[query_start, query_start + query_len)` of the batch are the tokens at positions
    `[context_len, context_len + query_len)` of the sequence; `[0, context_len)` is already in the cache.
    """

    query_start: int
    query_len: int
    context_len: int
    block_table: Sequence[int]  # physical block of each logical block, covering context_len + query_len tokens

    @property
    def total_len(self) -> int:
        """Tokens in the cache once this step has run."""
        return self.context_len + self.query_len


class KVCache(Protocol):
    """The one door between a layer and its KV memory. Layers do not know which room is behind it."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, ctx: ForwardContext) -> Tensor:
        """Store the new K/V of `layer`, attend causally over history and self, return the output.

        q: [tokens, heads, head_dim]; k, v: [tokens, kv_heads, head_dim]; returns the shape and dtype of q,
        and may use q's memory for it.
        """
        ...


@dataclass(frozen=True, slots=True)
class WatchedKVCache:
    """A KV cache that says how far a step is: the share of the layers that have come and gone.

    On a GPU, layers come as they are issued, ahead of what has been computed.
    """

    kv_cache: KVCache
    num_layers: int
    on_layer: Callable[[float], None]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, ctx: ForwardContext) -> Tensor:
        """See `KVCache`."""
        self.on_layer(layer / self.num_layers)
        return self.kv_cache.attend(layer, q, k, v, ctx)


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """Everything the layers of one forward pass need: where each token stands and where its KV lives."""

    positions: Tensor  # int64 [tokens]
    rope_lengths: Tensor  # int64 [tokens]: max(prompt length, position + 1), which dynamic RoPE scales by
    sequences: tuple[SequenceMetadata, ...]
    kv_cache: KVCache


def positions_of(sequence: SequenceMetadata) -> Tensor:
    """Positions of one sequence's rows, int64 [query_len], on the host."""
    return torch.arange(sequence.context_len, sequence.total_len, dtype=torch.int64)


def flat_positions(sequences: Sequence[SequenceMetadata]) -> Tensor:
    """Positions of a flat batch of at least one sequence, int64 [tokens], in batch order, on the host."""
    return torch.cat([positions_of(sequence) for sequence in sequences])
