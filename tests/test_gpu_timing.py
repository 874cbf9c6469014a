"""Timing short GPU work: what is measured is the GPU, however slowly the host launches. The GPU is a model of one."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import gpu_timing
from benchmarks.gpu_timing import queued_seconds

LAUNCH, RUN = 30e-6, 4e-6  # seconds: the host needs longer than the GPU
CYCLES = 1e9  # the GPU's clock


class Gpu:
    """A stream that runs its work in order, and a host whose clock advances only when it launches."""

    def __init__(self) -> None:
        self.host = self.free = 0.0  # now; when the stream has done all that it was given
        self.slept: list[float] = []

    def run(self, seconds: float) -> None:
        self.free = max(self.free, self.host) + seconds

    def _sleep(self, cycles: int) -> None:
        self.slept.append(cycles / CYCLES)
        self.run(cycles / CYCLES)

    def synchronize(self) -> None:
        self.host = max(self.host, self.free)

    def Event(self, enable_timing: bool = False) -> Any:
        return Event(self)

    def work(self) -> None:
        self.host += LAUNCH
        self.run(RUN)


class Event:
    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.at = gpu, 0.0

    def record(self) -> None:
        self.at = max(self.gpu.free, self.gpu.host)

    def query(self) -> bool:
        return self.gpu.host >= self.at

    def elapsed_time(self, end: Event) -> float:
        return 1e3 * (end.at - self.at)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    model = Gpu()
    monkeypatch.setattr(gpu_timing.time, "perf_counter", lambda: model.host)
    return model


def test_the_gpu_alone_is_measured(gpu: Gpu) -> None:
    assert queued_seconds(gpu.work, 20, gpu) == pytest.approx(RUN)
    assert len(gpu.slept) == 1 and gpu.slept[0] > 20 * LAUNCH


def test_work_that_waits_for_the_gpu_is_refused(gpu: Gpu) -> None:
    def waits() -> None:
        gpu.work()
        gpu.synchronize()

    with pytest.raises(RuntimeError, match="waits for the GPU"):
        queued_seconds(waits, 5, gpu)
