"""A device that copies on one shared stream for each direction, to compare with a stream for each group of ring slots.

Copies in one direction share one link, whatever streams they are on. With separate streams each copy starts as soon as
its own group allows; with a shared stream copies run one at a time, in the order in which they were submitted, each at
the full rate of the link.
"""

from __future__ import annotations

from nanovllm.device.base import CopyKind, Device, Event, PitchedCopy, Stream
from nanovllm.device.wrapper import DeviceWrapper, StreamWrapper


class ForwardingStream(StreamWrapper):
    """Keeps the order of its work on a stream of its own and submits its copies to shared streams."""

    def __init__(self, device: Device, name: str) -> None:
        super().__init__(device.new_stream(name))
        self._reached: Event = device.new_event()
        self._copied: Event = device.new_event()

    def forward(self, device: Device, copy: PitchedCopy, shared: Stream) -> int:
        """Run the copy on `shared`, after the work already on this stream and before the work that follows."""
        self.inner.record(self._reached)
        shared.wait(self._reached)
        count = device.copy_2d(copy, shared)
        shared.record(self._copied)
        self.inner.wait(self._copied)
        return count


class SharedStreams(DeviceWrapper):
    """A device on which all streams share two streams of `inner` for copies: one to the device, one to the host."""

    def __init__(self, inner: Device) -> None:
        super().__init__(inner)
        to_device, to_host = inner.new_stream("kv-to-device"), inner.new_stream("kv-to-host")
        self._shared: dict[CopyKind, Stream] = {"h2d": to_device, "d2d": to_device, "d2h": to_host, "h2h": to_host}

    def new_stream(self, name: str) -> Stream:
        return ForwardingStream(self.inner, name)

    def copy_2d(self, copy: PitchedCopy, stream: Stream) -> int:
        assert isinstance(stream, ForwardingStream)
        return stream.forward(self.inner, copy, self._shared[copy.kind])
