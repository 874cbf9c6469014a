"""The link's rate from marks on streams: some copies of many, time counted once, nothing waited for."""

from __future__ import annotations

import torch

from nanovllm.device import PitchedCopy
from nanovllm.device.busy import LinkMeter
from nanovllm.device.cpu import CpuDevice


def test_on_real_streams() -> None:
    device = CpuDevice()
    meter = LinkMeter()
    src = torch.zeros(1 << 20, dtype=torch.uint8)
    streams = [device.new_stream(name) for name in "ab"]
    for index in range(10):
        stream = streams[index % 2]
        size = src.nbytes
        begin = meter.before(stream)
        device.copy_2d(PitchedCopy(torch.empty_like(src), src, size, size, size, 1, "h2d"), stream)
        meter.after(stream, begin, size)
    for stream in streams:
        stream.synchronize()
    found = meter.read()
    assert found.num_bytes == 10 << 20 and found.seconds > 0
    device.close()
