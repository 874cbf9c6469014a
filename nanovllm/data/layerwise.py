"""Layer-by-layer prefill as plain data. No torch.

`memory.layerwise` says which prompts go that way; `features.layerwise_prefill` runs them.
"""

from __future__ import annotations

from dataclasses import dataclass


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
