"""A CUDA device: streams, events and memory are torch's, copies and pinned memory the extension's.

Nothing runs on the default stream, which would order itself against everything else: the model has a compute stream of
its own, each user of transfers another. torch hands out 32 streams per priority in turns; the compute stream is of the
high priority, so that no transfer stream is ever the same one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from nanovllm.comm import _sgdma, copy_pitched
from nanovllm.comm.sgdma import MAX_PITCH
from nanovllm.device import memory
from nanovllm.device.base import CallStream, Device, Event, Graph, Mark, PitchedCopy, Stream
from nanovllm.device.busy import Busy
from nanovllm.device.cuda_graph import record_graphs
from nanovllm.device.link_meter import LinkMeter
from nanovllm.device.pinned import CudaPageLock, empty_pinned, nearest_node, rows_in_reach
from nanovllm.errors import ConfigError, EngineError

_HIGH_PRIORITY = -1
_ORIGIN_SECONDS = 4.0  # CUDA gives times between events as fp32 milliseconds: exact to half a microsecond up to here


class CudaEvent(Event):
    def __init__(self) -> None:
        self.inner = torch.cuda.Event()


@dataclass(eq=False, slots=True)
class Origin:
    """An event that later marks are timed from, and its own time."""

    event: torch.cuda.Event
    before: Origin | None  # None for the first, which is second 0
    _seconds: float | None = None

    def seconds(self) -> float | None:
        if self._seconds is None:
            self._seconds = 0.0 if self.before is None else seconds_between(self.before, self.event)
            if self._seconds is not None:
                self.before = None
        return self._seconds


def seconds_between(origin: Origin, event: torch.cuda.Event) -> float | None:
    """The time of `event` on the clock of `origin`; None as long as one of them has not happened."""
    if not (origin.event.query() and event.query()):
        return None
    start = origin.seconds()
    return None if start is None else start + origin.event.elapsed_time(event) / 1e3


class CudaMark(Mark):
    def __init__(self, origin: Origin, event: torch.cuda.Event) -> None:
        self._origin = origin
        self._event = event

    def seconds(self) -> float | None:
        return seconds_between(self._origin, self._event)


class CudaClock:
    """Makes marks. Origins lie on a stream without other work, so that each happens before the marks that use it."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._origin: Origin | None = None
        self._origin_made = 0.0

    def mark(self, stream: torch.cuda.Stream) -> Mark:
        now = time.monotonic()
        if self._origin is None or now - self._origin_made > _ORIGIN_SECONDS:
            self._origin = Origin(timed_event(self._stream), self._origin)
            self._origin_made = now
        return CudaMark(self._origin, timed_event(stream))


def timed_event(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream)
    return event


class CudaStream(Stream):
    def __init__(self, name: str, inner: torch.cuda.Stream, clock: CudaClock) -> None:
        self.name = name
        self.inner = inner
        self._clock = clock

    def record(self, event: Event) -> None:
        assert isinstance(event, CudaEvent)
        event.inner.record(self.inner)

    def wait(self, event: Event) -> None:
        assert isinstance(event, CudaEvent)
        self.inner.wait_event(event.inner)

    def synchronize(self) -> None:
        try:
            self.inner.synchronize()
        except RuntimeError as error:
            raise EngineError(f"work on stream {self.name} failed: {error}") from error

    def mark(self) -> Mark:
        return self._clock.mark(self.inner)


class CudaCallStream(CudaStream, CallStream):
    """Calls run on a thread of CUDA's, in the order of the stream, so that events order them as they order copies.

    After a failure calls are skipped; `synchronize` raises it once. Other streams do not learn of it: whoever relies on
    a call's result synchronizes before it is used.
    """

    def __init__(self, name: str, inner: torch.cuda.Stream, clock: CudaClock) -> None:
        super().__init__(name, inner, clock)
        self._failure: EngineError | None = None

    def launch(self, call: Callable[[], None]) -> None:
        def carry_out() -> None:
            if self._failure is None:
                try:
                    call()
                except Exception as error:
                    self._failure = EngineError(f"work on stream {self.name} failed: {error}")

        _sgdma.launch_call(carry_out, self.inner.cuda_stream)

    def synchronize(self) -> None:
        super().synchronize()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure


class CudaDevice(Device):
    """The CUDA device that is torch's current one when this is made."""

    name = "cuda"
    shares_host = False
    captures = True

    def __init__(self) -> None:
        """Raises ConfigError where there is no CUDA device, or the extension was built without CUDA."""
        check_cuda()
        self.torch_device = torch.device("cuda", torch.cuda.current_device())
        torch.empty(1, device=self.torch_device)  # makes the context that the extension uses as well
        self._clock = CudaClock(self.torch_device)
        self._compute = CudaStream("compute", torch.cuda.Stream(self.torch_device, _HIGH_PRIORITY), self._clock)
        self.compute_stream = self._compute
        self._streams: list[CudaStream] = []
        self._link = LinkMeter()
        self._max_pitch = min(MAX_PITCH, _sgdma.max_pitch(self.torch_device.index))
        self._closed = False

    def compute(self) -> AbstractContextManager[None]:
        return torch.cuda.stream(self._compute.inner)

    def new_stream(self, name: str) -> Stream:
        stream = CudaStream(name, torch.cuda.Stream(self.torch_device), self._clock)
        self._streams.append(stream)
        return stream

    def new_call_stream(self, name: str) -> CallStream:
        stream = CudaCallStream(name, torch.cuda.Stream(self.torch_device), self._clock)
        self._streams.append(stream)
        return stream

    def new_event(self) -> Event:
        return CudaEvent()

    def empty(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        try:
            return torch.empty(shape, dtype=dtype, device=self.torch_device)
        except torch.cuda.OutOfMemoryError as error:
            raise ConfigError(
                f"{name}: {_gib(_bytes_of(shape, dtype))} cannot be had, {_gib(self.free_memory())} of device memory "
                "are free; lower num_gpu_blocks or gpu_memory_utilization"
            ) from error

    def empty_host(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return empty_pinned(name, shape, dtype, CudaPageLock(), node=nearest_node(self.torch_device.index))

    def copy_2d(self, copy: PitchedCopy, stream: Stream) -> int:
        assert isinstance(stream, CudaStream) and stream is not self._compute, "copies run on transfer streams"
        if self._closed:
            raise EngineError(f"stream {stream.name} is closed: the engine it belongs to was shut down")
        sizes = (copy.dpitch, copy.spitch, copy.width, copy.height)
        if copy.kind == "h2h":  # which CUDA would do at once, whatever the stream waits for
            on_host = partial(copy_pitched, copy.dst, copy.src, *sizes, "h2h")
            _sgdma.launch_call(on_host, stream.inner.cuda_stream)
            return 1
        begin = self._link.before(stream) if copy.kind == "h2d" else None
        count = copy_pitched(copy.dst, copy.src, *sizes, copy.kind, stream.inner, rows_above=self._max_pitch)
        self._link.after(stream, begin, copy.width * copy.height)
        return count

    def rows_in_reach(self, host: Tensor) -> int:
        return rows_in_reach(host)

    def link_busy(self) -> Busy:
        """Of the copies that are measured, which are a part of all."""
        return self._link.read()

    def peak_memory(self, work: Callable[[], object]) -> int:
        """What the allocator took from the device for it, rounding and fragments included, and gave back."""
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

    def capture(self, works: Sequence[Callable[[], object]]) -> list[Graph]:
        with self.compute():
            return record_graphs(works, self.torch_device.index)

    def free_memory(self) -> int:
        torch.cuda.empty_cache()  # what torch keeps for later is free as well
        return torch.cuda.mem_get_info(self.torch_device)[0]

    def total_memory(self) -> int:
        return torch.cuda.mem_get_info(self.torch_device)[1]

    def free_host_memory(self) -> int:
        return memory.available_bytes()

    def close(self) -> None:
        """Wait for everything under way, so that its memory can be given back."""
        if not self._closed:
            self._closed = True
            for stream in [*self._streams, self._compute]:
                with suppress(EngineError):
                    stream.synchronize()


def check_cuda() -> None:
    """Raise ConfigError, with the reason, unless a CUDA device can be driven."""
    if not torch.cuda.is_available():
        raise ConfigError("device='cuda': torch sees no CUDA device; use device='cpu' or leave it out")
    if not _sgdma.has_cuda:
        raise ConfigError(
            "device='cuda': the extension was built without CUDA; put nvcc on PATH and build it again with "
            "`NANOVLLM_CUDA=1 python setup.py build_ext --inplace`"
        )


def _bytes_of(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return torch.empty(shape, dtype=dtype, device="meta").nbytes


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
