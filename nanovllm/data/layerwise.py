"""Layer-by-layer prefill as far as the core knows it: plain data, and the interface of its sizes. No torch.

The side `nanovllm.features.layerwise_prefill` decides which prompts go layer by layer, and runs them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from nanovllm.data.layout import KVLayout


@dataclass(frozen=True, slots=True)
class LayerwisePrefill:
    """Positions [begin, end) of a sequence, prefilled layer by layer in chunks of `chunk` tokens.

    A *layer chunk* is one chunk in one layer. Layer chunks are numbered in the order in which they run: all chunks of
    layer 0, then all of layer 1, and so on. A step runs a few of them.
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
        """Positions of the layer chunk's tokens."""
        first = self.begin + layer_chunk % self.num_chunks * self.chunk
        return range(first, min(first + self.chunk, self.end))


@dataclass(frozen=True, slots=True)
class LayerwiseStep:
    """Layer chunks [first_layer_chunk, end_layer_chunk) of a layer-by-layer prefill, which one step runs."""

    layerwise: LayerwisePrefill
    first_layer_chunk: int
    end_layer_chunk: int

    @property
    def token_layers(self) -> int:
        """Tokens times layers that the step computes."""
        layer_chunks = range(self.first_layer_chunk, self.end_layer_chunk)
        return sum(len(self.layerwise.positions(layer_chunk)) for layer_chunk in layer_chunks)


@dataclass(frozen=True, slots=True)
class LayerwiseMemory:
    """Device memory for layer-by-layer prefill: the layer buffer and the residual stream. Zeros disable it."""

    buffer_blocks: int = 0  # one layer of each; only positions in these blocks are prefilled layer by layer
    max_tokens: int = 0  # of one layer-by-layer prefill

    def num_bytes(self, layout: KVLayout, token_bytes: int) -> int:
        """token_bytes: the residual stream of a token, with its id."""
        return self.buffer_bytes(layout) + self.max_tokens * token_bytes

    def buffer_bytes(self, layout: KVLayout) -> int:
        """Of the layer buffer."""
        return self.buffer_blocks * layout.block_layer_bytes


NO_LAYERWISE = LayerwiseMemory()


class LayerwiseSizing(Protocol):
    """What the sizes of the KV cache, and predictions from sizes, ask of layer-by-layer prefill."""

    @property
    def token_bytes(self) -> int:
        """Bytes that the prefill keeps for each token: its residual stream and id."""
        ...

    def divide(self, layout: KVLayout, memory: int, longest: int, chunk: int) -> LayerwiseMemory:
        """How to use at most `memory` bytes for prompts of up to `longest` tokens."""
        ...

    def prefill_steps(
        self, block_size: int, resident_blocks: int, end: int, chunk: int, memory: LayerwiseMemory
    ) -> list[LayerwisePrefill]:
        """How a prompt of `end` tokens alone is prefilled. A chunk through all layers is a prefill of a single chunk.

        resident_blocks: how many of its blocks stay on the device, from the first on; chunk: max_num_batched_tokens.
        """
        ...


def chunk_by_chunk(end: int, chunk: int) -> list[LayerwisePrefill]:
    """The prefill steps of a prompt of `end` tokens where nothing goes layer by layer."""
    return [LayerwisePrefill(begin, min(begin + chunk, end), chunk) for begin in range(0, end, chunk)]
