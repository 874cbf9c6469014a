"""All shapes, byte sizes and pitches of KV memory, and the tokens in a block where the user names no number.

A block is `[2, kv_heads, block_size, head_dim]` for each of its layers, K before V and heads before tokens. Each layer
of its KV group has a plane in it (`data.kv_groups`). The device pool is plane-major, so that one layer's pool is one
tensor; the host pool is block-major, so that one layer of one block is contiguous for streaming, and so are all layers
of a block. A ring slot holds one layer of one block. In 8 bits a row of
head_dim elements ends with its scale (`nanovllm.ops.kv_quantization`): copies move it like any other bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from nanovllm.config import EngineConfig
from nanovllm.data.kv_groups import KVGroups, kv_groups
from nanovllm.models.spec import DecoderSpec

RESIDENT_BLOCK_SIZE = 256  # fine enough for short requests, coarse enough for the work per block
MOST_OFFLOAD_BLOCK_SIZE = 4096
LINK_COPY_BYTES = 1 << 20  # a copy of that size takes several times as long as issuing it, on any link of today
BLOCKS_OF_LONGEST = 128  # a quarter of a request of 1/32 of the longest length


@dataclass(frozen=True)
class KVLayout:
    """Geometry of the KV cache. Sizes are in bytes, pitches from the start of one row to the start of the next.

    windows: the sliding window of each layer, None for full attention; () if all layers have that.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    itemsize: int  # bytes of one element
    scale_bytes: int = 0  # behind the elements of a row; a multiple of itemsize
    windows: tuple[int | None, ...] = ()

    @classmethod
    def of(
        cls, kv_cache_dtype: str, num_layers: int, num_kv_heads: int, head_dim: int, block_size: int, itemsize: int
    ) -> KVLayout:
        """The layout for an engine argument; itemsize: bytes of one element of the model's dtype."""
        plain = cls(num_layers, num_kv_heads, head_dim, block_size, itemsize)
        return plain if kv_cache_dtype == "auto" else replace(plain, itemsize=1, scale_bytes=4)

    @cached_property
    def groups(self) -> KVGroups:
        return kv_groups(self.windows or (None,) * self.num_layers, self.block_size)

    @property
    def planes(self) -> int:
        """Layers of a block."""
        return self.groups.planes

    def held_bytes(self, tokens: int, chunk: int | None) -> int:
        """The most K and V that a sequence of `tokens` tokens keeps at once; chunk: most tokens of it in a step."""
        return sum(
            len(group.layers) * self.token_layer_bytes * group.most_tokens(tokens, chunk) for group in self.groups
        )

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
        return self.num_layers * self.token_layer_bytes

    @property
    def head_pitch(self) -> int:
        """Bytes from one head's rows to the next head's within a block."""
        return self.block_size * self.row_bytes

    @property
    def block_layer_bytes(self) -> int:
        """One layer of one block: what a ring slot holds."""
        return self.block_size * self.token_layer_bytes

    @property
    def block_bytes(self) -> int:
        """One block over all its planes."""
        return self.planes * self.block_layer_bytes

    @property
    def block_shape(self) -> tuple[int, int, int, int]:
        return (2, self.num_kv_heads, self.block_size, self.row_bytes // self.itemsize)

    def device_pool_shape(self, num_blocks: int) -> tuple[int, ...]:
        return (self.planes, num_blocks, *self.block_shape)

    def host_pool_shape(self, num_blocks: int) -> tuple[int, ...]:
        return (num_blocks, self.planes, *self.block_shape)

    def ring_shape(self, num_slots: int) -> tuple[int, ...]:
        return (num_slots, *self.block_shape)


def layout_of(config: EngineConfig, spec: DecoderSpec, itemsize: int) -> KVLayout:
    """The layout of the engine's KV cache, on the tensor-parallel rank with the most KV heads.

    itemsize: bytes of one element of the model's dtype.
    """
    layout = KVLayout.of(config.kv_cache_dtype, spec.num_kv_layers, spec.most_kv_heads, spec.head_dim, 1, itemsize)
    block_size = block_size_of(config, layout.token_layer_bytes, spec.max_model_len)
    return replace(layout, block_size=block_size, windows=spec.kv_windows)


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
