"""The KV cache of a layer-by-layer prefill: one layer at a time, all of whose KV is on the device while it runs.

Resident blocks are used in place. For each other block the layer buffer has a block with the same index. When a layer
begins, the tokens that the host holds are loaded into the buffer. Chunks write their K/V into it. A block is written to
the host once, when the last token that the prefill adds to it is written. When all chunks have attended, the buffer is
released for the next layer.

Blocks of the prefill that lie behind a layer's window at its end are in the buffer alone: the sequence has holes there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from torch import Tensor

from nanovllm.data.batch import LayerwiseStep
from nanovllm.data.kv_groups import HOLE
from nanovllm.kvcache.base import AttentionGeometry
from nanovllm.kvcache.offload_engine import BlockTokens, OffloadEngine
from nanovllm.layers.forward_context import ForwardContext
from nanovllm.ops.attention import AttentionBackend, AttentionMetadata, SequenceMetadata
from nanovllm.ops.row_kernels import as_stored, narrow_


class LayerwiseKVCache:
    """Serves one step's part of a prefill at a time: `begin_part`, `attend` for every layer chunk in order, `end_part`.

    A part may end within a layer. The buffer then keeps the blocks of that layer for the next part.
    """

    def __init__(self, engine: OffloadEngine, geometry: AttentionGeometry, backend: AttentionBackend) -> None:
        self._engine = engine
        self._groups = engine.layout.groups
        self._buffers = engine.layout.views(engine.layer_buffer)  # by KV group
        self._geometry = geometry
        self._backend = backend
        self._part: LayerwiseStep
        self._block_tables: Sequence[Sequence[int]] = ()  # of the sequence, in this step
        self._tables: dict[tuple[int, int], list[tuple[bool, AttentionMetadata]]] = {}  # by chunk and KV group
        self._num_acquired = 0  # blocks of the current layer whose loads compute has waited for, or does not use

    def begin_part(self, part: LayerwiseStep, block_tables: Sequence[Sequence[int]]) -> tuple[int, int]:
        """Start the loads, after the step's block moves. Returns the bytes that the part loads and stores.

        block_tables: by KV group, physical ids of the blocks that hold positions [0, end) of the prefill. They may
        differ from those of the part before: a block that has moved to the device since is used there from now on.
        """
        self._part = part
        self._block_tables = block_tables
        self._tables = {}
        layer_chunks = range(part.first_layer_chunk, part.end_layer_chunk)
        if part.first_layer_chunk % part.layerwise.num_chunks == 0:
            self._fill(part.layerwise.layer(part.first_layer_chunk))
        begun = [
            part.layerwise.layer(layer_chunk)
            for layer_chunk in layer_chunks
            if layer_chunk % part.layerwise.num_chunks == 0
        ]
        loaded = sum(use.stored_tokens * self._token_bytes(layer) for layer in begun for _, use in self._uses(layer))
        stored = 0
        for layer_chunk in layer_chunks:
            layer = part.layerwise.layer(layer_chunk)
            positions = part.layerwise.positions(layer_chunk)
            stored += sum(count for _, _, count in self._stores(layer, positions)) * self._token_bytes(layer)
        return loaded, stored

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, ctx: ForwardContext) -> Tensor:
        """See `forward_context.KVCache`. The batch is a single layer chunk."""
        (chunk,) = ctx.sequences
        (group, plane) = self._where(layer)
        state = self._geometry.before_keys(layer, q)
        total_len = chunk.total_len
        block_size = self._groups[group].block_size
        window = self._groups[group].window
        visible = self._visible(chunk, group)
        self._acquire(layer, visible)
        self._write(layer, chunk, as_stored(k, self._engine.ring.dtype), as_stored(v, self._engine.ring.dtype))
        blocks = ((index, self._block(layer, index)) for index in visible)
        held = (block[:, :, : total_len - index * block_size] for index, block in blocks)
        self._engine.device.declare_kernel("attend", reads=held)
        for in_buffer, table in self._block_groups(chunk, group):
            pool = self._buffers[group] if in_buffer else self._engine.resident_of[group][plane]
            self._backend.attend(q, pool, table, state, self._geometry.scale, window)
        self._engine.device.end_kernel()
        if total_len == self._part.layerwise.end:
            self._end_layer(layer)
        return narrow_(q, state.out)

    def end_part(self) -> None:
        """Release the buffer if the part ends within a layer. Call it after the last layer chunk of the part."""
        if self._part.end_layer_chunk % self._part.layerwise.num_chunks:
            self._release(self._part.layerwise.layer(self._part.end_layer_chunk))

    # ---- the layer buffer

    def _fill(self, layer: int) -> None:
        self._num_acquired = 0
        for index, use in self._uses(layer):
            self._engine.fill_buffer(index, layer, use)

    def _acquire(self, layer: int, visible: range) -> None:
        """Let compute wait for the loads of these blocks, each once in a layer: a layer has many chunks."""
        for index in self._in_buffer(layer, range(max(visible.start, self._num_acquired), visible.stop)):
            self._engine.acquire_buffer(index)
        self._num_acquired = visible.stop

    def _uses(self, layer: int) -> Iterator[tuple[int, BlockTokens]]:
        """The blocks that the layer keeps in the buffer, with the tokens to load; none before its window."""
        layerwise = self._part.layerwise
        kv_group = self._where(layer)[0]
        group = self._groups[kv_group]
        table = self._block_tables[kv_group]
        blocks = range(group.first_visible(layerwise.begin), group.num_blocks(layerwise.end))
        for index in self._in_buffer(layer, blocks):
            stored = min(max(layerwise.begin - index * group.block_size, 0), group.block_size)
            yield index, BlockTokens(table[index], stored, 0)

    def _write(self, layer: int, chunk: SequenceMetadata, k: Tensor, v: Tensor) -> None:
        """Write the chunk's K/V into its blocks, and store those that are complete to the host."""
        positions = range(chunk.context_len, chunk.total_len)
        kv_group = self._where(layer)[0]
        size = self._groups[kv_group].block_size
        for index in range(positions.start // size, -(-positions.stop // size)):
            first = index * size
            begin = max(positions.start, first)
            end = min(positions.stop, first + size)
            rows = slice(chunk.query_start + begin - positions.start, chunk.query_start + end - positions.start)
            new = self._block(layer, index)[:, :, begin - first : end - first]
            self._engine.device.declare_kernel("write K/V", writes=(new,))
            new[0] = k[rows].transpose(0, 1)
            new[1] = v[rows].transpose(0, 1)
        for index, first_token, count in self._stores(layer, positions):
            use = BlockTokens(self._block_tables[kv_group][index], first_token, count)
            self._engine.store_buffered(index, layer, use)

    def _stores(self, layer: int, positions: range) -> Iterator[tuple[int, int, int]]:
        """Host blocks that the chunk completes: (index, the prefill's first token in it, its number of tokens)."""
        layerwise = self._part.layerwise
        kv_group = self._where(layer)[0]
        size = self._groups[kv_group].block_size
        table = self._block_tables[kv_group]
        for index in self._in_buffer(layer, range(positions.start // size, -(-positions.stop // size))):
            first = index * size
            begin = max(layerwise.begin, first)
            end = min(layerwise.end, first + size)
            if end <= positions.stop and table[index] != HOLE:
                yield index, begin - first, end - begin

    def _end_layer(self, layer: int) -> None:
        self._release(layer)
        if (layer + 1) * self._part.layerwise.num_chunks < self._part.end_layer_chunk:
            self._fill(layer + 1)

    def _release(self, layer: int) -> None:
        group = self._groups[self._where(layer)[0]]
        for index in self._in_buffer(layer, range(group.num_blocks(self._part.layerwise.end))):
            self._engine.release_buffer(index)

    # ---- where blocks are

    def _token_bytes(self, layer: int) -> int:
        return self._engine.layout.of_groups[self._where(layer)[0]].token_layer_bytes

    def _where(self, layer: int) -> tuple[int, int]:
        """The KV group and the plane of the layer."""
        return self._groups.of_layer[layer]

    def _visible(self, chunk: SequenceMetadata, group: int) -> range:
        """The blocks that some row of the chunk attends to."""
        kv_group = self._groups[group]
        return range(kv_group.first_visible(chunk.context_len), kv_group.num_blocks(chunk.total_len))

    def _is_in_buffer(self, group: int, index: int) -> bool:
        block = self._block_tables[group][index]
        return block == HOLE or block >= self._engine.split.resident_blocks

    def _in_buffer(self, layer: int, indices: range) -> Iterator[int]:
        group = self._where(layer)[0]
        return (index for index in indices if self._is_in_buffer(group, index))

    def _block(self, layer: int, index: int) -> Tensor:
        """One layer of a block, `[2, kv_heads, block_size, head_dim]`."""
        group, plane = self._where(layer)
        if self._is_in_buffer(group, index):
            return self._buffers[group][index]
        return self._engine.resident_of[group][plane, self._block_tables[group][index]]

    def _block_groups(self, chunk: SequenceMetadata, group: int) -> list[tuple[bool, AttentionMetadata]]:
        """The blocks that the chunk attends to, in groups of consecutive ones in the same pool: (in buffer?, table)."""
        key = chunk.context_len, group
        if key not in self._tables:
            block_groups = groupby(self._visible(chunk, group), lambda index: self._is_in_buffer(group, index))
            self._tables[key] = [
                (in_buffer, self._table(chunk, group, list(indices), in_buffer)) for in_buffer, indices in block_groups
            ]
        return self._tables[key]

    def _table(self, chunk: SequenceMetadata, group: int, indices: list[int], in_buffer: bool) -> AttentionMetadata:
        table = self._block_tables[group]
        block_size = self._groups[group].block_size
        metadata = SequenceMetadata(
            query_start=chunk.query_start,
            query_len=chunk.query_len,
            context_len=chunk.context_len,
            first_position=indices[0] * block_size,
            kv_end=min(chunk.total_len, (indices[-1] + 1) * block_size),
            block_table=indices if in_buffer else [table[index] for index in indices],
        )
        return AttentionMetadata([metadata])
