"""Bandwidths are measured when an engine starts: on real copies and kernels, in little time, of as much as there is."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from cpu_attention_helpers import DeviceOfItsOwn
from ordering_check import OrderingCheck

from nanovllm.device import PitchedCopy
from nanovllm.features.cpu_attention.bandwidth import measure_bandwidths
from nanovllm.kvcache.base import AttentionGeometry
from nanovllm.kvcache.offload_engine import OffloadEngine
from nanovllm.memory.budget import DeviceSplit
from nanovllm.memory.layout import KVLayout
from nanovllm.ops import select_cpu_backend, timing
from nanovllm.ops.attention import AttentionMetadata

LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=32, block_size=64, itemsize=2)
GEOMETRY = AttentionGeometry(scale=1.0, num_heads=4, dtype=torch.bfloat16)


@pytest.fixture
def engine() -> Iterator[OffloadEngine]:
    device = OrderingCheck(DeviceOfItsOwn())
    engine = OffloadEngine(device, LAYOUT, torch.bfloat16, DeviceSplit(4, 2), num_host_blocks=8)
    engine.order.add_cpu_attention_stream()
    yield engine
    device.close()


def test_all_rates_are_measured(engine: OffloadEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the engine's own memory and streams, by loads of all that the host pool holds."""
    copied: list[PitchedCopy] = []
    copy_2d = engine.device.copy_2d
    monkeypatch.setattr(engine.device, "copy_2d", lambda copy, stream: (copied.append(copy), copy_2d(copy, stream)))
    for name in ("empty", "empty_host", "new_stream", "new_call_stream"):
        monkeypatch.setattr(engine.device, name, lambda *given: pytest.fail(str(given)))
    backend = select_cpu_backend(LAYOUT.head_dim)
    start = time.perf_counter()
    rates = measure_bandwidths(engine, GEOMETRY, backend, backend)
    elapsed = time.perf_counter() - start
    assert sum(copy.width * copy.height for copy in copied) == 4 * engine.host.nbytes, "once to warm up"
    assert all(rate > engine.host.nbytes / elapsed for rate in (rates.link, rates.host, rates.device))
    assert not rates.one_processor


def test_the_launch_of_a_call_is_no_part_of_the_devices_rate(
    engine: OffloadEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes longer than a GPU reads the KV: weights would seem to be read slowly, and the CPU to have no time."""
    now = 0.0
    launch = 1e-4
    rate = 3e12

    class Backend:
        name = "with a clock of its own"

        def attend(self, q: object, pool: object, table: AttentionMetadata, *_: object) -> None:
            nonlocal now
            now += launch + sum(len(seq.block_table) for seq in table.sequences) * LAYOUT.block_layer_bytes / rate

    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: now))
    rates = measure_bandwidths(engine, GEOMETRY, Backend(), Backend())
    assert rates.device == pytest.approx(rate, rel=1e-3)
