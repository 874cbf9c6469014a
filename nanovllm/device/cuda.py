"""A CUDA device: streams, events and device memory come from torch, copies and pinned memory from the extension.

Nothing runs on the default stream, which synchronizes with all other streams. The compute stream comes from torch,
which keeps memory and workspaces for each stream, with high priority. All other streams are made here, each for one
user: torch would give the same 32 to everybody in turn, other engines of the process included.
"""

from __future__ import annotations

import math
import os
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress

import torch
from torch import Tensor

from nanovllm.comm import _sgdma, copy_on_host_async, copy_pitched
from nanovllm.comm.sgdma import MAX_PITCH
from nanovllm.data.memory_checks import gib
from nanovllm.device import memory
from nanovllm.device.base import (
    Busy,
    CallStream,
    Device,
    Event,
    Graph,
    HostTask,
    Mark,
    PitchedCopy,
    RecordedWork,
    Stream,
)
from nanovllm.device.busy import LinkMeter
from nanovllm.device.cuda_graph import record_graphs
from nanovllm.device.pinned import PageLock, empty_pinned, nearest_node, rows_in_reach
from nanovllm.errors import ConfigError, EngineError

POLLED_CALLS = "NANOVLLM_POLLED_CALLS"  # in the environment: 0 for tasks on a thread of the driver
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
MOST_CONNECTIONS = 32

_HIGH_PRIORITY = -1
_ORIGIN_SECONDS = 4.0  # CUDA reports elapsed time as fp32 milliseconds, exact to half a microsecond up to here


class CudaEvent(Event):
    def __init__(self) -> None:
        self.inner = torch.cuda.Event()


class CudaMark(Mark):
    def __init__(self, origin: torch.cuda.Event, origin_seconds: float, event: torch.cuda.Event) -> None:
        """origin: an event that has happened, at `origin_seconds`."""
        self._origin = origin
        self._origin_seconds = origin_seconds
        self._event = event

    def seconds(self) -> float | None:
        return self._origin_seconds + self._origin.elapsed_time(self._event) / 1e3 if self._event.query() else None


class CudaClock:
    """Makes marks. Their origins are events of an unused stream, so that they happen at once; the first is second 0."""

    def __init__(self, device: torch.device) -> None:
        self._stream = own_stream(device)
        self._latest = self._new_origin(), 0.0, time.monotonic()  # one value: several threads make marks

    def mark(self, stream: torch.cuda.Stream) -> Mark:
        origin, seconds, made = self._latest
        if time.monotonic() - made > _ORIGIN_SECONDS:
            earlier = origin
            origin = self._new_origin()
            seconds += earlier.elapsed_time(origin) / 1e3
            self._latest = origin, seconds, time.monotonic()
        return CudaMark(origin, seconds, timed_event(stream))

    def _new_origin(self) -> torch.cuda.Event:
        origin = timed_event(self._stream)
        origin.synchronize()
        return origin

    def close(self) -> None:
        """Let the stream go."""
        del self._stream


def own_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream that nothing else in the process uses. It is destroyed with the last reference to it."""
    with torch.cuda.device(device):
        owner = StreamOwner(_sgdma.create_stream())
    stream = torch.cuda.ExternalStream(owner.handle, device)
    stream.owner = owner  # type: ignore[attr-defined]
    return stream


class StreamOwner:
    """Destroys a stream when it goes itself. A stream of torch 2.11 leaves its weak references as they are when it
    goes, so that a finalizer of its own would never run, and would crash the process at its end."""

    def __init__(self, handle: int) -> None:
        self.handle = handle
        weakref.finalize(self, destroy_stream, handle)


def destroy_stream(handle: int) -> None:
    with suppress(RuntimeError):  # a failed kernel broke the CUDA context: the stream ends with the process
        _sgdma.destroy_stream(handle)


def timed_event(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream)
    return event


class CudaStream(Stream):
    def __init__(self, name: str, inner: torch.cuda.Stream, clock: CudaClock) -> None:
        self.name = name
        self._inner: torch.cuda.Stream | None = inner
        self._clock = clock

    @property
    def inner(self) -> torch.cuda.Stream:
        if self._inner is None:
            raise EngineError(f"stream {self.name} is closed: the engine it belongs to was shut down")
        return self._inner

    def close(self) -> None:
        self._inner = None

    def record(self, event: Event) -> None:
        assert isinstance(event, CudaEvent)
        event.inner.record(self.inner)

    def wait(self, event: Event) -> None:
        assert isinstance(event, CudaEvent)
        self.inner.wait_event(event.inner)

    def synchronize(self) -> None:
        if self._inner is None:
            return  # the device waited for its work before it closed the stream
        try:
            self._inner.synchronize()
        except RuntimeError as error:
            raise EngineError(f"work on stream {self.name} failed: {error}") from error

    def mark(self) -> Mark:
        return self._clock.mark(self.inner)


class CudaCallStream(CudaStream, CallStream):
    """Runs host tasks on a thread of the CUDA driver, in stream order, so that events order them like copies.

    Other streams do not see a failure: `synchronize` raises it once, and must be called before results are used. Tasks
    run no Python. The driver holds locks during a task; a thread with the GIL may wait for these locks in any driver
    call, and would deadlock with a task that waited for the GIL.
    """

    def __init__(self, name: str, inner: torch.cuda.Stream, clock: CudaClock) -> None:
        super().__init__(name, inner, clock)
        self._launched: list[HostTask] = []  # since the stream was last synchronized

    def launch(self, task: HostTask) -> None:
        function, data = task.take()
        try:
            self._submit(function, data)
        except RuntimeError:
            task.drop(data)
            raise
        self._launched.append(task)

    def _submit(self, function: int, data: int) -> None:
        _sgdma.launch_host_task(function, data, self.inner.cuda_stream)

    def synchronize(self) -> None:
        super().synchronize()
        launched = self._launched
        self._launched = []
        for failure in filter(None, (task.failure() for task in launched)):
            raise EngineError(f"work on stream {self.name} failed: {failure}")


class PolledCallStream(CudaCallStream):
    """Runs host tasks on a thread of this process, which polls a word in host memory that the stream writes, and writes
    one for which the stream waits.

    It begins a task sooner than a thread of the driver. It takes a core as long as tasks are under way, and an engine
    that is closed, or whose device has failed, ends it.
    """

    def __init__(self, name: str, inner: torch.cuda.Stream, clock: CudaClock, words: Tensor) -> None:
        """words: 128 bytes of page-locked memory. Raises RuntimeError if the device's kernels cannot reach it."""
        super().__init__(name, inner, clock)
        self._words = words
        self._polled = _sgdma.PolledCalls(words.data_ptr(), _sgdma.device_address(words.data_ptr()))
        weakref.finalize(self, self._polled.close)  # before the words go, and at the process's end

    def _submit(self, function: int, data: int) -> None:
        self._polled.launch(function, data, self.inner.cuda_stream)

    def close(self) -> None:
        super().close()
        self._polled.close()


class MappedBytes:
    """The memory of a contiguous host tensor at its address on the device, in the form that torch makes tensors of."""

    def __init__(self, host: Tensor, address: int) -> None:
        self._host = host  # torch keeps this object for as long as the memory is in use
        self.__cuda_array_interface__ = {
            "shape": (host.nbytes,), "typestr": "|u1", "data": (address, False), "version": 3
        }  # fmt: skip


class CudaDevice(Device):
    """The CUDA device that is torch's current device at construction."""

    name = "cuda"
    shares_host = False
    captures = True
    host_memory_may_grow = True

    def __init__(self) -> None:
        """Raises ConfigError without a CUDA device or without CUDA in the extension."""
        check_cuda()
        self.torch_device = torch.device("cuda", torch.cuda.current_device())
        torch.empty(1, device=self.torch_device)  # creates the context that the extension shares
        self._clock = CudaClock(self.torch_device)
        self._compute = CudaStream("compute", torch.cuda.Stream(self.torch_device, _HIGH_PRIORITY), self._clock)
        self.compute_stream = self._compute
        self._streams: list[CudaStream] = []
        self._link = LinkMeter()
        self._page_lock = PageLock()
        self._known: set[tuple[int, int]] = set()  # storages that CUDA confirmed to be memory of this device
        self._max_pitch = min(MAX_PITCH, _sgdma.max_pitch(self.torch_device.index))
        self._closed = False

    def compute(self) -> AbstractContextManager[None]:
        return torch.cuda.stream(self._compute.inner)

    def new_stream(self, name: str) -> Stream:
        stream = CudaStream(name, own_stream(self.torch_device), self._clock)
        self._streams.append(stream)
        return stream

    def new_call_stream(self, name: str) -> CallStream:
        inner = own_stream(self.torch_device)
        if os.environ.get(POLLED_CALLS) != "0":
            words = self.empty_host("words of calls", (128,), torch.uint8)
            stream: CudaCallStream = PolledCallStream(name, inner, self._clock, words)
        else:
            stream = CudaCallStream(name, inner, self._clock)
        self._streams.append(stream)
        return stream

    def new_event(self) -> Event:
        return CudaEvent()

    def wait_for(self, event: Event) -> None:
        assert isinstance(event, CudaEvent)
        try:
            event.inner.synchronize()
        except RuntimeError as error:
            raise EngineError(f"work on the device failed: {error}") from error

    def empty(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        try:
            return torch.empty(shape, dtype=dtype, device=self.torch_device)
        except torch.cuda.OutOfMemoryError as error:
            raise ConfigError(
                f"{name}: {gib(math.prod(shape) * dtype.itemsize)} cannot be allocated, {gib(self.free_memory())} of "
                "device memory are free; lower num_gpu_blocks or gpu_memory_utilization"
            ) from error

    def empty_host(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return empty_pinned(name, shape, dtype, self._page_lock, node=nearest_node(self.torch_device.index))

    def mapped(self, host: Tensor) -> Tensor | None:
        """A tensor of this device over the host's memory, which it keeps alive."""
        try:
            address = _sgdma.device_address(host.data_ptr())
        except RuntimeError:
            return None
        bytes_there = torch.as_tensor(MappedBytes(host, address), device=self.torch_device)
        return bytes_there.view(host.dtype).view(host.shape)

    def copy_2d(self, copy: PitchedCopy, stream: Stream) -> int:
        assert isinstance(stream, CudaStream) and stream is not self._compute, "copies run on transfer streams"
        sizes = (copy.dpitch, copy.spitch, copy.width, copy.height)
        if copy.kind == "h2h":  # CUDA would run it at once and ignore the order of the stream
            copy_on_host_async(copy.dst, copy.src, *sizes, stream.inner)
            return 1
        begin = self._link.before(stream) if copy.kind == "h2d" else None
        count = copy_pitched(
            copy.dst, copy.src, *sizes, copy.kind, stream.inner, rows_above=self._max_pitch, is_known=self._is_known
        )
        self._link.after(stream, begin, copy.width * copy.height)
        # The copy was accepted, so CUDA has confirmed its memory.
        self._known.update(map(_storage_of, (tensor for tensor in (copy.dst, copy.src) if tensor.is_cuda)))
        return count

    def rows_in_reach(self, host: Tensor) -> int:
        return rows_in_reach(host)

    def link_busy(self) -> Busy:
        """Of a sample of the copies."""
        return self._link.read()

    def _is_known(self, tensor: Tensor) -> bool:
        """Whether the tensor's memory was confirmed before; pools outlive their copies."""
        storage = _storage_of(tensor)
        return storage in self._known if tensor.is_cuda else self._page_lock.covers(*storage)

    def peak_memory(self, work: Callable[[], object]) -> int:
        """See `Device.peak_memory`; counts the allocator's reservations, with rounding and fragmentation."""
        with self.compute():
            torch.cuda.synchronize(self.torch_device)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.torch_device)
            before = torch.cuda.memory_reserved(self.torch_device)
            work()
            torch.cuda.synchronize(self.torch_device)
            peak = torch.cuda.max_memory_reserved(self.torch_device) - before
            torch.cuda.empty_cache()
        return peak

    def capture(self, works: Sequence[RecordedWork]) -> list[list[Graph]]:
        with self.compute():
            return record_graphs(works, self.torch_device.index)

    def read(self, tensor: Tensor) -> Callable[[], Tensor]:
        copied = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        arrived = torch.cuda.Event()
        copied.copy_(tensor, non_blocking=True)
        arrived.record()

        def wait() -> Tensor:
            arrived.synchronize()
            return copied

        return wait

    def free_memory(self) -> int:
        torch.cuda.empty_cache()  # memory that torch caches is free as well
        return torch.cuda.mem_get_info(self.torch_device)[0]

    def total_memory(self) -> int:
        return torch.cuda.mem_get_info(self.torch_device)[1]

    def free_host_memory(self) -> int:
        return memory.available_bytes()

    def close(self) -> None:
        """Wait for all work, so that its memory can be freed, and destroy the streams but the compute stream."""
        if not self._closed:
            self._closed = True
            for stream in [*self._streams, self._compute]:
                with suppress(EngineError):
                    stream.synchronize()
            for stream in self._streams:
                stream.close()
            self._clock.close()


def use_all_connections() -> None:
    """Let later CUDA contexts divide their streams among all hardware queues, unless the environment names a number.

    Work of two streams in one queue waits for each other. An engine has fewer streams than the eight queues that CUDA
    has by default, but a process may have several engines, and other users of CUDA.
    """
    os.environ.setdefault(CONNECTIONS, str(MOST_CONNECTIONS))


def check_cuda() -> None:
    """Raise ConfigError, with the reason, unless a CUDA device can be driven."""
    if not torch.cuda.is_available():
        raise ConfigError("device='cuda': torch sees no CUDA device; use device='cpu' or leave it out")
    if not _sgdma.cuda_version():
        raise ConfigError(
            "device='cuda': the extension was built without CUDA; put nvcc on PATH and build it again with "
            "`NANOVLLM_CUDA=1 python setup.py build_ext --inplace`"
        )


def _storage_of(tensor: Tensor) -> tuple[int, int]:
    """Address and bytes of the tensor's storage."""
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()
