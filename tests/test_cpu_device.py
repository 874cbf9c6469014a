"""The CPU as a device: streams, events and copies keep CUDA's promises."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from cpu_streams import Gate, copy, filled, happens
from host_tasks import PythonTask
from waiting import PATIENCE

from nanovllm.device import Busy, BusyMeter, PitchedCopy, create_device
from nanovllm.device.cpu import CpuDevice, WorkerStream
from nanovllm.errors import ConfigError, EngineError


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    with_streams = CpuDevice()
    yield with_streams
    with_streams.close()


# ---- streams and copies


def test_work_on_one_stream_runs_in_order(device: CpuDevice) -> None:
    stream = device.new_stream("s")
    buffers = [filled(value) for value in range(30)]
    for _ in range(20):
        for dst, src in zip(buffers[1:], buffers, strict=False):
            copy(device, dst, src, stream)
    stream.synchronize()
    assert all(int(buffer[0]) == 0 for buffer in buffers), "each buffer was filled from the one before"


def test_a_strided_copy_touches_its_rows_only(device: CpuDevice) -> None:
    stream = device.new_stream("s")
    dst, src = filled(0), torch.arange(64, dtype=torch.uint8)
    device.copy_2d(PitchedCopy(dst[3:], src[5:], 10, 8, 4, 5, "d2h"), stream)
    stream.synchronize()
    expected = filled(0)
    for row in range(5):
        expected[3 + 10 * row :][:4] = src[5 + 8 * row :][:4]
    assert torch.equal(dst, expected)


def test_copies_run_alongside_the_host_on_a_thread_of_their_own(device: CpuDevice) -> None:
    stream = device.new_stream("kv-slot-7")
    gate = Gate(stream)
    dst = filled(0)
    copy(device, dst, filled(1), stream)
    threads: list[str] = []
    assert isinstance(stream, WorkerStream)
    stream.put(lambda: threads.append(threading.current_thread().name))
    assert int(dst[0]) == 0, "the call came back before the copy ran"
    gate.open()
    stream.synchronize()
    assert int(dst[0]) == 1
    assert threads == ["kv-slot-7"] != [threading.current_thread().name]


def test_the_host_runs_while_bytes_are_copied(device: CpuDevice) -> None:
    """The copy releases the GIL: Python counts on, hundreds of times within one long copy."""
    stream = device.new_stream("s")
    big = torch.zeros(1 << 28, dtype=torch.uint8)
    done = device.new_event()
    copy(device, torch.empty_like(big), big, stream)
    stream.record(done)
    counted = 0
    while not done.reached.done():  # type: ignore[attr-defined]
        counted += 1
    assert counted > 100


def test_streams_do_not_wait_for_each_other(device: CpuDevice) -> None:
    held, free = device.new_stream("held"), device.new_stream("free")
    gate = Gate(held)
    a, b = filled(0), filled(0)
    copy(device, a, filled(1), held)
    copy(device, b, filled(1), free)
    free.synchronize()
    assert (int(a[0]), int(b[0])) == (0, 1)
    gate.open()
    held.synchronize()
    assert int(a[0]) == 1


def test_an_unused_stream_is_synchronized_at_once(device: CpuDevice) -> None:
    device.new_stream("s").synchronize()
    device.compute_stream.synchronize()


# ---- events


def test_a_wait_orders_two_streams(device: CpuDevice) -> None:
    first, second = device.new_stream("first"), device.new_stream("second")
    gate, event = Gate(first), device.new_event()
    middle, end = filled(0), filled(0)
    copy(device, middle, filled(5), first)
    first.record(event)
    second.wait(event)
    copy(device, end, middle, second)
    reached = happens(second)
    assert not reached.wait(0.05)
    gate.open()
    second.synchronize()
    assert int(end[0]) == 5


def test_an_event_that_was_never_recorded_does_not_block(device: CpuDevice) -> None:
    held, stream, event = device.new_stream("held"), device.new_stream("s"), device.new_event()
    gate = Gate(held)
    stream.wait(event)
    device.compute_stream.wait(event)
    held.record(event)  # too late for the waits above
    assert happens(stream).wait(PATIENCE)
    gate.open()


def test_a_wait_takes_the_record_at_the_time_of_the_call(device: CpuDevice) -> None:
    held, stream, event = device.new_stream("held"), device.new_stream("s"), device.new_event()
    gate = Gate(held)
    held.record(event)
    stream.wait(event)
    device.compute_stream.record(event)  # has happened, but the wait stands for the earlier record
    reached = happens(stream)
    assert not reached.wait(0.05)
    gate.open()
    assert reached.wait(PATIENCE)


def test_a_wait_after_a_second_record_waits_for_that_one_only(device: CpuDevice) -> None:
    held, other, stream = (device.new_stream(name) for name in ("held", "other", "s"))
    gate, event = Gate(held), device.new_event()
    held.record(event)
    other.record(event)
    stream.wait(event)
    assert happens(stream).wait(PATIENCE), "the first record is still held up"
    gate.open()


def test_an_event_can_be_recorded_again_and_again(device: CpuDevice) -> None:
    writer, reader = device.new_stream("writer"), device.new_stream("reader")
    written, read = device.new_event(), device.new_event()
    slot, seen = filled(0), [filled(0) for _ in range(200)]
    for value, into in enumerate(seen):
        writer.wait(read)
        copy(device, slot, filled(value % 251), writer)
        writer.record(written)
        reader.wait(written)
        copy(device, into, slot, reader)
        reader.record(read)
    reader.synchronize()
    assert [int(tensor[0]) for tensor in seen] == [value % 251 for value in range(200)]


def test_the_host_waits_for_a_stream_and_a_stream_for_the_host(device: CpuDevice) -> None:
    stream, event = device.new_stream("s"), device.new_event()
    gate, dst = Gate(stream), filled(0)
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


# ---- calls


def test_calls_run_in_order_on_a_thread_of_their_own(device: CpuDevice) -> None:
    calls, gate_stream, event = device.new_call_stream("calls"), device.new_stream("s"), device.new_event()
    gate, dst = Gate(gate_stream), filled(0)
    copy(device, dst, filled(7), gate_stream)
    gate_stream.record(event)
    calls.wait(event)
    seen: list[tuple[str, int]] = []
    for _ in range(2):
        calls.launch(PythonTask(lambda: seen.append((threading.current_thread().name, int(dst[0])))))
    assert not seen
    gate.open()
    calls.synchronize()
    assert seen == [("calls", 7)] * 2


def test_a_failed_call_reaches_the_waiting_stream_and_skips_what_follows(device: CpuDevice) -> None:
    calls, stream, event = device.new_call_stream("calls"), device.new_stream("s"), device.new_event()
    ran: list[int] = []

    def broken() -> None:
        raise OSError("no such bank")

    calls.launch(PythonTask(broken))
    calls.launch(PythonTask(lambda: ran.append(1)))
    calls.record(event)
    stream.wait(event)
    dst = filled(0)
    copy(device, dst, filled(1), stream)
    for waiting in (stream, calls):
        with pytest.raises(EngineError, match="work on stream calls failed: no such bank"):
            waiting.synchronize()
    assert (ran, int(dst[0])) == ([], 0)
    calls.launch(PythonTask(lambda: ran.append(2)))
    calls.synchronize()
    assert ran == [2]


# ---- what it costs


def test_a_wait_a_copy_and_its_record_wake_the_thread_once(device: CpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    held, stream, event = device.new_stream("held"), device.new_stream("s"), device.new_event()
    gate, dst = Gate(held), filled(0)
    held.record(event)
    assert isinstance(stream, WorkerStream)
    items: list[object] = []
    monkeypatch.setattr(stream, "_queue", RecordingQueue(items))
    stream.wait(event)
    copy(device, dst, filled(5), stream)
    assert not items
    stream.record(event)
    assert len(items) == 1
    gate.open()
    device.compute_stream.wait(event)
    assert int(dst[0]) == 5
    stream.wait(event)  # has happened: there is nothing to wait for
    stream.record(event)
    assert [len(item) for item in items] == [3, 1]  # type: ignore[arg-type]


class RecordingQueue(queue.SimpleQueue):  # type: ignore[type-arg]
    def __init__(self, items: list[object]) -> None:
        super().__init__()
        self._items = items

    def put(self, item: object, block: bool = True, timeout: float | None = None) -> None:
        self._items.append(item)
        super().put(item, block, timeout)


def test_bytes_to_the_device_and_their_time_are_counted(device: CpuDevice) -> None:
    stream, other = device.new_stream("s"), device.new_stream("other")
    big = torch.zeros(1 << 24, dtype=torch.uint8)
    assert device.link_busy() == Busy(0, 0.0)
    start = time.perf_counter()
    for busy in (stream, other):
        copy(device, torch.empty_like(big), big, busy)
    device.copy_2d(PitchedCopy(torch.empty_like(big), big, 1 << 24, 1 << 24, 1 << 24, 1, "d2h"), stream)
    for busy in (stream, other):
        busy.synchronize()
    found = device.link_busy()
    assert found.num_bytes == 2 << 24 and 0 < found.seconds <= time.perf_counter() - start


def test_time_in_which_several_run_counts_once() -> None:
    times = iter([1.0, 4.0, 9.0, 10.0, 12.0, 14.5])
    meter = BusyMeter(lambda: next(times))
    with meter.running(100):
        with meter.running(10):
            assert meter.read() == Busy(0, 3.0)
        assert meter.read() == Busy(10, 8.0)
    assert meter.read() == Busy(110, 9.0)
    with pytest.raises(OSError), meter.running(1000):
        raise OSError("half-way")
    assert meter.read() == Busy(110, 11.5), "it took its time and did nothing"


# ---- the device


def test_devices_are_made_by_name() -> None:
    device = create_device("cpu")
    assert (device.name, device.torch_device.type) == ("cpu", "cpu")
    assert 0 < device.free_memory() <= device.total_memory()
    assert 0 < device.free_host_memory() <= device.total_memory()
    assert (
        device.empty("x", (2, 3), torch.float16).shape == device.empty_host("y", (2, 3), torch.float16).shape == (2, 3)
    )
    with pytest.raises(ConfigError, match=r"device='cuda'.*device='cpu'"):
        create_device("cuda")
