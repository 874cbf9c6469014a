"""The CPU as a device: streams, events and copies keep CUDA's promises."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from waiting import PATIENCE, eventually

from nanovllm.device import PitchedCopy, Stream
from nanovllm.device.cpu import CpuDevice, WorkerStream
from nanovllm.errors import EngineError


class Gate:
    """Holds a stream up until it is opened."""

    def __init__(self, stream: Stream) -> None:
        assert isinstance(stream, WorkerStream)
        self._opened = threading.Event()
        stream.put(lambda: self._opened.wait(PATIENCE) and None)

    def open(self) -> None:
        self._opened.set()


def filled(value: int, size: int = 64) -> Tensor:
    return torch.full((size,), value, dtype=torch.uint8)


def copy(device: CpuDevice, dst: Tensor, src: Tensor, stream: Stream) -> None:
    device.copy_2d(PitchedCopy(dst, src, src.numel(), src.numel(), src.numel(), 1, "h2d"), stream)


def fail(device: CpuDevice, stream: Stream) -> None:
    """A copy that would run past the end of its source."""
    device.copy_2d(PitchedCopy(filled(0), filled(0, 8), 64, 64, 64, 1, "h2d"), stream)


def happens(stream: Stream) -> threading.Event:
    """Set when the stream gets to what is put on it now."""
    assert isinstance(stream, WorkerStream)
    reached = threading.Event()
    stream.put(reached.set)
    return reached


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    with_streams = CpuDevice()
    yield with_streams
    with_streams.close()


# ---- events


def test_a_wait_orders_two_streams(device: CpuDevice) -> None:
    first = device.new_stream("first")
    second = device.new_stream("second")
    gate = Gate(first)
    event = device.new_event()
    middle = filled(0)
    end = filled(0)
    copy(device, middle, filled(5), first)
    first.record(event)
    second.wait(event)
    copy(device, end, middle, second)
    reached = happens(second)
    assert not reached.wait(0.05)
    gate.open()
    second.synchronize()
    assert int(end[0]) == 5


def test_a_wait_takes_the_record_at_the_time_of_the_call(device: CpuDevice) -> None:
    held = device.new_stream("held")
    stream = device.new_stream("s")
    event = device.new_event()
    gate = Gate(held)
    held.record(event)
    stream.wait(event)
    device.compute_stream.record(event)  # has happened, but the wait stands for the earlier record
    reached = happens(stream)
    assert not reached.wait(0.05)
    gate.open()
    assert reached.wait(PATIENCE)


def test_the_host_waits_for_a_stream_and_a_stream_for_the_host(device: CpuDevice) -> None:
    stream = device.new_stream("s")
    event = device.new_event()
    gate = Gate(stream)
    dst = filled(0)
    copy(device, dst, filled(3), stream)
    stream.record(event)
    timer = threading.Timer(0.02, gate.open)
    timer.start()
    device.compute_stream.wait(event)
    assert int(dst[0]) == 3

    computed = device.new_event()
    dst.fill_(9)
    device.compute_stream.record(computed)
    stream.wait(computed)
    out = filled(0)
    copy(device, out, dst, stream)
    stream.synchronize()
    assert int(out[0]) == 9
    timer.join()


# ---- failures


def test_a_failure_spreads_to_the_streams_that_wait_for_it(device: CpuDevice) -> None:
    first, second, bystander = (device.new_stream(name) for name in ("first", "second", "bystander"))
    event = device.new_event()
    dst = filled(0)
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


# ---- the end


def test_close_ends_the_threads_soon_and_can_be_repeated() -> None:
    device = CpuDevice()
    used = device.new_stream("used")
    unused = device.new_stream("unused")
    src = filled(1)
    dst = filled(0)
    event = device.new_event()
    gate = Gate(used)
    copy(device, dst, src, used)
    used.record(event)
    closing = threading.Thread(target=device.close)
    closing.start()
    assert eventually(lambda: used._closed)
    gate.open()
    closing.join()
    device.close()
    assert device.link_busy().num_bytes == 0, "what had not begun is dropped"
    assert not any(thread.name in ("used", "unused") for thread in threading.enumerate())
    device.compute_stream.wait(event)  # no stream waits for ever for work that was dropped
    for stream in (used, unused):
        stream.synchronize()
        with pytest.raises(EngineError, match=r"stream (un)?used is closed"):
            copy(device, dst, src, stream)


@pytest.mark.slow
def test_the_interpreter_exits_cleanly_with_copies_under_way() -> None:
    program = """
import torch
from nanovllm.device import PitchedCopy
from nanovllm.device import PitchedCopy, Stream
from nanovllm.device.cpu import CpuDevice, WorkerStream
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
