"""The layout of an engine's KV cache, and the tokens in a block where the user names no number. No torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from nanovllm.config import EngineConfig
from nanovllm.data.layout import KVLayout

RESIDENT_BLOCK_SIZE = 256  # fine enough for short requests, coarse enough for the work per block
MOST_OFFLOAD_BLOCK_SIZE = 4096
LINK_COPY_BYTES = 1 << 20  # a copy of that size takes several times as long as issuing it, on any link of today
BLOCKS_OF_LONGEST = 128  # a quarter of a request of 1/32 of the longest length


class KVHeads(Protocol):
    """What the layout needs of a model's `DecoderSpec`."""

    @property
    def num_layers(self) -> int: ...
    @property
    def most_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def max_model_len(self) -> int: ...


def layout_of(config: EngineConfig, spec: KVHeads, itemsize: int) -> KVLayout:
    """The layout of the engine's KV cache, on the tensor-parallel rank with the most KV heads.

    itemsize: bytes of one element of the model's dtype.
    """
    layout = KVLayout.of(config.kv_cache_dtype, spec.num_layers, spec.most_kv_heads, spec.head_dim, 1, itemsize)
    return replace(layout, block_size=block_size_of(config, layout.token_layer_bytes, spec.max_model_len))


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
