"""The ordering check: a device that finds every pair of conflicting accesses that are not ordered.

It wraps any device and follows the work of its streams in the order of submission. Each stream and the host has a
vector clock. Recording an event stores the clock of the stream; waiting for the event joins the stored clock into that
of the waiting stream (Fidge and Mattern, 1988). Every copy and every declared kernel states the bytes that it reads and
writes. Of two accesses to the same bytes, one of them a write, the clocks must order one before the other, whether or
not they collided in this execution.

The compute stream counts as asynchronous on every device, as on CUDA.
"""

from __future__ import annotations

import bisect
import math
import mmap
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from nanovllm.device.base import CallStream, Device, Event, HostTask, PitchedCopy, Stream
from nanovllm.device.wrapper import DeviceWrapper, StreamWrapper

GRANULE = 16  # bytes tracked together, or fewer if a row is not a multiple
SMALL_GRANULE = 4  # in memory with elements of one byte, whose rows end with a scale of four

Clock = dict[str, int]


class OrderingError(AssertionError):
    """Two unordered accesses, or a wait for an event that was never recorded."""


@dataclass(frozen=True, slots=True)
class Access:
    """A copy or kernel that uses memory; `time` is the clock of its stream at submission."""

    what: str
    stream: str
    time: int


@dataclass(frozen=True, slots=True)
class Rows:
    """`height` rows of `width` bytes, `pitch` bytes apart, from address `start`."""

    start: int
    pitch: int
    width: int
    height: int


class Granules(NamedTuple):
    """The granules of some rows of one allocation, as the fields of `Rows` count bytes."""

    start: int
    pitch: int
    width: int
    height: int

    def of(self, shadow: np.ndarray) -> np.ndarray:
        """Their entries of a shadow, `[height, width]`, without a copy."""
        strides = self.pitch * shadow.itemsize, shadow.itemsize
        return np.ndarray((self.height, self.width), shadow.dtype, shadow, self.start * shadow.itemsize, strides)


def zeros_on_demand(count: int) -> np.ndarray:
    """Zeros (int32) that take memory where they are written. np.zeros may reuse freed memory, and then fills it."""
    return np.frombuffer(mmap.mmap(-1, 4 * max(count, 1)), dtype=np.int32)[:count]


class Memory:
    """The shadow of one allocation: for each granule its last writer, and its last reader in each stream."""

    def __init__(self, name: str, tensor: Tensor) -> None:
        self.name = name
        self._tensor = tensor  # keeps the addresses from being reused
        self.start = tensor.data_ptr()
        self._pool_shape = tensor.shape[:-4]  # of pieces `[2, kv_heads, block_size, head_dim]`
        row_bytes = tensor.shape[-1] * tensor.element_size()
        self.granule = SMALL_GRANULE if tensor.element_size() == 1 else math.gcd(GRANULE, row_bytes)
        self._piece_granules = math.prod(tensor.shape[-4:]) * tensor.element_size() // self.granule
        self.writer = zeros_on_demand(-(-tensor.nbytes // self.granule))
        self.readers: dict[str, np.ndarray] = {}

    def piece(self, granule: int) -> str:
        """The piece of the pool that holds a granule, such as "host blocks[3, 0]" (block, layer)."""
        index = np.unravel_index(granule // self._piece_granules, self._pool_shape)
        return f"{self.name}{[int(i) for i in index]}"


class CheckedEvent(Event):
    def __init__(self, inner: Event) -> None:
        self.inner = inner
        self.clock: Clock | None = None


class CheckedStream(StreamWrapper):
    """A stream with its vector clock."""

    def __init__(self, inner: Stream, name: str, host_clock: Clock, lock: threading.RLock) -> None:
        """lock: of all clocks of the device."""
        super().__init__(inner)
        self.name = name
        self.clock: Clock = {}
        self.follows = np.zeros(0, dtype=bool)  # by the number of an access, where it was found to be ordered before
        self._host_clock = host_clock
        self._lock = lock

    def advance(self) -> int:
        """Submit work, ordered after all that the host has waited for. Returns the time of the stream."""
        join(self.clock, self._host_clock)
        self.clock[self.name] = self.clock.get(self.name, 0) + 1
        return self.clock[self.name]

    def record(self, event: Event) -> None:
        assert isinstance(event, CheckedEvent)
        with self._lock:
            self.advance()
            event.clock = dict(self.clock)
        self.inner.record(event.inner)

    def wait(self, event: Event) -> None:
        assert isinstance(event, CheckedEvent)
        if event.clock is None:
            raise OrderingError(f"stream {self.name} waits for an event that was never recorded")
        with self._lock:
            join(self.clock, event.clock)
        self.inner.wait(event.inner)

    def synchronize(self) -> None:
        with self._lock:
            join(self._host_clock, self.clock)
        self.inner.synchronize()


class CheckedCallStream(CheckedStream, CallStream):
    """A stream of host tasks, whose accesses are declared at launch."""

    def launch(self, task: HostTask) -> None:
        assert isinstance(self.inner, CallStream)
        self.inner.launch(task)


class OrderingCheck(DeviceWrapper):
    """A device that raises OrderingError when a submitted access is not ordered after a conflicting one."""

    def __init__(self, inner: Device) -> None:
        super().__init__(inner)
        self._host_clock: Clock = {}  # one for all threads: a thread that submits work follows what others waited for
        self._lock = threading.RLock()
        self._compute = self._checked(inner.compute_stream, "compute")
        self._host = self._checked(inner.compute_stream, "host")  # what the host does itself, in its order
        self._host.clock = self._host_clock
        self.compute_stream = self._compute
        self._memories: list[Memory] = []  # by address
        self._accesses: list[Access] = [Access("nothing", "", 0)]  # index 0: not written yet
        self.num_checked = 0

    def new_stream(self, name: str) -> Stream:
        return self._checked(self.inner.new_stream(name), name)

    def _checked(self, inner: Stream, name: str) -> CheckedStream:
        return CheckedStream(inner, name, self._host_clock, self._lock)

    def new_call_stream(self, name: str) -> CallStream:
        return CheckedCallStream(self.inner.new_call_stream(name), name, self._host_clock, self._lock)

    def new_event(self) -> Event:
        return CheckedEvent(self.inner.new_event())

    def wait_for(self, event: Event) -> None:
        assert isinstance(event, CheckedEvent)
        if event.clock is not None:
            with self._lock:
                join(self._host_clock, event.clock)
        self.inner.wait_for(event.inner)

    def empty(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self._shadowed(name, self.inner.empty(name, shape, dtype))

    def empty_host(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self._shadowed(name, self.inner.empty_host(name, shape, dtype))

    def copy_2d(self, copy: PitchedCopy, stream: Stream) -> int:
        assert isinstance(stream, CheckedStream)
        reads = [Rows(copy.src.data_ptr(), copy.spitch, copy.width, copy.height)]
        writes = [Rows(copy.dst.data_ptr(), copy.dpitch, copy.width, copy.height)]
        self._check(f"{copy.kind} copy", stream, reads, writes)
        return self.inner.copy_2d(copy, stream.inner)

    def declare_kernel(
        self, name: str, reads: Iterable[Tensor] = (), writes: Iterable[Tensor] = (), stream: Stream | None = None
    ) -> None:
        on = self._compute if stream is None else stream
        assert isinstance(on, CheckedStream)
        reads = tuple(reads)
        writes = tuple(writes)
        self._check(f"kernel {name!r}", on, [rows_of(t) for t in reads], [rows_of(t) for t in writes])
        self.inner.declare_kernel(name, reads, writes, None if stream is None else on.inner)

    def declare_host_access(self, name: str, reads: Iterable[Tensor] = (), writes: Iterable[Tensor] = ()) -> None:
        self._check(f"host's {name!r}", self._host, [rows_of(t) for t in reads], [rows_of(t) for t in writes])

    def read(self, tensor: Tensor) -> Callable[[], Tensor]:
        """When the tensor is there the host has waited for all that was computed before."""
        with self._lock:
            clock = dict(self._compute.clock)
        inner = self.inner.read(tensor)

        def wait() -> Tensor:
            with self._lock:
                join(self._host_clock, clock)
            return inner()

        return wait

    # ---- the check

    def _shadowed(self, name: str, tensor: Tensor) -> Tensor:
        bisect.insort(self._memories, Memory(name, tensor), key=lambda memory: memory.start)
        return tensor

    def _check(self, what: str, stream: CheckedStream, reads: Sequence[Rows], writes: Sequence[Rows]) -> None:
        with self._lock:
            access = Access(what, stream.name, stream.advance())
            self._accesses.append(access)
            self.num_checked += 1
            number = len(self._accesses) - 1
            if number >= stream.follows.size:
                stream.follows = np.concatenate((stream.follows, np.zeros(number + 1, dtype=bool)))
            for rows in reads:
                located = self._memory_of(rows)
                if located is not None:
                    memory, granules = located
                    self._require_order(stream, access, "reads", memory, granules, memory.writer)
                    if stream.name not in memory.readers:
                        memory.readers[stream.name] = zeros_on_demand(memory.writer.size)
                    granules.of(memory.readers[stream.name])[...] = number
            for rows in writes:
                located = self._memory_of(rows)
                if located is not None:
                    memory, granules = located
                    for seen in (memory.writer, *memory.readers.values()):
                        self._require_order(stream, access, "writes", memory, granules, seen)
                    granules.of(memory.writer)[...] = number

    def _memory_of(self, rows: Rows) -> tuple[Memory, Granules] | None:
        """The memory in which the rows are, and their granules. None: this device did not allocate it."""
        index = bisect.bisect_right(self._memories, rows.start, key=lambda memory: memory.start) - 1
        if index < 0:
            return None
        memory = self._memories[index]
        first = rows.start - memory.start
        size = memory.granule
        if first >= memory.writer.size * size:
            return None
        pitch = rows.pitch if rows.height > 1 else rows.width
        assert first % size == rows.width % size == pitch % size == 0
        return memory, Granules(first // size, pitch // size, rows.width // size, rows.height)

    def _require_order(
        self, stream: CheckedStream, access: Access, verb: str, memory: Memory, granules: Granules, shadow: np.ndarray
    ) -> None:
        seen = granules.of(shadow)
        if stream.follows.take(seen).all():
            return
        for number in np.unique(seen):
            earlier = self._accesses[number]
            if earlier.time > stream.clock.get(earlier.stream, 0):
                row, column = np.argwhere(seen == number)[0]
                piece = memory.piece(granules.start + row * granules.pitch + column)
                raise OrderingError(
                    f"{access.what} on stream {access.stream} {verb} {piece}, and nothing orders it "
                    f"after the {earlier.what} on stream {earlier.stream}"
                )
            stream.follows[number] = True  # for good: its clock never goes back


def join(clock: Clock, other: Clock) -> None:
    """Set `clock` to the later of both times for each stream."""
    for stream, time in other.items():
        clock[stream] = max(clock.get(stream, 0), time)


def rows_of(tensor: Tensor) -> Rows:
    """The rows of a part `[2, kv_heads, tokens, head_dim]` of a KV block with contiguous heads.

    A tensor of one dimension is contiguous and one row.
    """
    if tensor.dim() == 1:
        return Rows(tensor.data_ptr(), tensor.nbytes, tensor.nbytes, 1)
    heads = tensor.shape[0] * tensor.shape[1]
    size = tensor.element_size()
    return Rows(tensor.data_ptr(), tensor.stride(1) * size, tensor.numel() // heads * size, heads)
