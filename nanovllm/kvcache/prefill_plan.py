"""Which way a prompt goes through the model, what that moves, and what memory it takes. No torch.

*Chunk-major*: a chunk of `max_num_batched_tokens` tokens goes through all layers, then the next. Every chunk loads all
that stands on the host before it, so n tokens load about n^2 / (2 * chunk) tokens' worth of KV.

*Layer-major*: a span of several chunks goes through one layer, chunk by chunk, before any of it goes through the next.
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
class LayerwisePrefill:
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

    def layer(self, layer_chunk: int) -> int:
        return layer_chunk // self.num_chunks

    def positions(self, layer_chunk: int) -> range:
        """Positions of the unit's tokens."""
        first = self.begin + layer_chunk % self.num_chunks * self.chunk
        return range(first, min(first + self.chunk, self.end))

    def step_end(self, first_layer_chunk: int, token_layers: int, num_layers: int) -> int:
        """Where a step stops that starts at `first_layer_chunk`: after `token_layers` tokens in all, at least one.

        Each unit takes its tokens through one of the layers, a step of n tokens takes n through `num_layers` of them. A
        last unit is run if at least half of it fits, so that a token of somebody else does not cost a whole unit.
        """
        layer_chunk = first_layer_chunk
        while layer_chunk < num_layers * self.num_chunks:
            tokens = len(self.positions(layer_chunk))
            if 2 * token_layers < tokens and layer_chunk > first_layer_chunk:
                break
            token_layers -= tokens
            layer_chunk += 1
        return layer_chunk


@dataclass(frozen=True, slots=True)
class LayerwiseStep:
    """Units [first_layer_chunk, end_layer_chunk) of a span: its share of one step."""

    layerwise: LayerwisePrefill
    first_layer_chunk: int
    end_layer_chunk: int

    @property
    def token_layers(self) -> int:
        """Tokens times layers that it computes."""
        return sum(
            len(self.layerwise.positions(layer_chunk))
            for layer_chunk in range(self.first_layer_chunk, self.end_layer_chunk)
        )


@dataclass(frozen=True, slots=True)
class LayerwiseMemory:
    """Device memory kept for spans: the layer buffer, and the residual stream of a span. Without it there are none."""

    buffer_blocks: int = 0  # one layer of each; spans reach as far as these positions
    max_tokens: int = 0  # of a span

    def num_bytes(self, layout: KVLayout, row_bytes: int) -> int:
        """row_bytes: the residual stream of a token, with its id."""
        return self.buffer_blocks * layout.block_layer_bytes + self.max_tokens * row_bytes


NO_LAYERWISE = LayerwiseMemory()


# ---- what moves


def stored_before(host_blocks: Sequence[int], block_size: int, position: int) -> int:
    """Tokens at positions below `position` that stand in the blocks with these indices."""
    return sum(min(max(position - index * block_size, 0), block_size) for index in host_blocks)


def chunk_major_loads(host_blocks: Sequence[int], block_size: int, begin: int, end: int, chunk: int) -> int:
    """Tokens that every layer loads while [begin, end) is prefilled chunk by chunk."""
    return sum(stored_before(host_blocks, block_size, first) for first in range(begin, end, chunk))


def plan_prefill(
    host_blocks: Sequence[int], block_size: int, begin: int, end: int, chunk: int, memory: LayerwiseMemory
) -> LayerwisePrefill | None:
    """What of [begin, end) goes layer-major next; None if the next chunk goes through all layers.

    host_blocks: indices of the sequence's blocks on the host; chunk: max_num_batched_tokens. The span is as long as
    memory allows, in whole chunks. It is taken if it loads fewer bytes than its chunks would: both ways store the same,
    and chunk-major takes less memory.
    """
    reach = min(end, memory.buffer_blocks * block_size, begin + memory.max_tokens)
    if reach < end:
        reach -= (reach - begin) % chunk
    if reach - begin <= chunk:
        return None
    if stored_before(host_blocks, block_size, begin) >= chunk_major_loads(host_blocks, block_size, begin, reach, chunk):
        return None
    return LayerwisePrefill(begin, reach, chunk)


def prefill_steps(
    host_blocks: Sequence[int], block_size: int, end: int, chunk: int, memory: LayerwiseMemory
) -> list[LayerwisePrefill]:
    """How a lone prompt of `end` tokens is prefilled: its spans, and chunks through all layers as spans of one."""
    steps: list[LayerwisePrefill] = []
    begin = 0
    while begin < end:
        layerwise = plan_prefill(host_blocks, block_size, begin, end, chunk, memory)
        steps.append(layerwise or LayerwisePrefill(begin, min(begin + chunk, end), chunk))
        begin = steps[-1].end
    return steps


# ---- what it takes


def divide_layerwise_memory(layout: KVLayout, row_bytes: int, memory: int, longest: int, chunk: int) -> LayerwiseMemory:
    """How to divide `memory` bytes between layer buffer and residual stream for prompts of up to `longest` tokens.

    row_bytes: the residual stream of a token, with its id. A buffer of T tokens leaves memory for spans of S: the first
    T tokens then load about T^2 / (2 * S) tokens' worth of KV, of the T^2 / (2 * chunk) that chunks would, and nothing
    where S reaches T. The T that saves most is taken; nothing where none saves any.
    """

    def divided(blocks: int) -> tuple[LayerwiseMemory, int]:
        """What is left beside a buffer of so many blocks, and how much it saves."""
        reach = min(blocks * layout.block_size, longest)
        if reach < longest:
            reach -= reach % chunk
        layerwise = min(reach, (memory - blocks * layout.block_layer_bytes) // row_bytes)
        return LayerwiseMemory(blocks, layerwise), _loads(reach, chunk, chunk) - _loads(
            reach, layerwise, chunk
        ) if layerwise > chunk else 0

    most = max(0, min(-(-longest // layout.block_size), memory // layout.block_layer_bytes))
    best, saved = max(map(divided, range(most + 1)), key=lambda choice: choice[1])
    return best if saved else NO_LAYERWISE


def _loads(tokens: int, step: int, chunk: int) -> int:
    """Tokens that each layer loads for `tokens`, all those before each step; steps but the last are whole chunks."""
    whole = step - step % chunk
    steps = 1 + max(0, -(-(tokens - step) // whole))
    return whole * steps * (steps - 1) // 2
