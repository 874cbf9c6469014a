"""The CPU as a device: streams are worker threads, whose copies run concurrently with the computation."""

from __future__ import annotations

import math
import queue
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future

import torch
from torch import Tensor

from nanovllm.comm import _sgdma, copy_pitched
from nanovllm.comm.sgdma import MAX_PITCH
from nanovllm.data.memory_checks import LARGE, check_fits
from nanovllm.device import memory
from nanovllm.device.base import Busy, CallStream, Device, Event, HostTask, Mark, PitchedCopy, Stream
from nanovllm.device.busy import BusyMeter
from nanovllm.errors import EngineError

RecordFunction = torch._C._profiler._RecordFunctionFast  # takes a microsecond where nothing is profiled

LOWER = "lower num_gpu_blocks, num_cpu_blocks or swap_space"


class CpuEvent(Event):
    """Holds a future for each record, with the failure of its stream, if any. A later record replaces it, so that it
    does not affect an earlier wait."""

    def __init__(self) -> None:
        self.reached: Future[None] | None = None


class CpuMark(Mark):
    """The time at which a stream reached the mark."""

    def __init__(self) -> None:
        self._seconds: float | None = None

    def set(self) -> None:
        self._seconds = time.perf_counter()

    def seconds(self) -> float | None:
        return self._seconds


class WorkerStream(CallStream):
    """A thread that runs the work of its queue in order.

    The thread starts with the first piece of work. A wait, its copy and the following record are one item of the queue,
    because waking a thread costs more than a small copy.

    After a failure the stream skips its work and passes the failure on through the events that it records, so that no
    other stream waits for ever or reads data that was not copied. `synchronize` raises the failure once and clears it.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: queue.SimpleQueue[list[Callable[[], object]] | None] = queue.SimpleQueue()
        self._held: list[Callable[[], object]] = []  # not submitted yet
        self._thread: threading.Thread | None = None
        self._failure: EngineError | None = None
        self._closed = False

    def put(self, work: Callable[[], object], *, hold: bool = False) -> None:
        """Submit `work`, after the work that is held back. hold: hold it back, to submit it with the next work."""
        if self._closed:
            raise EngineError(f"stream {self._name} is closed: the engine it belongs to was shut down")
        self._held.append(work)
        if hold:
            return
        if self._thread is None:
            # A daemon: the interpreter joins other threads before it runs the exit handlers that would end them.
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        works = self._held
        self._held = []
        self._queue.put(works)

    def launch(self, task: HostTask) -> None:
        def carry_out() -> None:
            _sgdma.run_host_task(*task.take())
            failure = task.failure()
            if failure is not None:
                raise RuntimeError(failure)

        self.put(lambda: self.unless_failed(carry_out))

    def record(self, event: Event) -> None:
        assert isinstance(event, CpuEvent)
        reached: Future[None] = Future()

        def reach() -> None:
            if self._failure is None:
                reached.set_result(None)
            else:
                reached.set_exception(self._failure)

        self.put(reach)
        event.reached = reached  # only now: `put` raises on a closed stream, and the event would never happen

    def wait(self, event: Event) -> None:
        assert isinstance(event, CpuEvent)
        reached = event.reached
        if reached is not None and not (reached.done() and reached.exception() is None):
            self.put(reached.result, hold=True)

    def synchronize(self) -> None:
        if (self._thread is not None or self._held) and not self._closed:
            done = threading.Event()
            self.put(done.set)
            done.wait()
        failure = self._failure
        self._failure = None
        if failure is not None:
            raise failure

    def mark(self) -> Mark:
        mark = CpuMark()
        self.put(mark.set)
        return mark

    def close(self) -> None:
        """End the thread; copies that have not started are dropped."""
        was_closed = self._closed
        self._closed = True
        if self._thread is not None and not was_closed:
            self._queue.put(None)
            if self._thread is not threading.current_thread():  # garbage collection may call this on the worker thread
                self._thread.join()

    def unless_failed(self, work: Callable[[], None]) -> None:
        """Do the work, unless earlier work of the stream has failed or the stream is closed."""
        if self._failure is None and not self._closed:
            work()

    def _run(self) -> None:
        while (works := self._queue.get()) is not None:
            for work in works:
                self._carry_out(work)

    def _carry_out(self, work: Callable[[], object]) -> None:
        try:
            work()
        except EngineError as failure:  # of another stream, raised by a wait
            self._failure = self._failure or failure
        except Exception as failure:
            self._failure = self._failure or EngineError(f"work on stream {self._name} failed: {failure}")


class HostStream(Stream):
    """The engine's thread as a stream: torch's CPU kernels are complete when the call returns."""

    def __init__(self) -> None:
        self._done: Future[None] = Future()
        self._done.set_result(None)

    def record(self, event: Event) -> None:
        assert isinstance(event, CpuEvent)
        event.reached = self._done

    def wait(self, event: Event) -> None:
        assert isinstance(event, CpuEvent)
        if event.reached is not None:
            event.reached.result()

    def synchronize(self) -> None:
        return

    def mark(self) -> Mark:
        mark = CpuMark()
        mark.set()
        return mark


class CpuDevice(Device):
    """Device memory is ordinary memory, and copies use `memcpy`."""

    name = "cpu"
    torch_device = torch.device("cpu")
    shares_host = True

    def __init__(self) -> None:
        memory.keep_freed_memory()
        self.compute_stream = HostStream()
        self._link = BusyMeter()  # of copies to the device
        self._streams: list[WorkerStream] = []
        # A thread must not be inside a copy when the interpreter exits: taking the GIL back during shutdown ends the
        # process. So streams are closed when the device is collected and at exit.
        self._close_streams = weakref.finalize(self, _close_all, self._streams)

    def new_stream(self, name: str) -> Stream:
        return self.new_call_stream(name)

    def new_call_stream(self, name: str) -> CallStream:
        stream = WorkerStream(name)
        self._streams.append(stream)
        return stream

    def new_event(self) -> Event:
        return CpuEvent()

    def wait_for(self, event: Event) -> None:
        assert isinstance(event, CpuEvent)
        if event.reached is not None:
            event.reached.result()

    def empty(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes >= LARGE:
            check_fits(f"{name}: they take", num_bytes, memory.available_bytes(), "the host has", LOWER)
        return torch.empty(shape, dtype=dtype)

    def empty_host(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self.empty(name, shape, dtype)

    def mapped(self, host: Tensor) -> Tensor:
        return host

    def copy_2d(self, copy: PitchedCopy, stream: Stream) -> int:
        assert isinstance(stream, WorkerStream), "copies run on transfer streams, never on the compute stream"
        # The closures do not hold the device: queued copies would keep it from being collected.
        link = self._link
        sizes = (copy.dpitch, copy.spitch, copy.width, copy.height)

        def carry_out() -> None:
            with RecordFunction(f"{copy.kind} copy, {copy.width * copy.height} bytes"):
                copy_pitched(copy.dst, copy.src, *sizes, "h2h", rows_above=MAX_PITCH)

        def measured() -> None:
            with link.running(copy.width * copy.height):
                carry_out()

        work = measured if copy.kind == "h2d" else carry_out
        stream.put(lambda: stream.unless_failed(work), hold=True)
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
