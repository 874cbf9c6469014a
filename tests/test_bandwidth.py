"""Bandwidths are measured when an engine starts: on real copies and kernels, in little time, of as much as there is."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cpu_attention_helpers import DeviceOfItsOwn
from ordering_check import OrderingCheck
from waiting import PATIENCE

from nanovllm.device import CallStream, PitchedCopy, Stream
from nanovllm.features.cpu_attention import bandwidth
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
    copied: list[PitchedCopy] = []
    copy_2d = engine.device.copy_2d
    monkeypatch.setattr(engine.device, "copy_2d", lambda copy, stream: (copied.append(copy), copy_2d(copy, stream)))
    backend = select_cpu_backend(LAYOUT.head_dim)
    start = time.perf_counter()
    rates = measure_bandwidths(engine, GEOMETRY, backend, backend)
    elapsed = time.perf_counter() - start
    num_bytes = sum(copy.width * copy.height for copy in copied)
    assert num_bytes % engine.host.nbytes == 0, "all that the host pool holds, again and again"
    assert num_bytes >= 5 * engine.host.nbytes, "alone, and beside CPU attention"
    found = (rates.link, rates.link_alone or 0, rates.host, rates.device)
    assert all(rate > engine.host.nbytes / elapsed for rate in found)
    assert rates.round_trip > 0 and not rates.one_processor


def test_link_and_cpu_attention_are_measured_at_the_same_time(
    engine: OffloadEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loads end only after CPU attention has gone on beside them."""
    backend = select_cpu_backend(LAYOUT.head_dim)
    beside = threading.Event()
    attended = threading.Event()
    rates_beside = bandwidth.Probe.rates_beside

    def held(probe: Any, loads: int) -> Any:
        beside.set()
        return rates_beside(probe, loads)

    class Watched:
        name = "watched"

        def attend(self, *arguments: Any) -> None:
            backend.attend(*arguments)
            if beside.is_set():
                attended.set()

    copy_2d = engine.device.copy_2d

    def late(copy: PitchedCopy, stream: Any) -> int:
        if beside.is_set() and not attended.is_set():
            stream.inner.put(lambda: attended.wait(PATIENCE))
        return copy_2d(copy, stream)

    monkeypatch.setattr(bandwidth.Probe, "rates_beside", held)
    monkeypatch.setattr(engine.device, "copy_2d", late)
    measure_bandwidths(engine, GEOMETRY, backend, Watched())
    assert attended.is_set()


def test_nothing_is_allocated_and_no_stream_is_made_but_for_the_round_trip(
    engine: OffloadEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocated: list[int] = []
    for name in ("empty", "empty_host"):
        make = getattr(engine.device, name)
        monkeypatch.setattr(
            engine.device, name, lambda *given, make=make: (allocated.append(given[1][0]), make(*given))[1]
        )
    for name in ("new_stream", "new_call_stream"):
        monkeypatch.setattr(engine.device, name, lambda name: pytest.fail(name))
    backend = select_cpu_backend(LAYOUT.head_dim)
    measure_bandwidths(engine, GEOMETRY, backend, backend)
    assert allocated == [4096, 4096]


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


def test_the_round_trip_is_measured_while_the_ring_is_loaded(
    engine: OffloadEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loads of whole groups are on their way when the queries are written, and nothing small is copied."""
    submitted: list[tuple[int, int]] = []
    copy_2d = engine.device.copy_2d
    launches: list[int] = []
    call = engine.order.before_cpu_attention_call

    def watched(copy: PitchedCopy, stream: Stream) -> int:
        submitted.append((copy.dst.data_ptr() - engine.ring.data_ptr(), copy.width * copy.height))
        return copy_2d(copy, stream)

    def called() -> CallStream:
        launches.append(len(submitted))
        return call()

    monkeypatch.setattr(engine.device, "copy_2d", watched)
    monkeypatch.setattr(engine.order, "before_cpu_attention_call", called)
    backend = select_cpu_backend(LAYOUT.head_dim)
    measure_bandwidths(engine, GEOMETRY, backend, backend)
    block = LAYOUT.block_layer_bytes
    slots = engine.split.ring_slots
    group = engine.group_slots
    firsts = range(0, slots, group)
    loads = [(firsts[number % len(firsts)] * block, group * block) for number in range(8 * LAYOUT.planes // group)]
    assert len(launches) == 4
    assert all(submitted[end - len(loads) : end] == loads for end in launches)
