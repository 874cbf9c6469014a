"""The inputs of one forward pass beyond its token ids. They are passed to the model, never kept in a global."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Protocol

from torch import Tensor

from nanovllm.layers.linear import RowAdapters
from nanovllm.ops.attention import SequenceMetadata


class KVCache(Protocol):
    """What an attention layer needs of the KV cache. Layers do not know where blocks are stored."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, ctx: ForwardContext) -> Tensor:
        """Store the new K/V of `layer`, attend causally over the history and the new tokens, return the output.

        q: [tokens, heads, head_dim]; k, v: [tokens, kv_heads, head_dim]. Returns the shape and dtype of q, and may
        overwrite q with it.
        """
        ...


@dataclass(frozen=True, slots=True)
class WatchedKVCache:
    """A KV cache that reports the progress of a step: before each layer's attention, the number of its tokens.

    On a GPU a layer begins when it is issued, ahead of its computation.
    """

    kv_cache: KVCache
    on_attend: Callable[[int], None]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, ctx: ForwardContext) -> Tensor:
        """See `KVCache`."""
        self.on_attend(q.shape[0])
        return self.kv_cache.attend(layer, q, k, v, ctx)


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """The inputs of all layers of one forward pass.

    adapters: of each part of `Decoder.chunk_rows` rows, in order; empty if no row has one.
    """

    positions: Tensor  # int64 [tokens]
    rope_lengths: Tensor  # int64 [tokens]: max(prompt length, position + 1), which dynamic RoPE scales by
    sequences: tuple[SequenceMetadata, ...]
    kv_cache: KVCache
    adapters: Sequence[RowAdapters | None] = ()

    @property
    def adapters_of_parts(self) -> Iterable[RowAdapters | None]:
        """The adapters of part after part; without end if no row has one."""
        return self.adapters or repeat(None)
