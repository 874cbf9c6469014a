"""A timeline of copies and kernels as a Chrome trace, with one row per stream.

The file opens in https://ui.perfetto.dev and chrome://tracing. Marks on the stream time copies, host tasks and waits of
the compute stream. A kernel lasts from its declaration to `end_kernel` or the next event on the compute stream. Marks
are read after the stream has passed them, so tracing never waits. Work of the compute stream names its layer. The
linear layers are traced in the model, where nothing else declares them.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from nanovllm.device.base import CallStream, Device, Event, HostTask, Mark, PitchedCopy, Stream
from nanovllm.device.busy import times_of
from nanovllm.device.wrapper import DeviceWrapper, StreamWrapper
from nanovllm.errors import EngineError

COMPUTE = "compute"


@dataclass(slots=True)
class Slice:
    """Work of a stream between two marks."""

    name: str
    stream: str
    begin: Mark
    end: Mark
    facts: dict[str, int]


@dataclass(slots=True)
class OpenKernel:
    """Consecutive kernels of one name and layer that have not ended yet."""

    name: str
    begin: Mark
    layer: int | None
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
            begin = times[0] * 1e6
            duration = (times[1] - times[0]) * 1e6
            event = {"ph": "X", "name": piece.name, "pid": 0, "tid": piece.stream, "ts": begin, "dur": duration}
            self.events.append(event | {"args": piece.facts})

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
        self.declared = ("call", 0)  # name, bytes
        self._calls = inner
        self._device = device

    def launch(self, task: HostTask) -> None:
        begin = self._calls.mark()
        self._calls.launch(task)
        (name, num_bytes) = self.declared
        self.declared = ("call", 0)
        self._device.add(name, self.name, begin, self._calls.mark(), bytes=num_bytes)


class TracedCompute(StreamWrapper):
    """The compute stream. A wait ends the current kernel and is a slice of its own."""

    def __init__(self, device: TracedDevice) -> None:
        super().__init__(device.inner.compute_stream)
        self._device = device

    def wait(self, event: Event) -> None:
        self._device.end_kernel()
        begin = self.inner.mark()
        super().wait(event)
        self._device.add("wait", COMPUTE, begin, self.inner.mark(), self._device.layer)


class TracedDevice(DeviceWrapper):
    """A device that records its work and writes the trace to `path` when it closes."""

    def __init__(self, inner: Device, path: str | Path) -> None:
        super().__init__(inner)
        self.compute_stream = TracedCompute(self)
        self.timeline = Timeline()
        self._path = Path(path)
        self._streams: list[TracedStream] = []
        self._kernel: OpenKernel | None = None
        self.layer: int | None = None  # that the compute stream is in
        self._closed = False

    def wrap(self, owner: object, method: str, name: str, layer: int | None) -> None:
        """Trace the calls of a method as kernels of a layer; None: of the model outside its layers."""
        work: Callable[..., Any] = getattr(owner, method)

        def traced(*args: Any, **others: Any) -> Any:
            self.layer = layer
            self._open_kernel(name, sum(arg.nbytes for arg in args if isinstance(arg, Tensor)))
            result = work(*args, **others)
            if layer is None:
                self.end_kernel()
            return result

        setattr(owner, method, traced)

    @contextmanager
    def compute(self) -> Iterator[None]:
        with self.inner.compute():
            begin = self.inner.compute_stream.mark()
            try:
                yield
            finally:
                self.end_kernel()
                self.layer = None
                self.add("step", COMPUTE, begin, self.inner.compute_stream.mark())
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
        self.add(f"{copy.kind} copy", stream.name, begin, stream.inner.mark(), **facts)
        return count

    def declare_kernel(
        self, name: str, reads: Iterable[Tensor] = (), writes: Iterable[Tensor] = (), stream: Stream | None = None
    ) -> None:
        reads = tuple(reads)
        writes = tuple(writes)
        num_bytes = sum(tensor.nbytes for tensor in (*reads, *writes))
        if stream is None:
            self._open_kernel(name, num_bytes)
        else:
            assert isinstance(stream, TracedCallStream)
            stream.declared = (name, num_bytes)
        self.inner.declare_kernel(name, reads, writes, None if stream is None else stream.inner)

    def _open_kernel(self, name: str, num_bytes: int) -> None:
        """Begin a kernel, or continue the open one of the same name."""
        if self._kernel is None or self._kernel.name != name:
            self.end_kernel()
            self._kernel = OpenKernel(name, self.inner.compute_stream.mark(), self.layer)
        self._kernel.count += 1
        self._kernel.num_bytes += num_bytes

    def end_kernel(self) -> None:
        kernel = self._kernel
        self._kernel = None
        if kernel is not None:
            facts = {"declared": kernel.count, "bytes": kernel.num_bytes}
            self.add(kernel.name, COMPUTE, kernel.begin, self.inner.compute_stream.mark(), kernel.layer, **facts)
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

    def add(self, name: str, stream: str, begin: Mark, end: Mark, layer: int | None = None, **facts: int) -> None:
        """Record the work of a stream between two marks."""
        found = facts if layer is None else {"layer": layer, **facts}
        self.timeline.slices.append(Slice(name, stream, begin, end, found))
