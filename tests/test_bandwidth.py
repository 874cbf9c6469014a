"""Bandwidths are measured when an engine starts: on real copies and kernels, in little time, of as much as there is."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch
from cpu_attention_helpers import DeviceOfItsOwn

from nanovllm.device import PitchedCopy
from nanovllm.features.cpu_attention.bandwidth import measure_bandwidths
from nanovllm.kvcache.base import AttentionGeometry
from nanovllm.kvcache.offload_engine import OffloadEngine
from nanovllm.memory.budget import DeviceSplit
from nanovllm.memory.layout import KVLayout
from nanovllm.ops import select_cpu_backend

LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=32, block_size=64, itemsize=2)
GEOMETRY = AttentionGeometry(scale=1.0, num_heads=4, dtype=torch.bfloat16)


@pytest.fixture
def engine() -> Iterator[OffloadEngine]:
    device = DeviceOfItsOwn()
    yield OffloadEngine(device, LAYOUT, torch.bfloat16, DeviceSplit(4, 2), num_host_blocks=8)
    device.close()


def test_all_rates_are_measured(engine: OffloadEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[PitchedCopy] = []
    copy_2d = engine.device.copy_2d
    monkeypatch.setattr(engine.device, "copy_2d", lambda copy, stream: (copied.append(copy), copy_2d(copy, stream)))
    backend = select_cpu_backend(LAYOUT.head_dim)
    start = time.perf_counter()
    rates = measure_bandwidths(engine, GEOMETRY, backend, backend)
    elapsed = time.perf_counter() - start
    most = sum(copy.width for copy in copied if copy.width == LAYOUT.block_layer_bytes)
    assert most == 4 * 16 * LAYOUT.block_layer_bytes, "sixteen layers of blocks are all that the host pool holds"
    assert all(16 * LAYOUT.block_layer_bytes / elapsed < rate < 1e13 for rate in (rates.link, rates.host, rates.device))
    assert rates.round_trip > 0 and not rates.one_processor
