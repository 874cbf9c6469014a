"""Proof of ordering: a device that finds every pair of conflicting accesses with no order between them.

It wraps any device and follows what is put on its streams, in the order in which the host puts it there. Each stream,
and the host, has a vector clock; recording an event keeps the stream's clock, waiting for it joins that clock in (Fidge
and Mattern, 1988). Every copy, and every kernel that is declared, says which bytes it reads and writes. Two accesses to
the same bytes, one of them a write, must be ordered by the clocks; whether they happened to collide plays no part.

The compute stream counts as asynchronous, as it is on CUDA, also on devices where it is not.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nanovllm.device.base import CallStream, Device, Event, HostTask, PitchedCopy, Stream
from nanovllm.device.wrapper import DeviceWrapper, StreamWrapper

GRANULE = 16  # bytes that are tracked as one: every row of a KV block is a multiple of it

Clock = dict[str, int]


class OrderingError(AssertionError):
    """Two accesses that nothing orders, or a wait for an event that was never recorded."""


@dataclass(frozen=True, slots=True)
class Access:
    """One copy's or kernel's use of memory: `time` is its own stream's clock when it was put there."""

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


class Memory:
    """The shadow of one allocation: for each granule, who wrote it last and who has read it since, by stream."""

    def __init__(self, name: str, tensor: Tensor) -> None:
        self.name = name
        self._tensor = tensor  # kept, so that nobody else is given its addresses
        self.start = tensor.data_ptr()
        self._pool_shape = tensor.shape[:-4]  # of pieces `[2, kv_heads, block_size, head_dim]`
        self._piece_granules = math.prod(tensor.shape[-4:]) * tensor.element_size() // GRANULE
        self.writer = np.zeros(-(-tensor.nbytes // GRANULE), dtype=np.int32)
        self.readers: dict[str, np.ndarray] = {}

    def piece(self, granule: int) -> str:
        """Which piece of the pool a granule belongs to, such as "host blocks[3, 0]" (block, layer)."""
        index = np.unravel_index(granule // self._piece_granules, self._pool_shape)
        return f"{self.name}{[int(i) for i in index]}"


class CheckedEvent(Event):
    def __init__(self, inner: Event) -> None:
        self.inner = inner
        self.clock: Clock | None = None


class CheckedStream(StreamWrapper):
    """Follows the clock of one stream."""

    def __init__(self, inner: Stream, name: str, host_clock: Clock) -> None:
        super().__init__(inner)
        self.name = name
        self.clock: Clock = {}
        self._host_clock = host_clock

    def advance(self) -> int:
        """Something is put on the stream: it comes after what the host has waited for. Returns the stream's time."""
        join(self.clock, self._host_clock)
        self.clock[self.name] = self.clock.get(self.name, 0) + 1
        return self.clock[self.name]

    def record(self, event: Event) -> None:
        assert isinstance(event, CheckedEvent)
        self.advance()
        event.clock = dict(self.clock)
        self.inner.record(event.inner)

    def wait(self, event: Event) -> None:
        assert isinstance(event, CheckedEvent)
        if event.clock is None:
            raise OrderingError(f"stream {self.name} waits for an event that was never recorded")
        join(self.clock, event.clock)
        self.inner.wait(event.inner)

    def synchronize(self) -> None:
        join(self._host_clock, self.clock)
        self.inner.synchronize()


class CheckedCallStream(CheckedStream, CallStream):
    """A stream of host tasks. What they touch is declared when they are launched."""

    def launch(self, task: HostTask) -> None:
        assert isinstance(self.inner, CallStream)
        self.inner.launch(task)


class OrderingCheck(DeviceWrapper):
    """A device that raises OrderingError when something unordered is put on its streams."""

    def __init__(self, inner: Device) -> None:
        super().__init__(inner)
        self._host_clock: Clock = {}
        self._compute = CheckedStream(inner.compute_stream, "compute", self._host_clock)
        self.compute_stream = self._compute
        self._memories: list[Memory] = []  # by address
        self._accesses: list[Access] = [Access("nothing", "", 0)]  # index 0: not written yet
        self.num_checked = 0

    def new_stream(self, name: str) -> Stream:
        return CheckedStream(self.inner.new_stream(name), name, self._host_clock)

    def new_call_stream(self, name: str) -> CallStream:
        return CheckedCallStream(self.inner.new_call_stream(name), name, self._host_clock)

    def new_event(self) -> Event:
        return CheckedEvent(self.inner.new_event())

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
        reads, writes = tuple(reads), tuple(writes)
        self._check(f"kernel {name!r}", on, [rows_of(t) for t in reads], [rows_of(t) for t in writes])
        self.inner.declare_kernel(name, reads, writes, None if stream is None else on.inner)

    # ---- the check

    def _shadowed(self, name: str, tensor: Tensor) -> Tensor:
        bisect.insort(self._memories, Memory(name, tensor), key=lambda memory: memory.start)
        return tensor

    def _check(self, what: str, stream: CheckedStream, reads: Sequence[Rows], writes: Sequence[Rows]) -> None:
        access = Access(what, stream.name, stream.advance())
        self._accesses.append(access)
        self.num_checked += 1
        number = len(self._accesses) - 1
        for rows in reads:
            for memory, part in self._granules(rows):
                self._require_order(stream.clock, access, "reads", memory, part, memory.writer[part])
                if stream.name not in memory.readers:
                    memory.readers[stream.name] = np.zeros_like(memory.writer)
                memory.readers[stream.name][part] = number
        for rows in writes:
            for memory, part in self._granules(rows):
                for seen in (memory.writer, *memory.readers.values()):
                    self._require_order(stream.clock, access, "writes", memory, part, seen[part])
                memory.writer[part] = number

    def _granules(self, rows: Rows) -> list[tuple[Memory, slice]]:
        """The shadow of each row. Memory that was not allocated here is nobody's business."""
        index = bisect.bisect_right(self._memories, rows.start, key=lambda memory: memory.start) - 1
        if index < 0:
            return []
        memory = self._memories[index]
        first = rows.start - memory.start
        if first >= memory.writer.size * GRANULE:
            return []
        assert first % GRANULE == rows.width % GRANULE == (rows.pitch % GRANULE if rows.height > 1 else 0) == 0
        starts = range(first, first + rows.height * rows.pitch, rows.pitch) if rows.height > 1 else (first,)
        return [(memory, slice(start // GRANULE, (start + rows.width) // GRANULE)) for start in starts]

    def _require_order(
        self, clock: Clock, access: Access, verb: str, memory: Memory, part: slice, seen: np.ndarray
    ) -> None:
        for number in np.unique(seen):
            earlier = self._accesses[number]
            if earlier.time > clock.get(earlier.stream, 0):
                raise OrderingError(
                    f"{access.what} on stream {access.stream} {verb} {memory.piece(part.start)}, and nothing orders it "
                    f"after the {earlier.what} on stream {earlier.stream}"
                )


def join(clock: Clock, other: Clock) -> None:
    """clock becomes the latest of both, stream by stream."""
    for stream, time in other.items():
        clock[stream] = max(clock.get(stream, 0), time)


def rows_of(tensor: Tensor) -> Rows:
    """The rows of a part `[2, kv_heads, tokens, head_dim]` of a KV block, of which each head is contiguous.

    Anything of one dimension is contiguous and one row.
    """
    if tensor.dim() == 1:
        return Rows(tensor.data_ptr(), tensor.nbytes, tensor.nbytes, 1)
    heads, width = tensor.shape[0] * tensor.shape[1], tensor[0, 0].numel() * tensor.element_size()
    return Rows(tensor.data_ptr(), tensor.stride(1) * tensor.element_size(), width, heads)
