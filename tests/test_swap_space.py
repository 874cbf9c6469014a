"""How large the swap space is. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nanovllm.config import EngineConfig
from nanovllm.errors import ConfigError
from nanovllm.memory.budget import DeviceSplit
from nanovllm.memory.layerwise import NO_LAYERWISE
from nanovllm.memory.layout import KVLayout
from nanovllm.memory.sizing import KVPlan, MemoryFacts, asked_swap_bytes, plan_swap_space

LAYOUT = KVLayout(num_layers=4, num_kv_heads=8, head_dim=128, block_size=1024, itemsize=2)  # 16 MiB a block
GIB_BLOCKS = 64


def swap_blocks(
    tmp_path: Path, host_gib: float, resident: int, host: int = 0, *, shared: bool = False, **arguments: Any
) -> int:
    config = EngineConfig(model=str(tmp_path), **arguments)
    total = int(host_gib * 2**30)
    memory = MemoryFacts(total, total, total, tiers_share_memory=shared, activation_peak=0)
    plan = KVPlan(resident, host, DeviceSplit(0, resident), 1024, NO_LAYERWISE, working_bytes=0)
    return plan_swap_space(config, LAYOUT, memory, plan)


def test_by_default_4_gib_or_half_of_what_is_left_or_the_size_of_the_cache(tmp_path: Path) -> None:
    assert LAYOUT.block_bytes == 2**30 // GIB_BLOCKS
    assert swap_blocks(tmp_path, 100, resident=1000) == 4 * GIB_BLOCKS
    assert swap_blocks(tmp_path, 4, resident=1000) == 2 * GIB_BLOCKS
    assert swap_blocks(tmp_path, 100, resident=10) == 10
    assert swap_blocks(tmp_path, 100, resident=10, host=5) == 15
    assert swap_blocks(tmp_path, 1, resident=1000, host=GIB_BLOCKS) == 0
    assert swap_blocks(tmp_path, 4, resident=2 * GIB_BLOCKS, shared=True) == GIB_BLOCKS


def test_what_was_asked_for_is_set_aside_or_refused_with_numbers(tmp_path: Path) -> None:
    assert asked_swap_bytes(EngineConfig(model=str(tmp_path), swap_space=1.5)) == 3 * 2**29
    assert asked_swap_bytes(EngineConfig(model=str(tmp_path))) == 0
    assert swap_blocks(tmp_path, 8, resident=1000, swap_space=1.5) == GIB_BLOCKS * 3 // 2
    assert swap_blocks(tmp_path, 8, resident=1000, swap_space=0) == 0
    assert swap_blocks(tmp_path, 100, resident=20, swap_space=50) == 20, "more could never be swapped out"
    with pytest.raises(ConfigError, match=r"swap_space=7: that is 7.00 GiB and .* the host has 6.00 GiB free"):
        swap_blocks(tmp_path, 8, resident=1000, host=2 * GIB_BLOCKS, swap_space=7)
