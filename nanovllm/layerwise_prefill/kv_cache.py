"""The KV cache of layer-by-layer prefill: all KV of one layer of one sequence is on the device while the layer runs.

Resident blocks of the sequence are used directly. Every other block uses the block of the layer buffer with its index
in the sequence. When a layer begins, the stored tokens of these blocks are loaded. Chunks write their K/V into them.
Each block is stored once, when the prefill's last token in it is written, and is released for the next layer when all
chunks have attended.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from torch import Tensor

from nanovllm.forward_context import ForwardContext
from nanovllm.kvcache.base import AttentionGeometry
from nanovllm.kvcache.offload_engine import OffloadEngine, RingUse
from nanovllm.kvcache.prefill_plan import LayerwiseStep
from nanovllm.ops.attention import (
    AttentionBackend,
    AttentionMetadata,
    AttentionState,
    SequenceMetadata,
    first_visible_block,
)


class LayerwiseKVCache:
    """Runs one step of a prefill at a time: `begin_part`, `attend` for every layer chunk in order, `end_part`.

    A step may end within a layer. The layer buffer then keeps that layer for the next step of the same prefill.
    """

    def __init__(self, engine: OffloadEngine, geometry: AttentionGeometry, backend: AttentionBackend) -> None:
        self._engine = engine
        self._geometry = geometry
        self._backend = backend
        self._part: LayerwiseStep
        self._block_table: Sequence[int] = ()  # of the sequence's blocks, in this step
        self._tables: dict[tuple[int, int | None], list[tuple[bool, AttentionMetadata]]] = {}  # by chunk and window

    def begin_part(self, part: LayerwiseStep, block_table: Sequence[int]) -> tuple[int, int]:
        """Start loading, after the step's block moves. Returns the bytes that the step loads and stores.

        block_table: physical block ids for positions [0, end) of the prefill. They may differ from those of the last
        step: a block that has moved to the device is used there from now on.
        """
        self._part, self._block_table, self._tables = part, block_table, {}
        layer_chunks = range(part.first_layer_chunk, part.end_layer_chunk)
        if part.first_layer_chunk % part.layerwise.num_chunks == 0:
            self._fill(part.layerwise.layer(part.first_layer_chunk))
        begun = {
            part.layerwise.layer(layer_chunk)
            for layer_chunk in layer_chunks
            if layer_chunk % part.layerwise.num_chunks == 0
        }
        loaded = sum(use.stored_tokens for layer in begun for _, use in self._uses(layer))
        stored = sum(
            count for layer_chunk in layer_chunks for _, _, count in self._stores(part.layerwise.positions(layer_chunk))
        )
        token_bytes = self._engine.layout.token_layer_bytes
        return loaded * token_bytes, stored * token_bytes

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, ctx: ForwardContext) -> Tensor:
        """See `forward_context.KVCache`. The batch is one layer chunk. Overwrites q."""
        (chunk,) = ctx.sequences
        self._write(layer, chunk, k, v)
        state, window = AttentionState.empty(q), self._geometry.windows[layer]
        for index in range(self._first_block(chunk, window), self._num_blocks(chunk.total_len)):
            held = min(chunk.total_len - index * self._block_size, self._block_size)
            self._engine.device.declare_kernel("attend", reads=(self._block(layer, index)[:, :, :held],))
        for in_buffer, table in self._groups(chunk, window):
            pool = self._engine.layer_buffer if in_buffer else self._engine.resident[layer]
            self._backend.attend(q, pool, table, state, self._geometry.scale, window)
        self._engine.device.end_kernel()
        if chunk.total_len == self._part.layerwise.end:
            self._end_layer(layer)
        return state.write_output_(q)

    def end_part(self) -> None:
        """All layer chunks of the step have run."""
        if self._part.end_layer_chunk % self._part.layerwise.num_chunks:
            self._release()

    # ---- the layer buffer

    def _fill(self, layer: int) -> None:
        for index, use in self._uses(layer):
            self._engine.fill_buffer(index, use)

    def _uses(self, layer: int) -> Iterator[tuple[int, RingUse]]:
        """The layer's blocks in the buffer, except those before its sliding window, with their stored tokens."""
        layerwise = self._part.layerwise
        first = first_visible_block(layerwise.begin, self._geometry.windows[layer], self._block_size)
        for index in self._on_host(range(first, self._num_blocks(layerwise.end))):
            stored = min(max(layerwise.begin - index * self._block_size, 0), self._block_size)
            yield index, RingUse(layer, self._host_block(index), stored)

    def _write(self, layer: int, chunk: SequenceMetadata, k: Tensor, v: Tensor) -> None:
        """Write the chunk's K/V into its blocks, and store the blocks that are complete."""
        positions = range(chunk.context_len, chunk.total_len)
        for index in range(positions.start // self._block_size, self._num_blocks(positions.stop)):
            first = index * self._block_size
            begin, end = max(positions.start, first), min(positions.stop, first + self._block_size)
            rows = slice(chunk.query_start + begin - positions.start, chunk.query_start + end - positions.start)
            new = self._block(layer, index)[:, :, begin - first : end - first]
            self._engine.device.declare_kernel("write K/V", writes=(new,))
            new[0] = k[rows].transpose(0, 1)
            new[1] = v[rows].transpose(0, 1)
        for index, first_token, count in self._stores(positions):
            self._engine.store_buffered(index, layer, self._host_block(index), first_token, count)

    def _stores(self, positions: range) -> Iterator[tuple[int, int, int]]:
        """Host blocks whose last token of the prefill is in `positions`: (index, first token, tokens)."""
        layerwise = self._part.layerwise
        for index in self._on_host(range(positions.start // self._block_size, self._num_blocks(positions.stop))):
            first = index * self._block_size
            begin, end = max(layerwise.begin, first), min(layerwise.end, first + self._block_size)
            if end <= positions.stop:
                yield index, begin - first, end - begin

    def _end_layer(self, layer: int) -> None:
        self._release()
        if (layer + 1) * self._part.layerwise.num_chunks < self._part.end_layer_chunk:
            self._fill(layer + 1)

    def _release(self) -> None:
        for index in self._on_host(range(self._num_blocks(self._part.layerwise.end))):
            self._engine.release_buffer(index)

    # ---- blocks

    @property
    def _block_size(self) -> int:
        return self._engine.layout.block_size

    def _num_blocks(self, tokens: int) -> int:
        return -(-tokens // self._block_size)

    def _first_block(self, chunk: SequenceMetadata, window: int | None) -> int:
        return first_visible_block(chunk.context_len, window, self._block_size)

    def _is_on_host(self, index: int) -> bool:
        return self._block_table[index] >= self._engine.split.resident_blocks

    def _on_host(self, indices: range) -> Iterator[int]:
        return filter(self._is_on_host, indices)

    def _host_block(self, index: int) -> int:
        return self._block_table[index] - self._engine.split.resident_blocks

    def _block(self, layer: int, index: int) -> Tensor:
        """One layer of a block, `[2, kv_heads, block_size, head_dim]`, ready for compute."""
        if self._is_on_host(index):
            return self._engine.buffered(index)
        return self._engine.resident[layer, self._block_table[index]]

    def _groups(self, chunk: SequenceMetadata, window: int | None) -> list[tuple[bool, AttentionMetadata]]:
        """What the chunk attends to: consecutive blocks in the same pool, as (in the layer buffer, metadata)."""
        key = chunk.context_len, window
        if key not in self._tables:
            visible = range(self._first_block(chunk, window), self._num_blocks(chunk.total_len))
            groups = [(in_buffer, list(indices)) for in_buffer, indices in groupby(visible, self._is_on_host)]
            self._tables[key] = [(in_buffer, self._table(chunk, indices, in_buffer)) for in_buffer, indices in groups]
        return self._tables[key]

    def _table(self, chunk: SequenceMetadata, indices: list[int], in_buffer: bool) -> AttentionMetadata:
        segment = SequenceMetadata(
            query_start=chunk.query_start,
            query_len=chunk.query_len,
            context_len=chunk.context_len,
            first_position=indices[0] * self._block_size,
            kv_end=min(chunk.total_len, (indices[-1] + 1) * self._block_size),
            block_table=indices if in_buffer else [self._block_table[index] for index in indices],
        )
        return AttentionMetadata([segment])
