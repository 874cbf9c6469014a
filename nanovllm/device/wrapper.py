"""A device that forwards to another device; subclasses override parts of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from nanovllm.device.base import Busy, CallStream, Device, Event, Graph, Mark, PitchedCopy, RecordedWork, Stream


class StreamWrapper(Stream):
    """Forwards everything to `inner`."""

    def __init__(self, inner: Stream) -> None:
        self.inner = inner

    def record(self, event: Event) -> None:
        self.inner.record(event)

    def wait(self, event: Event) -> None:
        self.inner.wait(event)

    def synchronize(self) -> None:
        self.inner.synchronize()

    def mark(self) -> Mark:
        return self.inner.mark()


class DeviceWrapper(Device):
    """Forwards everything to `inner`. A subclass with streams or events of its own passes their inner ones on."""

    def __init__(self, inner: Device) -> None:
        self.inner = inner
        self.name = inner.name
        self.torch_device = inner.torch_device
        self.compute_stream = inner.compute_stream
        self.shares_host = inner.shares_host
        self.captures = inner.captures
        self.host_memory_may_grow = inner.host_memory_may_grow

    def compute(self) -> AbstractContextManager[None]:
        return self.inner.compute()

    def new_stream(self, name: str) -> Stream:
        return self.inner.new_stream(name)

    def new_call_stream(self, name: str) -> CallStream:
        return self.inner.new_call_stream(name)

    def new_event(self) -> Event:
        return self.inner.new_event()

    def wait_for(self, event: Event) -> None:
        self.inner.wait_for(event)

    def empty(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self.inner.empty(name, shape, dtype)

    def empty_host(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self.inner.empty_host(name, shape, dtype)

    def mapped(self, host: Tensor) -> Tensor | None:
        return self.inner.mapped(host)

    def copy_2d(self, copy: PitchedCopy, stream: Stream) -> int:
        return self.inner.copy_2d(copy, stream)

    def rows_in_reach(self, host: Tensor) -> int:
        return self.inner.rows_in_reach(host)

    def link_busy(self) -> Busy:
        return self.inner.link_busy()

    def declare_kernel(
        self, name: str, reads: Iterable[Tensor] = (), writes: Iterable[Tensor] = (), stream: Stream | None = None
    ) -> None:
        self.inner.declare_kernel(name, reads, writes, stream)

    def end_kernel(self) -> None:
        self.inner.end_kernel()

    def declare_host_access(self, name: str, reads: Iterable[Tensor] = (), writes: Iterable[Tensor] = ()) -> None:
        self.inner.declare_host_access(name, reads, writes)

    def peak_memory(self, work: Callable[[], object]) -> int | None:
        return self.inner.peak_memory(work)

    def capture(self, works: Sequence[RecordedWork]) -> list[list[Graph]]:
        return self.inner.capture(works)

    def read(self, tensor: Tensor) -> Callable[[], Tensor]:
        return self.inner.read(tensor)

    def free_memory(self) -> int:
        return self.inner.free_memory()

    def total_memory(self) -> int:
        return self.inner.total_memory()

    def free_host_memory(self) -> int:
        return self.inner.free_host_memory()

    def close(self) -> None:
        self.inner.close()
