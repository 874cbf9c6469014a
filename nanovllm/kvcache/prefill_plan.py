"""Which way a prompt goes through the model, what that moves, and what memory it takes. No torch.

*Chunk-major*: a chunk of `max_num_batched_tokens` tokens goes through all layers, then the next. Every chunk loads all
that stands on the host before it, so n tokens load about n^2 / (2 * chunk) tokens' worth of KV.

*Layer-major*: a span of many chunks goes through one layer, chunk by chunk, before any of it goes through the next.
While a layer runs, its K/V of prefix and span are on the device, in the *layer buffer*: what stood on the host before
the span comes in once per layer, and what the span adds goes out once per layer. In return the residual stream of the
whole span is kept from layer to layer. Projections, attention and MLP see one chunk at a time either way: they need the
same memory and are called with the same shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nanovllm.kvcache.layout import KVLayout


@dataclass(frozen=True, slots=True)
class PrefillSpan:
    """Positions [begin, end) of a sequence, prefilled layer-major in chunks of `chunk` tokens.

    A *unit* is one chunk through one layer. Units are numbered in the order in which they run: all chunks of layer 0,
    then all of layer 1, ... A step runs a few of them.
    """

    begin: int
    end: int
    chunk: int

    @property
    def num_chunks(self) -> int:
        return -(-(self.end - self.begin) // self.chunk)

    def layer(self, unit: int) -> int:
        return unit // self.num_chunks

    def positions(self, unit: int) -> range:
        """Positions of the unit's tokens."""
        first = self.begin + unit % self.num_chunks * self.chunk
        return range(first, min(first + self.chunk, self.end))

    def slice_end(self, first_unit: int, token_layers: int, num_layers: int) -> int:
        """Where a step stops that starts at `first_unit`: units of about `token_layers` tokens in all, at least one.

        Each unit takes its tokens through one of the layers, a step of n tokens takes n through `num_layers` of them. A
        last unit is run if at least half of it fits, so that a token of somebody else does not cost a whole unit.
        """
        unit = first_unit
        while unit < num_layers * self.num_chunks:
            tokens = len(self.positions(unit))
            if 2 * token_layers < tokens and unit > first_unit:
                break
            token_layers -= tokens
            unit += 1
        return unit


@dataclass(frozen=True, slots=True)
class SpanSlice:
    """Units [first_unit, end_unit) of a span: its share of one step."""

    span: PrefillSpan
    first_unit: int
    end_unit: int

    @property
    def token_layers(self) -> int:
        """Tokens times layers that it computes."""
        return sum(len(self.span.positions(unit)) for unit in range(self.first_unit, self.end_unit))


# ---- what moves


def stored_before(host_blocks: Sequence[int], block_size: int, position: int) -> int:
    """Tokens at positions below `position` that stand in the blocks with these indices."""
    return sum(min(max(position - index * block_size, 0), block_size) for index in host_blocks)


def chunk_major_loads(host_blocks: Sequence[int], block_size: int, begin: int, end: int, chunk: int) -> int:
    """Tokens that every layer loads while [begin, end) is prefilled chunk by chunk."""
    return sum(stored_before(host_blocks, block_size, first) for first in range(begin, end, chunk))


def plan_prefill(
    host_blocks: Sequence[int], block_size: int, begin: int, end: int, chunk: int, span_tokens: int
) -> PrefillSpan | None:
    """The part of [begin, end) to prefill layer-major; None if all of it should go chunk by chunk.

    host_blocks: indices of the sequence's blocks on the host. chunk: max_num_batched_tokens. span_tokens: positions
    that the layer buffer covers; a prompt's tail beyond them goes chunk by chunk. The way that loads fewer bytes is
    taken (both store the same), and chunk-major, which takes less memory, where they load the same.
    """
    span_end = min(end, span_tokens)
    if span_end - begin <= chunk:
        return None
    loads = stored_before(host_blocks, block_size, begin)
    loads += chunk_major_loads(host_blocks, block_size, span_end, end, chunk)
    if loads >= chunk_major_loads(host_blocks, block_size, begin, end, chunk):
        return None
    return PrefillSpan(begin, span_end, chunk)


# ---- what it takes


def span_block_bytes(layout: KVLayout, row_bytes: int) -> int:
    """Device memory of a span for each block of its positions: a block of the layer buffer, and what is kept per token.

    row_bytes: the residual stream of a token, with its id.
    """
    return layout.block_layer_bytes + layout.block_size * row_bytes


def span_blocks(layout: KVLayout, row_bytes: int, memory: int, longest: int) -> int:
    """Blocks of the layer buffer: enough for a prompt of `longest` tokens, or as many as `memory` bytes allow."""
    wanted = -(-longest // layout.block_size)
    return max(0, min(wanted, memory // span_block_bytes(layout, row_bytes)))
