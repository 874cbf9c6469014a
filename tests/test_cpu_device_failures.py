"""What fails on the CPU device's streams reaches the waiting stream, and streams end however their device does."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from cpu_streams import copy, fail, filled, happens
from waiting import PATIENCE, eventually

from nanovllm.device.cpu import CpuDevice
from nanovllm.errors import EngineError


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    with_streams = CpuDevice()
    yield with_streams
    with_streams.close()


def test_a_failed_copy_shows_at_synchronize_once_and_the_stream_works_on(device: CpuDevice) -> None:
    stream, dst = device.new_stream("kv-slot-2"), filled(0)
    fail(device, stream)
    copy(device, dst, filled(1), stream)
    with pytest.raises(EngineError, match=r"work on stream kv-slot-2 failed.*past the end of src"):
        stream.synchronize()
    assert int(dst[0]) == 0, "what comes after a failure is not copied"
    stream.synchronize()
    copy(device, dst, filled(1), stream)
    stream.synchronize()
    assert int(dst[0]) == 1


def test_a_failed_copy_shows_where_the_host_waits_for_it(device: CpuDevice) -> None:
    stream, before, after = device.new_stream("s"), device.new_event(), device.new_event()
    stream.record(before)
    fail(device, stream)
    stream.record(after)
    device.compute_stream.wait(before)
    for _ in range(2):
        with pytest.raises(EngineError, match="past the end of src"):
            device.compute_stream.wait(after)
    with pytest.raises(EngineError):
        stream.synchronize()
    stream.record(after)
    device.compute_stream.wait(after)


def test_a_failure_spreads_to_the_streams_that_wait_for_it(device: CpuDevice) -> None:
    first, second, bystander = (device.new_stream(name) for name in ("first", "second", "bystander"))
    event, dst = device.new_event(), filled(0)
    fail(device, first)
    first.record(event)
    second.wait(event)
    copy(device, dst, filled(1), second)
    for stream in (first, second):
        with pytest.raises(EngineError, match="stream first failed"):
            stream.synchronize()
    bystander.synchronize()
    assert int(dst[0]) == 0, "it would have read what never arrived"
    copy(device, dst, filled(1), second)
    second.synchronize()
    assert int(dst[0]) == 1


def test_copies_never_run_on_the_compute_stream(device: CpuDevice) -> None:
    with pytest.raises(AssertionError, match="never on the compute stream"):
        copy(device, filled(0), filled(1), device.compute_stream)


# ---- the end


def test_close_ends_the_threads_soon_and_can_be_repeated() -> None:
    device = CpuDevice()
    used, unused = device.new_stream("used"), device.new_stream("unused")
    src, dst, event = filled(1, 1 << 26), filled(0, 1 << 26), device.new_event()
    for _ in range(2000):
        copy(device, dst, src, used)
    used.record(event)
    start = time.monotonic()
    device.close()
    device.close()
    assert time.monotonic() - start < 5, "what had not begun is dropped"
    assert not any(thread.name in ("used", "unused") for thread in threading.enumerate())
    device.compute_stream.wait(event)  # no stream waits for ever for work that was dropped
    for stream in (used, unused):
        stream.synchronize()
        with pytest.raises(EngineError, match=r"stream (un)?used is closed"):
            copy(device, dst, src, stream)


def test_a_device_that_is_dropped_ends_its_threads() -> None:
    device = CpuDevice()
    happens(device.new_stream("dropped")).wait(PATIENCE)
    assert any(thread.name == "dropped" for thread in threading.enumerate())
    del device
    assert eventually(lambda: not any(thread.name == "dropped" for thread in threading.enumerate()))


def test_an_event_of_a_closed_stream_is_not_waited_for_in_vain() -> None:
    device = CpuDevice()
    stream, event = device.new_stream("s"), device.new_event()
    stream.record(event)
    device.close()
    with pytest.raises(EngineError, match="closed"):
        stream.record(event)
    waiter = threading.Thread(target=device.compute_stream.wait, args=(event,), daemon=True)
    waiter.start()
    waiter.join(PATIENCE)
    assert not waiter.is_alive()


def test_the_interpreter_exits_cleanly_with_copies_under_way() -> None:
    program = """
import torch
from nanovllm.device import PitchedCopy
from nanovllm.device.cpu import CpuDevice
device = CpuDevice()
src, dst = torch.zeros(1 << 20, dtype=torch.uint8), torch.zeros(1 << 20, dtype=torch.uint8)
for name in "ab":
    stream = device.new_stream(name)
    for _ in range(2000):
        device.copy_2d(PitchedCopy(dst, src, 1 << 20, 1 << 20, 1 << 20, 1, "h2d"), stream)
    stream.record(device.new_event())
print("leaving")
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert (result.returncode, result.stdout, result.stderr) == (0, "leaving\n", "")
