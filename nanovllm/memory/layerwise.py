"""Whether a prompt is prefilled chunk by chunk or layer by layer, what that copies, and the memory it takes. No torch.

*Chunk by chunk*: a chunk of `max_num_batched_tokens` tokens goes through all layers, then the next. Every chunk loads
all earlier KV from the host, so n tokens load about n^2 / (2 * chunk) tokens' worth of KV.

*Layer by layer*: several chunks go through one layer before any of them goes through the next. While a layer runs, its
K/V of these chunks and of all tokens before them are on the device, in the *layer buffer*: earlier KV is loaded once
per layer, and new KV is stored once per layer. In return the residual stream of all these chunks is kept from layer to
layer. Projections, attention and MLP process one chunk at a time either way, with the same memory and shapes. Layers
are those with K and V: recurrent layers are computed with the next of them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from nanovllm.config import EngineConfig
from nanovllm.data.batch import LayerwisePrefill
from nanovllm.data.network import Network
from nanovllm.memory.layout import KVLayout

ID_BYTES = 8  # of a token id or position


@dataclass(frozen=True, slots=True)
class LayerwiseMemory:
    """Device memory for layer-by-layer prefill: the layer buffer and the residual stream. Zeros disable it."""

    buffer_blocks: int = 0  # one layer of each; only positions in these blocks are prefilled layer by layer
    max_tokens: int = 0  # of one layer-by-layer prefill
    weight_tokens: int = 0  # as many tokens' worth of KV do the weights weigh that stream in a pass through all layers

    def num_bytes(self, layout: KVLayout, token_bytes: int) -> int:
        """token_bytes: the residual stream of a token, with its id."""
        return self.buffer_bytes(layout) + self.max_tokens * token_bytes

    def buffer_bytes(self, layout: KVLayout) -> int:
        """Of the layer buffer."""
        return self.buffer_blocks * layout.block_layer_bytes


NO_LAYERWISE = LayerwiseMemory()


def stored_before(host_blocks: Sequence[int], block_size: int, position: int) -> int:
    """Tokens at positions below `position` in the blocks with these indices, which are sorted."""
    index, offset = divmod(position, block_size)
    full = bisect_left(host_blocks, index)
    return full * block_size + (offset if full < len(host_blocks) and host_blocks[full] == index else 0)


def chunk_major_loads(host_blocks: Sequence[int], block_size: int, begin: int, end: int, chunk: int) -> int:
    """Tokens that each layer loads while [begin, end) is prefilled chunk by chunk."""
    return sum(stored_before(host_blocks, block_size, first) for first in range(begin, end, chunk))


def longest_prefill(block_size: int, begin: int, end: int, chunk: int, memory: LayerwiseMemory) -> int:
    """The end of the longest layer-by-layer prefill from `begin` that memory allows, in full chunks, up to `end`."""
    reach = min(end, memory.buffer_blocks * block_size, begin + memory.max_tokens)
    return reach if reach == end else reach - (reach - begin) % chunk


def plan_prefill(
    host_blocks: Sequence[int], block_size: int, begin: int, end: int, chunk: int, memory: LayerwiseMemory
) -> LayerwisePrefill | None:
    """The next layer-by-layer prefill of [begin, end); None if the next chunk goes through all layers.

    host_blocks: sorted indices of the sequence's blocks on the host; chunk: max_num_batched_tokens. The prefill is as
    long as memory allows, and is chosen if it loads fewer bytes than its chunks would, of KV and of weights. Both
    orders store the same bytes, and chunk by chunk takes less memory.
    """
    reach = longest_prefill(block_size, begin, end, chunk, memory)
    if reach - begin <= chunk:
        return None
    chunks = -(-(reach - begin) // chunk)
    saved = chunk_major_loads(host_blocks, block_size, begin, reach, chunk) + memory.weight_tokens * (chunks - 1)
    if stored_before(host_blocks, block_size, begin) >= saved:
        return None
    return LayerwisePrefill(begin, reach, chunk)


def prefill_steps(
    block_size: int, resident_blocks: int, end: int, chunk: int, memory: LayerwiseMemory
) -> list[LayerwisePrefill]:
    """How a prompt of `end` tokens alone is prefilled. A chunk through all layers is a prefill of a single chunk.

    resident_blocks: how many of its blocks stay on the device, from the first on; chunk: max_num_batched_tokens.
    """
    host_blocks = range(resident_blocks, -(-end // block_size))
    steps: list[LayerwisePrefill] = []
    begin = 0
    while begin < end:
        layerwise = plan_prefill(host_blocks, block_size, begin, end, chunk, memory)
        steps.append(layerwise or LayerwisePrefill(begin, min(begin + chunk, end), chunk))
        begin = steps[-1].end
    return steps


def prefill_loads(
    block_size: int, resident_blocks: int, end: int, chunk: int, memory: LayerwiseMemory, weight_tokens: int = 0
) -> int:
    """Tokens that each layer loads for such a prompt. weight_tokens: what weights count for in each pass."""
    host_blocks = range(resident_blocks, -(-end // block_size))
    steps = prefill_steps(block_size, resident_blocks, end, chunk, memory)
    return sum(stored_before(host_blocks, block_size, step.begin) + weight_tokens for step in steps)


def step_end(layerwise: LayerwisePrefill, first_layer_chunk: int, token_layers: int, num_layers: int) -> int:
    """The end of a step that starts at `first_layer_chunk`, with a budget of `token_layers` tokens times layers.

    A step runs at least one layer chunk. It runs a last one if at least half of it fits the budget, so that a token of
    another sequence does not cost a full layer chunk.
    """
    layer_chunk = first_layer_chunk
    while layer_chunk < num_layers * layerwise.num_chunks:
        tokens = len(layerwise.positions(layer_chunk))
        if 2 * token_layers < tokens and layer_chunk > first_layer_chunk:
            break
        token_layers -= tokens
        layer_chunk += 1
    return layer_chunk


def divide_memory(
    layout: KVLayout, token_bytes: int, memory: int, longest: int, chunk: int, streamed_bytes: int = 0
) -> LayerwiseMemory:
    """How to divide `memory` bytes between layer buffer and residual stream for prompts of up to `longest` tokens.

    A buffer of T tokens leaves memory for the residual stream of S tokens. The first T tokens then load about
    T^2 / (2 * S) tokens' worth of KV instead of T^2 / (2 * chunk), and nothing if S reaches T; and weights T / S times
    instead of T / chunk times. Returns the T that saves most, or NO_LAYERWISE if none saves anything.
    streamed_bytes: of the weights that stream.
    """
    weights = streamed_bytes // layout.token_bytes

    def divided(blocks: int) -> tuple[LayerwiseMemory, int]:
        """The division with a buffer of so many blocks, and the tokens' worth of loads that it saves."""
        reach = min(blocks * layout.block_size, longest)
        if reach < longest:
            reach -= reach % chunk
        layerwise = min(reach, (memory - blocks * layout.block_layer_bytes) // token_bytes)
        saved = 0
        if layerwise > chunk:
            saved = _loads(reach, chunk, chunk, weights) - _loads(reach, layerwise, chunk, weights)
        return LayerwiseMemory(blocks, layerwise, weights), saved

    most = max(0, min(-(-longest // layout.block_size), memory // layout.block_layer_bytes))
    best, saved = max(map(divided, range(most + 1)), key=lambda choice: choice[1])
    return best if saved else NO_LAYERWISE


def _loads(tokens: int, step: int, chunk: int, weights: int) -> int:
    """Tokens that each layer loads for a prompt of `tokens`. All steps but the last are multiples of `chunk`.

    weights: that each step loads besides, as tokens.
    """
    full = step - step % chunk
    steps = 1 + max(0, -(-(tokens - step) // full))
    return full * steps * (steps - 1) // 2 + weights * steps


def layerwise_token_bytes(network: Network, config: EngineConfig) -> int:
    """What layer-by-layer prefill keeps for each token: residual stream and id; 0 if no prompt goes that way.

    Prompts go chunk by chunk where layers read the keys and values of another one, which are in the layer buffer no
    more, or where layers have inputs of their own.
    """
    goes = config.enable_cpu_offload and not network.kv_shared and not network.has_layer_inputs
    return network.hidden_size * network.itemsize + ID_BYTES if goes else 0
