"""All shapes, byte sizes and pitches of KV memory.

A block is `[2, kv_heads, block_size, head_dim]` for each layer, K before V and heads before tokens. The device pool is
layer-major, so that one layer's pool is one tensor; the host pool is block-major, so that one layer of one block is
contiguous for streaming, and so are all layers of a block. A ring slot holds one layer of one block. In 8 bits a row of
head_dim elements ends with its scale (`nanovllm.ops.kv_quantization`): copies move it like any other bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Geometry of the KV cache. Sizes are in bytes, pitches from the start of one row to the start of the next."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    itemsize: int  # bytes of one element
    scale_bytes: int = 0  # behind the elements of a row; a multiple of itemsize

    @classmethod
    def of(
        cls, kv_cache_dtype: str, num_layers: int, num_kv_heads: int, head_dim: int, block_size: int, itemsize: int
    ) -> KVLayout:
        """The layout for an engine argument; itemsize: bytes of one element of the model's dtype."""
        plain = cls(num_layers, num_kv_heads, head_dim, block_size, itemsize)
        return plain if kv_cache_dtype == "auto" else replace(plain, itemsize=1, scale_bytes=4)

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
        """One block over all layers."""
        return self.num_layers * self.block_layer_bytes

    @property
    def block_shape(self) -> tuple[int, int, int, int]:
        return (2, self.num_kv_heads, self.block_size, self.row_bytes // self.itemsize)

    def device_pool_shape(self, num_blocks: int) -> tuple[int, ...]:
        return (self.num_layers, num_blocks, *self.block_shape)

    def host_pool_shape(self, num_blocks: int) -> tuple[int, ...]:
        return (num_blocks, self.num_layers, *self.block_shape)

    def ring_shape(self, num_slots: int) -> tuple[int, ...]:
        return (num_slots, *self.block_shape)
