"""What the tests of the CPU device share: a gate that holds a stream up, copies that work and copies that fail."""

from __future__ import annotations

import threading

import torch
from torch import Tensor
from waiting import PATIENCE

from nanovllm.device import PitchedCopy, Stream
from nanovllm.device.cpu import CpuDevice, WorkerStream


class Gate:
    """Holds a stream up until it is opened."""

    def __init__(self, stream: Stream) -> None:
        assert isinstance(stream, WorkerStream)
        self._opened = threading.Event()
        stream.put(lambda: self._opened.wait(PATIENCE) and None)

    def open(self) -> None:
        self._opened.set()


def filled(value: int, size: int = 64) -> Tensor:
    return torch.full((size,), value, dtype=torch.uint8)


def copy(device: CpuDevice, dst: Tensor, src: Tensor, stream: Stream) -> None:
    device.copy_2d(PitchedCopy(dst, src, src.numel(), src.numel(), src.numel(), 1, "h2d"), stream)


def fail(device: CpuDevice, stream: Stream) -> None:
    """A copy that would run past the end of its source."""
    device.copy_2d(PitchedCopy(filled(0), filled(0, 8), 64, 64, 64, 1, "h2d"), stream)


def happens(stream: Stream) -> threading.Event:
    """Set when the stream gets to what is put on it now."""
    assert isinstance(stream, WorkerStream)
    reached = threading.Event()
    stream.put(reached.set)
    return reached
