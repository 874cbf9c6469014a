"""A timeline of copies and kernels as a Chrome trace, with one row per stream.

The file opens in https://ui.perfetto.dev and chrome://tracing. Marks on the stream time copies, host tasks and waits of
the compute stream. A kernel lasts from its declaration to `end_kernel` or the next event on the compute stream. Marks
are read after the stream has passed them, so tracing never waits. Events name their layer, the physical ids of their KV
blocks and the requests that use these. The linear layers are traced in the model, where nothing else declares them.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanovllm.data.batch import ScheduledSequence
from nanovllm.data.kv_groups import KVGroups
from nanovllm.device.base import CallStream, Device, Event, HostTask, Mark, PitchedCopy, Stream
from nanovllm.device.busy import times_of
from nanovllm.device.trace_blocks import TracedBlocks, Uses
from nanovllm.device.wrapper import DeviceWrapper, StreamWrapper
from nanovllm.errors import EngineError

COMPUTE = "compute"
ATTEND = "attend"  # the kernel after which a ring slot is free


@dataclass(slots=True)
class Slice:
    """Work of a stream between two marks."""

    name: str
    stream: str
    begin: Mark
    end: Mark
    facts: dict[str, int]
    uses: Uses


@dataclass(slots=True)
class OpenKernel:
    """Consecutive kernels of one name and layer that have not ended yet."""

    name: str
    begin: Mark
    uses: Uses
    count: int = 0
    num_bytes: int = 0


@dataclass(slots=True)
class Timeline:
    """Slices under way, and finished ones as complete events of the trace format, by the name of their stream."""

    slices: deque[Slice] = field(default_factory=deque)  # several threads append
    events: list[dict[str, Any]] = field(default_factory=list)

    def settle(self) -> None:
        """Turn finished slices into events and drop their marks."""
        for _ in range(len(self.slices)):
            piece = self.slices.popleft()
            times = times_of(piece.begin, piece.end)
            if times is None:
                self.slices.append(piece)
                continue
            begin, duration = times[0] * 1e6, (times[1] - times[0]) * 1e6
            event = {"ph": "X", "name": piece.name, "pid": 0, "tid": piece.stream, "ts": begin, "dur": duration}
            self.events.append(event | {"args": piece.facts | piece.uses.facts()})

    def chrome(self, process: str, streams: Sequence[str]) -> dict[str, Any]:
        """The trace as JSON data: events in microseconds from the first one, one thread per stream."""
        start = min((event["ts"] for event in self.events), default=0.0)
        rows = {name: row for row, name in enumerate(streams)}
        named: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": 0, "args": {"name": process}}]
        for name, row in rows.items():
            named.append({"ph": "M", "name": "thread_name", "pid": 0, "tid": row, "args": {"name": name}})
            named.append({"ph": "M", "name": "thread_sort_index", "pid": 0, "tid": row, "args": {"sort_index": row}})
        complete = [event | {"tid": rows[event["tid"]], "ts": event["ts"] - start} for event in self.events]
        return {"traceEvents": named + sorted(complete, key=lambda event: event["ts"]), "displayTimeUnit": "ms"}


class TracedStream(StreamWrapper):
    def __init__(self, inner: Stream, name: str) -> None:
        super().__init__(inner)
        self.name = name


class TracedCallStream(TracedStream, CallStream):
    """A host task is a slice with the name of the kernel declared for it."""

    def __init__(self, inner: CallStream, name: str, device: TracedDevice) -> None:
        super().__init__(inner, name)
        self.declared = ("call", 0, Uses())  # name, bytes, what it is about
        self._calls = inner
        self._device = device

    def launch(self, task: HostTask) -> None:
        begin = self._calls.mark()
        self._calls.launch(task)
        (name, num_bytes, uses), self.declared = self.declared, ("call", 0, Uses())
        self._device.add(name, self.name, begin, self._calls.mark(), uses, bytes=num_bytes)


class TracedCompute(StreamWrapper):
    """The compute stream. A wait ends the current kernel and is a slice of its own."""

    def __init__(self, device: TracedDevice) -> None:
        super().__init__(device.inner.compute_stream)
        self._device = device

    def wait(self, event: Event) -> None:
        self._device.end_kernel()
        begin = self.inner.mark()
        super().wait(event)
        self._device.add("wait", COMPUTE, begin, self.inner.mark(), self._device.in_layer())


class TracedDevice(DeviceWrapper):
    """A device that records its work and writes the trace to `path` when it closes."""

    def __init__(self, inner: Device, path: str | Path) -> None:
        super().__init__(inner)
        self.compute_stream = TracedCompute(self)
        self.timeline = Timeline()
        self._path = Path(path)
        self._streams: list[TracedStream] = []
        self._kernel: OpenKernel | None = None
        self._blocks = TracedBlocks()
        self._step = Uses()
        self._layer: int | None = None  # that the compute stream is in
        self._closed = False

    def wrap(self, owner: object, method: str, name: str, layer: int | None) -> None:
        """Trace the calls of a method as kernels of a layer; None: of the model outside its layers."""
        work: Callable[..., Any] = getattr(owner, method)

        def traced(*args: Any, **others: Any) -> Any:
            self._layer = layer
            num_bytes = sum(arg.nbytes for arg in args if isinstance(arg, Tensor))
            self._open_kernel(name, num_bytes, self.in_layer())
            result = work(*args, **others)
            if layer is None:
                self.end_kernel()
            return result

        setattr(owner, method, traced)

    def trace_groups(self, groups: KVGroups) -> None:
        """The KV pools that will be allocated have the planes of these groups."""
        self._blocks.groups = groups

    def begin_step(self, sequences: Iterable[ScheduledSequence]) -> None:
        """Work from now on belongs to a step of these sequences."""
        self._step = self._blocks.begin_step(sequences)

    def in_layer(self) -> Uses:
        """What the compute stream's work is about, as far as it is known without addresses."""
        return Uses(layers=set() if self._layer is None else {self._layer}, requests=dict(self._step.requests))

    def empty(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self._blocks.add(name, self.inner.empty(name, shape, dtype))

    def empty_host(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self._blocks.add(name, self.inner.empty_host(name, shape, dtype))

    @contextmanager
    def compute(self) -> Iterator[None]:
        with self.inner.compute():
            begin = self.inner.compute_stream.mark()
            try:
                yield
            finally:
                self.end_kernel()
                self._layer = None
                self.add("step", COMPUTE, begin, self.inner.compute_stream.mark(), self._step)
                self.timeline.settle()

    def new_stream(self, name: str) -> Stream:
        stream = TracedStream(self.inner.new_stream(name), name)
        self._streams.append(stream)
        return stream

    def new_call_stream(self, name: str) -> CallStream:
        stream = TracedCallStream(self.inner.new_call_stream(name), name, self)
        self._streams.append(stream)
        return stream

    def copy_2d(self, copy: PitchedCopy, stream: Stream) -> int:
        assert isinstance(stream, TracedStream)
        begin = stream.inner.mark()
        count = self.inner.copy_2d(copy, stream.inner)
        facts = {"bytes": copy.width * copy.height, "rows": copy.height, "copies": count}
        self.add(f"{copy.kind} copy", stream.name, begin, stream.inner.mark(), self._blocks.copied(copy), **facts)
        return count

    def declare_kernel(
        self, name: str, reads: Iterable[Tensor] = (), writes: Iterable[Tensor] = (), stream: Stream | None = None
    ) -> None:
        reads, writes = tuple(reads), tuple(writes)
        num_bytes = sum(tensor.nbytes for tensor in (*reads, *writes))
        uses = Uses(layers=set() if self._layer is None else {self._layer})
        if stream is None:
            uses = self._open_kernel(name, num_bytes, uses)
        else:
            assert isinstance(stream, TracedCallStream)
            stream.declared = (name, num_bytes, uses)
        self._blocks.use((*reads, *writes), uses, ends_slots=name == ATTEND)
        self.inner.declare_kernel(name, reads, writes, None if stream is None else stream.inner)

    def _open_kernel(self, name: str, num_bytes: int, uses: Uses) -> Uses:
        """Begin a kernel, or continue the open one of the same name. Returns what it is about, for more to be added."""
        if self._kernel is None or self._kernel.name != name:
            self.end_kernel()
            self._kernel = OpenKernel(name, self.inner.compute_stream.mark(), uses)
        self._kernel.count += 1
        self._kernel.num_bytes += num_bytes
        return self._kernel.uses

    def end_kernel(self) -> None:
        kernel, self._kernel = self._kernel, None
        if kernel is not None:
            facts = {"declared": kernel.count, "bytes": kernel.num_bytes}
            self.add(kernel.name, COMPUTE, kernel.begin, self.inner.compute_stream.mark(), kernel.uses, **facts)
        self.inner.end_kernel()

    def close(self) -> None:
        """Wait for all work, close the device and write the file. Raises EngineError if the file cannot be written."""
        if self._closed:
            return
        self._closed = True
        for stream in [*self._streams, self.compute_stream]:
            with suppress(EngineError):  # already raised to the caller that waited
                stream.synchronize()
        self.timeline.settle()
        self.inner.close()
        names = [COMPUTE, *(stream.name for stream in self._streams)]
        try:
            self._path.write_text(json.dumps(self.timeline.chrome(f"nanovllm on {self.name}", names)) + "\n")
        except OSError as error:
            raise EngineError(f"trace={str(self._path)!r}: the file cannot be written: {error}") from error

    def trace_model(self, model: Any) -> None:
        """Trace the linear layers of a `Decoder`, with the norms and the rest of the row-wise work around them."""
        for index, layer in enumerate(model.layers):
            if model.spec.is_recurrent(index):
                self.wrap(layer, "recur_", "norm, projections, recurrence", index)
            else:
                self.wrap(layer, "project", "norm, QKV, RoPE", index)
            self.wrap(layer, "finish_", "output projection, MLP", index)
        self.wrap(model, "embed", "embedding", None)
        self.wrap(model, "normalize_", "final norm", None)
        self.wrap(model, "compute_logits", "logits", None)

    def add(self, name: str, stream: str, begin: Mark, end: Mark, uses: Uses, **facts: int) -> None:
        """Record the work of a stream between two marks."""
        self.timeline.slices.append(Slice(name, stream, begin, end, facts, uses))
