"""What a device is to the rest of the engine: memory of two kinds, streams, events, and a strided copy.

The semantics are CUDA's. Work on one stream runs in order; work on two streams is unordered unless an event orders it:
`a.record(e); b.wait(e)` makes everything put on `b` afterwards run after everything put on `a` before. Waiting takes
the event's latest record at the time of the call; an event that was never recorded does not hold anybody up.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

CopyKind = Literal["h2d", "d2h", "d2d", "h2h"]


@dataclass(frozen=True, slots=True)
class PitchedCopy:
    """`height` rows of `width` bytes; rows start `dpitch` bytes apart in dst and `spitch` bytes apart in src."""

    dst: Tensor
    src: Tensor
    dpitch: int
    spitch: int
    width: int
    height: int
    kind: CopyKind


@dataclass(frozen=True, slots=True)
class Busy:
    """Bytes read or copied, and the seconds during which at least one of those pieces of work ran."""

    num_bytes: int = 0
    seconds: float = 0.0

    def __sub__(self, other: Busy) -> Busy:
        return Busy(self.num_bytes - other.num_bytes, self.seconds - other.seconds)


class Event:
    """A point in a stream's work; each device has its own kind."""


class Mark(ABC):
    """A point in a stream's work that remembers when it was passed."""

    @abstractmethod
    def seconds(self) -> float | None:
        """When, on a clock that all streams of the device share; None as long as it is not passed."""


class Stream(ABC):
    """A queue of work that runs in order, alongside the host and other streams."""

    @abstractmethod
    def record(self, event: Event) -> None:
        """`event` happens when the work put on this stream so far is done."""

    @abstractmethod
    def wait(self, event: Event) -> None:
        """Work put on this stream from now on starts after `event`'s latest record."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block the host until all work put on this stream is done. Raises EngineError if a part of it failed."""

    @abstractmethod
    def mark(self) -> Mark:
        """Mark the work put on this stream so far, to be asked later when it was done."""


class HostTask(Protocol):
    """Work on host memory that a stream carries out: a C function with its data.

    It runs on whatever thread the stream has for it and uses neither Python nor the device: it could never get the GIL
    while a thread that has it waits for the stream.
    """

    def take(self) -> tuple[int, int]:
        """Addresses of a function `void f(void *)` and of its argument. Calling it once does the work, and lets go of
        what the argument holds."""
        ...

    def drop(self, data: int) -> None:
        """Let go of an argument that was taken and will not be used."""
        ...

    def failure(self) -> str | None:
        """What went wrong when it ran."""
        ...


class CallStream(Stream):
    """A stream whose work runs on cores of the host, alongside the thread that puts it there."""

    @abstractmethod
    def launch(self, task: HostTask) -> None:
        """Put `task` on this stream. What goes wrong in it is a failure of the stream."""


class Graph(ABC):
    """Work on the compute stream that was recorded once and is put there again with one call."""

    @abstractmethod
    def replay(self) -> None:
        """Run the same kernels with the same arguments over what their memory holds now. Called within `compute`."""


class Device(ABC):
    """Memory, streams and copies of one device. `compute_stream` is where the model runs.

    `shares_host`: the compute stream runs on the host's own cores, and its kernels reach host memory as they do device
    memory. A call stream would then only take cores away from it. `captures`: whether it can record graphs.
    `host_memory_may_grow`: whether `empty_host` may have more than `free_host_memory`, and finds out by taking it.
    """

    name: str
    torch_device: torch.device
    compute_stream: Stream
    shares_host: bool
    captures: bool = False
    host_memory_may_grow: bool = False

    def compute(self) -> AbstractContextManager[None]:
        """What torch is called for inside goes on the compute stream."""
        return nullcontext()

    @abstractmethod
    def new_stream(self, name: str) -> Stream: ...

    @abstractmethod
    def new_call_stream(self, name: str) -> CallStream: ...

    @abstractmethod
    def new_event(self) -> Event: ...

    @abstractmethod
    def empty(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Uninitialised device memory. `name` says what it is for."""

    @abstractmethod
    def empty_host(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Uninitialised host memory that copies to and from the device can reach directly (pinned, on CUDA)."""

    @abstractmethod
    def copy_2d(self, copy: PitchedCopy, stream: Stream) -> int:
        """Put a copy on `stream`, which is not the compute stream. Returns how many copies that takes: 1, or one for
        each row where a pitch is above what the device copies with."""

    def rows_in_reach(self, host: Tensor) -> int:
        """Of memory from `empty_host`: no copy may reach across a multiple of so many `host[i]`."""
        return len(host)

    @abstractmethod
    def link_busy(self) -> Busy:
        """Bytes copied to the device so far, and the time in which such copies ran. Waits for nothing."""

    def declare_kernel(
        self, name: str, reads: Iterable[Tensor] = (), writes: Iterable[Tensor] = (), stream: Stream | None = None
    ) -> None:
        """Say what memory a kernel reads and writes that goes on `stream` now, None being the compute stream.

        Devices take no notice: the ordering check (`device/ordering.py`) and the trace (`device/trace.py`) do. A
        generator costs nothing elsewhere.
        """
        return

    def end_kernel(self) -> None:
        """Say that the kernels declared so far have been put on the compute stream; what follows is other work."""
        return

    def peak_memory(self, work: Callable[[], object]) -> int | None:
        """Do `work` and say how many bytes of device memory it held at its peak, beyond what was held before.

        None, without doing it, on a device that does not know.
        """
        return None

    def capture(self, works: Sequence[Callable[[], object]]) -> list[Graph]:
        """Run each of `works`, then record it, on a device that `captures`; called within `compute`.

        A work touches memory that was there before and stays, and what it allocates itself, which the graphs have in
        common: it leaves no result there. It neither waits nor copies between host and device. Raises what went
        wrong; the device can be used as before then, and none of the graphs.
        """
        raise NotImplementedError(f"device {self.name} records no graphs")

    @abstractmethod
    def free_memory(self) -> int:
        """Bytes of device memory that could be allocated now."""

    @abstractmethod
    def total_memory(self) -> int:
        """Bytes of device memory in all."""

    @abstractmethod
    def free_host_memory(self) -> int:
        """Bytes of host memory that could be allocated now."""

    @abstractmethod
    def close(self) -> None:
        """End the streams. Safe to call twice."""
