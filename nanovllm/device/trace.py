"""A timeline of an engine's work as a Chrome trace, by torch's profiler.

The file opens in https://ui.perfetto.dev and chrome://tracing. The profiler records what torch and the GPU do. This
device adds a range for each step, for each kernel between its declaration and `end_kernel`, and for each wait of the
compute stream, which takes time on the CPU only. `CpuDevice` adds its copies.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from nanovllm.device.base import Device, Event, Stream
from nanovllm.device.wrapper import DeviceWrapper, StreamWrapper
from nanovllm.errors import ConfigError, EngineError


class TracedCompute(StreamWrapper):
    """The compute stream. A wait ends the current kernel and is a range of its own."""

    def __init__(self, device: TracedDevice) -> None:
        super().__init__(device.inner.compute_stream)
        self._device = device

    def wait(self, event: Event) -> None:
        self._device.end_kernel()
        with record_function("wait"):
            super().wait(event)


class TracedDevice(DeviceWrapper):
    """A device that is profiled from `start` on and writes the trace to `path` when it closes."""

    def __init__(self, inner: Device, path: str | Path) -> None:
        super().__init__(inner)
        self.compute_stream = TracedCompute(self)
        self._path = Path(path)
        self._kernel: record_function | None = None
        self._profile: profile | None = None
        self._stop: Callable[[], object] = lambda: None

    def start(self) -> None:
        """Begin the trace. Raises ConfigError while this process is profiled already: torch would crash."""
        if torch.autograd.profiler._is_profiler_enabled:
            says = "torch's profiler runs in this process already, perhaps for another engine's trace: end it first"
            raise ConfigError(f"trace={str(self._path)!r}: {says}")
        on_gpu = [ProfilerActivity.CUDA] if self.torch_device.type == "cuda" else []
        threads = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)  # copies on the CPU have their own
        self._profile = profile(activities=[ProfilerActivity.CPU, *on_gpu], experimental_config=threads)
        self._profile.start()
        # An engine that nobody closes ends the profile too: torch crashes at exit while it profiles.
        self._stop = weakref.finalize(self, self._profile.stop)

    @contextmanager
    def compute(self) -> Iterator[None]:
        with self.inner.compute(), record_function("step"):
            try:
                yield
            finally:
                self.end_kernel()

    def declare_kernel(
        self, name: str, reads: Iterable[Tensor] = (), writes: Iterable[Tensor] = (), stream: Stream | None = None
    ) -> None:
        if stream is None:
            self.end_kernel()
            self._kernel = record_function(name)
            self._kernel.__enter__()
        self.inner.declare_kernel(name, reads, writes, stream)

    def end_kernel(self) -> None:
        if self._kernel is not None:
            self._kernel.__exit__(None, None, None)
            self._kernel = None
        self.inner.end_kernel()

    def close(self) -> None:
        """Close the device and write the file. Raises EngineError if the file cannot be written."""
        self.inner.close()
        profiler = self._profile
        self._profile = None
        if profiler is None:
            return
        self._stop()
        try:
            profiler.export_chrome_trace(str(self._path))
        except (OSError, RuntimeError) as error:
            raise EngineError(f"trace={str(self._path)!r}: the file cannot be written: {error}") from error
