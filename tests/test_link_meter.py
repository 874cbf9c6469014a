"""The link's rate from marks on streams: some copies of many, time counted once, nothing waited for."""

from __future__ import annotations

import pytest
import torch

from nanovllm.device import Busy, Mark, PitchedCopy, Stream
from nanovllm.device.busy import LinkMeter, union_seconds
from nanovllm.device.cpu import CpuDevice


class Clock(Stream):
    """A stream whose marks are passed when the test says so."""

    def __init__(self) -> None:
        self.marks: list[Passed] = []

    def mark(self) -> Mark:
        self.marks.append(Passed())
        return self.marks[-1]

    def record(self, event: object) -> None: ...

    def wait(self, event: object) -> None: ...

    def synchronize(self) -> None: ...


class Passed(Mark):
    def __init__(self) -> None:
        self.at: float | None = None

    def seconds(self) -> float | None:
        return self.at


@pytest.mark.parametrize(
    ("spans", "seconds"),
    [([], 0.0), ([(1, 3)], 2.0), ([(1, 3), (2, 5)], 4.0), ([(4, 5), (0, 1)], 2.0), ([(0, 9), (1, 2), (8, 10)], 10.0)],
)
def test_time_in_which_several_ran_counts_once(spans: list[tuple[float, float]], seconds: float) -> None:
    assert union_seconds(spans) == seconds


def test_a_run_counts_when_all_of_it_is_passed() -> None:
    meter, stream = LinkMeter(), Clock()
    for num_bytes in (100, 50):
        meter.after(stream, meter.before(stream), num_bytes)
    first, second = stream.marks[:2], stream.marks[2:]
    first[0].at, first[1].at, second[0].at = 1.0, 3.0, 2.0
    assert meter.read() == Busy()
    second[1].at = 4.5
    assert meter.read() == meter.read() == Busy(150, 3.5)


def test_on_real_streams() -> None:
    device, meter = CpuDevice(), LinkMeter()
    src = torch.zeros(1 << 20, dtype=torch.uint8)
    streams = [device.new_stream(name) for name in "ab"]
    for index in range(10):
        stream, size = streams[index % 2], src.nbytes
        begin = meter.before(stream)
        device.copy_2d(PitchedCopy(torch.empty_like(src), src, size, size, size, 1, "h2d"), stream)
        meter.after(stream, begin, size)
    for stream in streams:
        stream.synchronize()
    found = meter.read()
    assert found.num_bytes == 10 << 20 and found.seconds > 0
    device.close()
