"""The interface of a device: memory of two kinds, streams, events and a strided copy.

The semantics are those of CUDA. Work on one stream runs in order. Work on two streams is unordered unless an event
orders it: `a.record(e); b.wait(e)` orders all later work on `b` after all earlier work on `a`. A wait refers to the
latest record of the event at the time of the call; a wait for an event that was never recorded does nothing.

Several threads may submit work, each to streams that no other thread uses meanwhile.
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
    """A point in the work of a stream. Each device has its own subclass."""


class Mark(ABC):
    """A point in the work of a stream, with the time at which the stream reached it."""

    @abstractmethod
    def seconds(self) -> float | None:
        """The time on a clock that all streams of the device share; None before the stream reaches the mark."""


class Stream(ABC):
    """A queue of work that runs in order, concurrently with the host and other streams."""

    @abstractmethod
    def record(self, event: Event) -> None:
        """`event` happens when all work submitted to this stream so far is done."""

    @abstractmethod
    def wait(self, event: Event) -> None:
        """Work submitted from now on starts after the latest record of `event`."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block the host until all work on this stream is done. Raises EngineError if any of it failed."""

    @abstractmethod
    def mark(self) -> Mark:
        """Return a mark that tells when the work submitted so far was done."""


class HostTask(Protocol):
    """Work on host memory that a stream runs: a C function with its data.

    The task uses neither Python nor the device. A task that needed the GIL would deadlock with a thread that holds the
    GIL and waits for the stream.
    """

    def take(self) -> tuple[int, int]:
        """Addresses of a function `void f(void *)` and its argument. The call does the work and frees the argument."""
        ...

    def drop(self, data: int) -> None:
        """Free an argument from `take` whose function will not be called."""
        ...

    def failure(self) -> str | None:
        """The error of the run, or None."""
        ...


class CallStream(Stream):
    """A stream whose work runs on host cores, concurrently with the submitting thread."""

    @abstractmethod
    def launch(self, task: HostTask) -> None:
        """Submit `task`. An error of the task is a failure of the stream."""


class Graph(Protocol):
    """Recorded work of the compute stream that one call submits again, as a `torch.cuda.CUDAGraph` does."""

    def replay(self) -> None:
        """Run the recorded kernels on the current contents of their memory. Call it within `compute`."""
        ...


RecordedWork = Callable[[Callable[[], None]], object]  # see `Device.capture`


class Device(ABC):
    """Memory, streams and copies of one device."""

    name: str
    torch_device: torch.device
    compute_stream: Stream  # where the model runs
    # The compute stream runs on the host's cores and its kernels read host memory like device memory, so that a call
    # stream would only compete for cores.
    shares_host: bool
    captures: bool = False  # records graphs
    host_memory_may_grow: bool = False  # `empty_host` may succeed with more than `free_host_memory`, as on some VMs

    def compute(self) -> AbstractContextManager[None]:
        """A context in which torch submits its work to the compute stream."""
        return nullcontext()

    @abstractmethod
    def new_stream(self, name: str) -> Stream: ...

    @abstractmethod
    def new_call_stream(self, name: str) -> CallStream: ...

    @abstractmethod
    def new_event(self) -> Event: ...

    @abstractmethod
    def wait_for(self, event: Event) -> None:
        """Block the calling thread until the latest record of `event` is reached. Raises EngineError if work before it
        failed."""

    @abstractmethod
    def empty(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Uninitialised device memory. `name` describes its use in error messages."""

    @abstractmethod
    def empty_host(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Uninitialised host memory that copies reach directly (pinned, on CUDA)."""

    @abstractmethod
    def mapped(self, host: Tensor) -> Tensor | None:
        """Memory of `empty_host` as kernels of the device read and write it, over the link; None if they cannot."""

    @abstractmethod
    def copy_2d(self, copy: PitchedCopy, stream: Stream) -> int:
        """Submit a copy to `stream`, which is not the compute stream. Returns the number of copies: 1, or one per row
        if a pitch exceeds the limit of the device."""

    def rows_in_reach(self, host: Tensor) -> int:
        """The number n of consecutive `host[i]` that one copy may cover; no copy may cross a multiple of n."""
        return len(host)

    @abstractmethod
    def link_busy(self) -> Busy:
        """Bytes copied to the device so far, and the time during which such copies ran. Does not wait."""

    def declare_kernel(
        self, name: str, reads: Iterable[Tensor] = (), writes: Iterable[Tensor] = (), stream: Stream | None = None
    ) -> None:
        """Announce the memory that the next kernel on `stream` reads and writes; None means the compute stream.

        Only the trace (`device/trace.py`) and the tests' ordering check (`tests/ordering_check.py`) use it. Pass
        generators: other devices never evaluate them.
        """
        return

    def end_kernel(self) -> None:
        """Announce that the declared kernels have been submitted and that other work follows."""
        return

    def declare_host_access(self, name: str, reads: Iterable[Tensor] = (), writes: Iterable[Tensor] = ()) -> None:
        """Announce the host memory that the calling thread uses itself from now on. See `declare_kernel`."""
        return

    def peak_memory(self, work: Callable[[], object]) -> int | None:
        """Run `work` and return its peak device memory in bytes, beyond what was allocated before.

        A device that cannot measure returns None and does not run `work`.
        """
        return None

    def capture(self, works: Sequence[RecordedWork]) -> list[list[Graph]]:
        """Run each of `works`, then record it, on a device that `captures`; call it within `compute`.

        Gives each work's graphs, in the order in which they must be replayed. A work calls its argument where a graph
        ends and another begins, between which other work may be submitted.

        A work may use memory that exists before and after, and memory that it allocates itself. Tensors that it still
        refers to when it is done hold their results until graphs of another work are replayed, with which they may
        share their memory. A work neither waits nor copies between host and device. Raises the error of a failed work;
        the device stays usable, the graphs do not.
        """
        raise NotImplementedError(f"device {self.name} records no graphs")

    def read(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Start to copy a small tensor of the compute stream to the host; call it within `compute`.

        The result waits for the copy, and for nothing that is submitted later.
        """
        copied = tensor.clone()
        return lambda: copied

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
        """Stop the streams. Safe to call twice."""
