"""The block size where none is named. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nanovllm.config import engine_config
from nanovllm.memory.layout import LINK_COPY_BYTES, block_size_of

KIB = 1 << 10


def picked(token_layer_bytes: int, model_max_len: int, **arguments: Any) -> int:
    config = engine_config(Path(__file__).parent, {"enable_cpu_offload": True, **arguments})
    return block_size_of(config, token_layer_bytes, model_max_len)


@pytest.mark.parametrize(
    ("token_layer_bytes", "max_len", "expected"),
    [
        (4 * KIB, 131_072, 256),  # Llama 3.1 8B, and all Qwen3: one layer of 256 tokens is 1 MiB
        (16 * KIB, 4_096, 256),  # Llama 2 7B: never below 256
        (2 * KIB, 1_010_000, 512),  # Qwen2.5 7B 1M: the link decides
        (512, 32_768, 256),  # Qwen2.5 0.5B: the length decides
        (512, 131_072, 1024),
        (512, 1 << 20, 2048),
        (64, 1 << 30, 4096),
        (64, 1, 256),
    ],
)
def test_the_link_and_the_lengths_decide(token_layer_bytes: int, max_len: int, expected: int) -> None:
    assert picked(token_layer_bytes, max_len) == expected


def test_max_model_len_counts_where_it_is_named() -> None:
    assert picked(512, 1 << 20, max_model_len=32_768) == 256


def test_a_named_size_is_taken_and_without_offload_it_is_256() -> None:
    assert picked(512, 1 << 20, kvcache_block_size=48) == 48
    assert picked(512, 1 << 20, enable_cpu_offload=False) == 256
    assert picked(512, 1 << 20, enable_cpu_offload=False, kvcache_block_size=48) == 48


@pytest.mark.parametrize("token_layer_bytes", [64, 512, 768, 1024, 2048, 3000, 4096, 16384])
@pytest.mark.parametrize("max_len", [1024, 8192, 32_768, 40_960, 131_072, 1 << 20])
def test_short_requests_waste_a_quarter_at_most_and_copies_are_large(token_layer_bytes: int, max_len: int) -> None:
    size = picked(token_layer_bytes, max_len)
    for length in range(max(1024, max_len // 32), max(1024, max_len // 32) + 2 * size + 1):
        held = -(-length // size) * size
        assert held - length <= held / 4
    longer_blocks_are_copied_as_well = size * token_layer_bytes >= LINK_COPY_BYTES
    assert longer_blocks_are_copied_as_well or 2 * size > max_len // 128 or size == 4096
