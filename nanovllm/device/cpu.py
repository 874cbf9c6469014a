"""The CPU as a device: streams are worker threads, and the copies on them really run alongside the computation."""

from __future__ import annotations

import math
import queue
import threading
import time
import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from nanovllm.comm import _sgdma, copy_pitched
from nanovllm.comm.sgdma import MAX_PITCH
from nanovllm.device import memory
from nanovllm.device.base import Busy, CallStream, Device, Event, HostTask, Mark, PitchedCopy, Stream
from nanovllm.device.busy import BusyMeter
from nanovllm.errors import EngineError
from nanovllm.memory_checks import LARGE, check_fits

LOWER = "lower num_gpu_blocks, num_cpu_blocks or swap_space"


class Flag:
    """One record of an event: set once, together with the failure of the stream that set it, if it had one."""

    def __init__(self) -> None:
        self._happened = threading.Event()
        self._failure: EngineError | None = None

    def set(self, failure: EngineError | None = None) -> None:
        self._failure = failure
        self._happened.set()

    def is_set(self) -> bool:
        return self._happened.is_set()

    def is_behind(self) -> bool:
        """Set, and nothing failed: whoever waits for it may as well not."""
        return self._happened.is_set() and self._failure is None

    def wait(self) -> None:
        """Return once set. Raises if what should have happened before it failed."""
        self._happened.wait()
        if self._failure is not None:
            raise self._failure


class CpuEvent(Event):
    """Holds one flag per record, so that a later record does not undo an earlier wait."""

    def __init__(self) -> None:
        self.flag: Flag | None = None


class CpuMark(Mark):
    """The time at which a stream got to it."""

    def __init__(self) -> None:
        self._seconds: float | None = None

    def set(self) -> None:
        self._seconds = time.perf_counter()

    def seconds(self) -> float | None:
        return self._seconds


class WorkerStream(CallStream):
    """A thread that carries out what is put on its queue, in order.

    The thread starts with the first piece of work. Copies and waits are handed over with the record that follows them,
    since waking a thread costs more than a small copy: a wait, its copy and the record are one item of the queue.

    After a failure the stream skips its work and passes the failure on through the flags it sets, so that nobody waits
    for ever and nobody reads what was not copied; `synchronize` raises the failure once and clears it.
    """

    def __init__(self, name: str, meter: BusyMeter | None = None) -> None:
        self._name = name
        self._meter = meter or BusyMeter()  # of copies to the device
        self._queue: queue.SimpleQueue[list[Callable[[], None]] | None] = queue.SimpleQueue()
        self._held: list[Callable[[], None]] = []  # not handed over yet
        self._thread: threading.Thread | None = None
        self._failure: EngineError | None = None
        self._closed = False

    def put(self, work: Callable[[], None]) -> None:
        """Hand `work` over, after what is held back."""
        self._hold(work)
        if self._thread is None:
            # A daemon, because the interpreter waits for other threads before it runs exit handlers.
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        works, self._held = self._held, []
        self._queue.put(works)

    def launch(self, task: HostTask) -> None:
        def carry_out() -> None:
            _sgdma.run_host_task(*task.take())
            failure = task.failure()
            if failure is not None:
                raise RuntimeError(failure)

        self.put(lambda: self._unless_failed(carry_out))

    def copy(self, copy: PitchedCopy) -> None:
        """Put a copy between two spans of ordinary memory on the stream."""

        def carry_out() -> None:
            sizes = (copy.dpitch, copy.spitch, copy.width, copy.height)
            copy_pitched(copy.dst, copy.src, *sizes, "h2h", rows_above=MAX_PITCH)

        def measured() -> None:
            with self._meter.running(copy.width * copy.height):
                carry_out()

        work = measured if copy.kind == "h2d" else carry_out
        self._hold(lambda: self._unless_failed(work))

    def record(self, event: Event) -> None:
        assert isinstance(event, CpuEvent)
        flag = Flag()
        self.put(lambda: flag.set(self._failure))
        event.flag = flag  # only now: a closed stream refuses, and nobody must wait for what will not happen

    def wait(self, event: Event) -> None:
        assert isinstance(event, CpuEvent)
        flag = event.flag
        if flag is not None and not flag.is_behind():
            self._hold(flag.wait)

    def synchronize(self) -> None:
        if (self._thread is not None or self._held) and not self._closed:
            done = threading.Event()
            self.put(done.set)
            done.wait()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def mark(self) -> Mark:
        mark = CpuMark()
        self.put(mark.set)
        return mark

    def close(self) -> None:
        """End the thread; copies that have not begun are dropped."""
        was_closed, self._closed = self._closed, True
        if self._thread is not None and not was_closed:
            self._queue.put(None)
            if self._thread is not threading.current_thread():  # garbage collection may run in this very thread
                self._thread.join()

    def _hold(self, work: Callable[[], None]) -> None:
        if self._closed:
            raise EngineError(f"stream {self._name} is closed: the engine it belongs to was shut down")
        self._held.append(work)

    def _unless_failed(self, work: Callable[[], None]) -> None:
        if self._failure is None and not self._closed:
            work()

    def _run(self) -> None:
        while (works := self._queue.get()) is not None:
            for work in works:
                self._carry_out(work)

    def _carry_out(self, work: Callable[[], None]) -> None:
        try:
            work()
        except EngineError as failure:  # of another stream, met while waiting for it
            self._failure = self._failure or failure
        except Exception as failure:
            self._failure = self._failure or EngineError(f"work on stream {self._name} failed: {failure}")


class HostStream(Stream):
    """The thread that drives the engine, as a stream: torch's CPU kernels have run when the call returns."""

    def __init__(self) -> None:
        self._behind = Flag()
        self._behind.set()

    def record(self, event: Event) -> None:
        assert isinstance(event, CpuEvent)
        event.flag = self._behind

    def wait(self, event: Event) -> None:
        assert isinstance(event, CpuEvent)
        if event.flag is not None:
            event.flag.wait()

    def synchronize(self) -> None:
        return

    def mark(self) -> Mark:
        mark = CpuMark()
        mark.set()
        return mark


class CpuDevice(Device):
    """Ordinary memory stands for device memory; the link between the two kinds is `memcpy`."""

    name = "cpu"
    torch_device = torch.device("cpu")
    shares_host = True

    def __init__(self) -> None:
        memory.keep_freed_memory()
        self.compute_stream = HostStream()
        self._link = BusyMeter()
        self._streams: list[WorkerStream] = []
        # An engine that is dropped, or still open when the interpreter exits, must not leave a thread inside a copy:
        # taking the GIL back during shutdown ends the process.
        self._close_streams = weakref.finalize(self, _close_all, self._streams)

    def new_stream(self, name: str) -> Stream:
        return self.new_call_stream(name)

    def new_call_stream(self, name: str) -> CallStream:
        stream = WorkerStream(name, self._link)
        self._streams.append(stream)
        return stream

    def new_event(self) -> Event:
        return CpuEvent()

    def empty(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes >= LARGE:
            check_fits(f"{name}: they take", num_bytes, memory.available_bytes(), "the host has", LOWER)
        return torch.empty(shape, dtype=dtype)

    def empty_host(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self.empty(name, shape, dtype)

    def copy_2d(self, copy: PitchedCopy, stream: Stream) -> int:
        assert isinstance(stream, WorkerStream), "copies run on transfer streams, never on the compute stream"
        stream.copy(copy)
        return 1 if max(copy.dpitch, copy.spitch) <= MAX_PITCH else copy.height

    def link_busy(self) -> Busy:
        return self._link.read()

    def free_memory(self) -> int:
        return memory.available_bytes()

    def total_memory(self) -> int:
        return memory.total_bytes()

    def free_host_memory(self) -> int:
        return memory.available_bytes()

    def close(self) -> None:
        self._close_streams()


def _close_all(streams: list[WorkerStream]) -> None:
    for stream in streams:
        stream.close()
