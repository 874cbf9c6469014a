"""All shapes, byte sizes and pitches of KV memory, and the tokens in a block where the user names no number.

A block is `[2, kv_heads, block_size, head_dim]` for each of its layers, K before V and heads before tokens. Each layer
of its KV group has a plane in it (`data.kv_groups`). Groups whose layers have other heads view the same planes in their
own shape, with as many tokens as take about the same memory in whole hash blocks.

The device pool is plane-major, so that one layer's pool is one tensor. The host pool is block-major, so that one layer
of one block is contiguous for streaming, and so are all layers of a block. A ring slot holds one layer of one block. In
8 bits a row of head_dim elements ends with its scale (`ops.kv_quantization`), which copies move like any other bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING

from nanovllm.config import EngineConfig
from nanovllm.data.kv_groups import Heads, KVGroups, hash_unit_of, kv_groups
from nanovllm.data.network import Network

if TYPE_CHECKING:
    from torch import Tensor

RESIDENT_BLOCK_SIZE = 256  # fine enough for short requests, coarse enough for the work per block
MOST_OFFLOAD_BLOCK_SIZE = 4096
LINK_COPY_BYTES = 1 << 20  # a copy of that size takes several times as long as issuing it, on any link of today
BLOCKS_OF_LONGEST = 128  # a quarter of a request of 1/32 of the longest length


@dataclass(frozen=True)
class KVLayout:
    """Geometry of the KV cache. Sizes are in bytes, pitches from the start of one row to the start of the next.

    Where heads differ between layers, num_kv_heads, head_dim and block_size are those of the layers with the most bytes
    a token, whose blocks have the fewest tokens.
    """

    num_layers: int  # with K and V of their own
    num_kv_heads: int
    head_dim: int
    block_size: int  # tokens
    itemsize: int  # bytes of one element
    scale_bytes: int = 0  # behind the elements of a row; a multiple of itemsize
    windows: tuple[int | None, ...] = ()  # of each layer, None for full attention; () if all layers have that
    heads: tuple[Heads, ...] = ()  # of each layer, if they differ
    shared: tuple[int, ...] = ()  # as in `KVGroups`

    @classmethod
    def of(
        cls, kv_cache_dtype: str, num_layers: int, num_kv_heads: int, head_dim: int, block_size: int, itemsize: int
    ) -> KVLayout:
        """The layout for an engine argument; itemsize: bytes of one element of the model's dtype."""
        return cls(num_layers, num_kv_heads, head_dim, block_size, itemsize).stored_as(kv_cache_dtype)

    def stored_as(self, kv_cache_dtype: str) -> KVLayout:
        """The layout for an engine argument, of one for elements of the model's dtype."""
        if kv_cache_dtype == "auto":
            return self
        stored = replace(self, itemsize=1, scale_bytes=4)
        return stored.with_heads(self.heads) if self.heads else stored

    def with_heads(self, heads: Sequence[Heads]) -> KVLayout:
        """The layout of layers that have these heads."""
        if len(set(heads)) == 1:
            (num_kv_heads, head_dim) = heads[0]
            heads = ()
        else:
            num_kv_heads, head_dim = max(heads, key=lambda of_layer: (self._bytes_of(of_layer), of_layer))
        return replace(self, num_kv_heads=num_kv_heads, head_dim=head_dim, heads=tuple(heads))

    def with_block_size(self, tokens: int) -> KVLayout:
        """The layout of blocks of `tokens` tokens, where heads differ in the layers with the most bytes a token."""
        return replace(self, block_size=tokens)

    def _bytes_of(self, heads: Heads) -> int:
        """`token_layer_bytes` with other heads."""
        return 2 * heads[0] * (heads[1] * self.itemsize + self.scale_bytes)

    @cached_property
    def groups(self) -> KVGroups:
        windows = self.windows or (None,) * self.num_layers
        return kv_groups(windows, [*map(self._block_size_of, self.heads)] or self.block_size, self.heads, self.shared)

    def _block_size_of(self, heads: Heads) -> int:
        """Tokens in the blocks of layers with other heads: of the multiples of a hash block that nearest in bytes."""
        unit = hash_unit_of(self.block_size)
        return round(self.block_size * self.token_layer_bytes / (self._bytes_of(heads) * unit)) * unit

    @cached_property
    def of_groups(self) -> tuple[KVLayout, ...]:
        """Of each KV group the layout of its layers alone, in blocks that have no other planes."""
        layouts = []
        for group, num_readers in zip(self.groups, self.groups.num_readers, strict=True):
            heads = self.heads[group.layers[0]] if self.heads else (self.num_kv_heads, self.head_dim)
            sizes = {"num_kv_heads": heads[0], "head_dim": heads[1], "block_size": group.block_size}
            shared = (0,) * (num_readers - len(group.layers))
            layouts.append(replace(self, num_layers=len(group.layers), windows=(), heads=(), shared=shared, **sizes))
        return tuple(layouts)

    @property
    def num_readers(self) -> int:
        """Layers that attend to K and V, their own or those of another layer."""
        return self.num_layers + len(self.shared)

    def views(self, memory: Tensor) -> list[Tensor]:
        """Memory of blocks or slots `[..., *block_shape]` in the shape of each KV group's blocks.

        Blocks are contiguous; between them may be memory that a group does not use.
        """
        if not self.heads:
            return [memory] * len(self.groups)
        planes = memory.flatten(-4)
        shapes = [layout.block_shape for layout in self.of_groups]
        return [planes[..., : prod(shape)].unflatten(-1, shape) for shape in shapes]

    @property
    def head_dims(self) -> tuple[int, ...]:
        """The sizes of heads, each once, the largest first."""
        return tuple(sorted({head_dim for _, head_dim in self.heads} or {self.head_dim}, reverse=True))

    @property
    def planes(self) -> int:
        """Layers of a block."""
        return self.groups.planes

    def held_bytes(self, tokens: int, chunk: int | None) -> int:
        """The most K and V that a sequence of `tokens` tokens keeps at once; chunk: most tokens of it in a step."""
        groups = zip(self.groups, self.of_groups, strict=True)
        return sum(layout.token_bytes * group.most_tokens(tokens, chunk) for group, layout in groups)

    @property
    def row_bytes(self) -> int:
        """K or V of one token and one KV head."""
        return self.head_dim * self.itemsize + self.scale_bytes

    @property
    def rows_per_token(self) -> int:
        """Rows of one token in one layer: K and V of every KV head."""
        return 2 * self.num_kv_heads

    @property
    def token_layer_bytes(self) -> int:
        """K and V of one token in one layer."""
        return self.rows_per_token * self.row_bytes

    @property
    def token_bytes(self) -> int:
        """K and V of one token over all layers."""
        return sum(map(self._bytes_of, self.heads)) if self.heads else self.num_layers * self.token_layer_bytes

    @property
    def head_pitch(self) -> int:
        """Bytes from one head's rows to the next head's within a block."""
        return self.block_size * self.row_bytes

    @cached_property
    def block_layer_bytes(self) -> int:
        """One layer of one block: what a ring slot holds. Where heads differ, of the KV group that needs the most."""
        return max(
            (self._block_size_of(heads) * self._bytes_of(heads) for heads in self.heads),
            default=self.block_size * self.token_layer_bytes,
        )

    @property
    def block_bytes(self) -> int:
        """One block over all its planes."""
        return self.planes * self.block_layer_bytes

    @property
    def block_shape(self) -> tuple[int, int, int, int]:
        """Of one layer. Where heads differ, blocks are only seen through `views`."""
        if self.heads:
            return (2, 1, 1, self.block_layer_bytes // 2 // self.itemsize)
        return (2, self.num_kv_heads, self.block_size, self.row_bytes // self.itemsize)

    def device_pool_shape(self, num_blocks: int) -> tuple[int, ...]:
        return (self.planes, num_blocks, *self.block_shape)

    def host_pool_shape(self, num_blocks: int) -> tuple[int, ...]:
        return (num_blocks, self.planes, *self.block_shape)

    def ring_shape(self, num_slots: int) -> tuple[int, ...]:
        return (num_slots, *self.block_shape)


def layout_of(config: EngineConfig, network: Network) -> KVLayout:
    """The layout of the engine's KV cache, on the tensor-parallel rank with the most KV heads; see `of_rank`."""
    layout = kv_layout(network, config.kv_cache_dtype)
    return layout.with_block_size(block_size_of(config, layout.token_layer_bytes, network.max_model_len))


def kv_layout(network: Network, kv_cache_dtype: str) -> KVLayout:
    """The layout of a network's K and V, in blocks of a token; see `KVLayout.with_block_size`."""
    layout = KVLayout.of(kv_cache_dtype, network.num_kv_layers, *network.kv_heads[0], 1, network.itemsize)
    return replace(layout, windows=network.kv_windows, shared=network.kv_shared).with_heads(network.kv_heads)


def of_rank(layout: KVLayout, network: Network) -> KVLayout:
    """The layout on the rank whose part of the network this is."""
    if layout.heads:  # heads of several sizes are divided evenly
        return layout
    return replace(layout, num_kv_heads=network.own_kv_heads[0][0])


def block_size_of(config: EngineConfig, token_layer_bytes: int, model_max_len: int) -> int:
    """Tokens in a KV block.

    token_layer_bytes: K and V of one token in one layer; model_max_len: the positions of the model.

    Without offload 256. With offload the smallest power of two whose layer has LINK_COPY_BYTES, since host blocks that
    are not neighbours are copied one layer of a block at a time. A request wastes less than a block, so blocks have at
    most 1/128 of the longest length: a request of 1/32 of it wastes less than a quarter of its memory. At least 256,
    with which requests of 1024 tokens waste as little.

        size = max(256, min(4096, LINK_COPY_BYTES / token_layer_bytes, max_model_len / 128))
    """
    if config.kvcache_block_size is not None:
        return config.kvcache_block_size
    if not config.enable_cpu_offload:
        return RESIDENT_BLOCK_SIZE
    longest = config.max_model_len or model_max_len
    for_link = 1 << (-(-LINK_COPY_BYTES // token_layer_bytes) - 1).bit_length()
    for_length = 1 << max(longest // BLOCKS_OF_LONGEST, 1).bit_length() - 1
    return max(RESIDENT_BLOCK_SIZE, min(MOST_OFFLOAD_BLOCK_SIZE, for_link, for_length))
