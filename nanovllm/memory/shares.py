"""What `kv_cache_memory_bytes` means for a model: the bytes of a share, and blocks of which several fit."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import NamedTuple

from nanovllm.config import MIN_BLOCK_SIZE, EngineConfig
from nanovllm.data.network import Network
from nanovllm.memory.layout import KVLayout, layout_of
from nanovllm.memory.sizing import fewest_blocks

RESIDENT_BLOCKS = 8  # that a device of a named size holds besides the fewest, if smaller blocks can reach that

logger = logging.getLogger(__name__)


class KVWish(NamedTuple):
    """Bytes of the device that the KV cache can use."""

    asked: int | None  # that `kv_cache_memory_bytes` stands for
    longest: int  # of the longest sequence


def kv_wish(config: EngineConfig, network: Network) -> KVWish:
    """What the arguments say of the KV cache of this rank, before its memory is known."""
    layout = layout_of(config, network)
    asked = config.kv_share
    longest = config.max_model_len or network.max_model_len
    if asked is None:
        return KVWish(config.num_bytes("kv_cache_memory_bytes"), layout.held_bytes(longest, config.chunk))
    shared = layout.held_bytes(asked.tokens or longest, config.chunk)
    return KVWish(int(shared * asked.part), shared)


def with_device_bytes(config: EngineConfig, network: Network) -> EngineConfig:
    """The configuration with a number of bytes for a share, and a block size that suits the bytes of the device.

    Other configurations are returned as they are. A share is of the most K and V that a sequence keeps at once, and at
    least the ring. network: of this rank.
    """
    asked = config.kv_share
    given = config.num_bytes("kv_cache_memory_bytes")
    if asked is None and given is None:
        return config
    layout = layout_of(config, network)
    tokens = 0
    needed = 0
    if asked is not None:
        tokens = asked.tokens or config.max_model_len or network.max_model_len
        needed = layout.held_bytes(tokens, config.chunk)
        given = int(needed * asked.part)
    assert given is not None
    if config.kvcache_block_size is None:
        layout = _smaller_blocks(config, layout, given)
        config = replace(config, kvcache_block_size=layout.block_size)
    if asked is not None:
        least = fewest_blocks(config, layout) * layout.block_bytes
        says = f"kv_cache_memory_bytes={config.kv_cache_memory_bytes}: {tokens:,} tokens take {_size(needed)}"
        if given < least:
            ring = f"the ring of {fewest_blocks(config, layout)} blocks of {layout.block_size} tokens"
            logger.warning("%s, and the device gets more than the share, %s, for %s", says, _size(least), ring)
        else:
            logger.info("%s, and the device gets %s", says, _size(given))
        config = replace(config, kv_cache_memory_bytes=max(given, least))
    return config


def _smaller_blocks(config: EngineConfig, layout: KVLayout, num_bytes: int) -> KVLayout:
    """The layout with blocks half as large, and again, until the fewest and RESIDENT_BLOCKS fit in `num_bytes`."""
    while layout.block_size >= 2 * MIN_BLOCK_SIZE:
        if (fewest_blocks(config, layout) + RESIDENT_BLOCKS) * layout.block_bytes <= num_bytes:
            break
        layout = layout.with_block_size(layout.block_size // 2)
    return layout


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB" if num_bytes >= 2**20 else f"{num_bytes / 2**10:,.1f} KiB"
