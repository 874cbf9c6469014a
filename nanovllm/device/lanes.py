"""One stream for each direction, shared by all transfers of a device, instead of several for groups of ring slots.

Copies one way share one link whatever streams they are on. With a stream of its own each slot's copy may start as soon
as it can; with a shared one copies run in the order in which they were put there, one at a time, and each at full rate.
"""

from __future__ import annotations

from nanovllm.device.base import CopyKind, Device, Event, Mark, PitchedCopy, Stream
from nanovllm.device.wrapper import DeviceWrapper


class LaneStream(Stream):
    """Keeps the order of one stream's work on a stream of its own, and sends the copies out on the shared ones."""

    def __init__(self, device: Device, name: str) -> None:
        self._own = device.new_stream(name)
        self._reached, self._copied = device.new_event(), device.new_event()

    def send(self, device: Device, copy: PitchedCopy, lane: Stream) -> int:
        """The copy runs on `lane`, after what was put here before it and before what is put here next."""
        self._own.record(self._reached)
        lane.wait(self._reached)
        count = device.copy_2d(copy, lane)
        lane.record(self._copied)
        self._own.wait(self._copied)
        return count

    def record(self, event: Event) -> None:
        self._own.record(event)

    def wait(self, event: Event) -> None:
        self._own.wait(event)

    def synchronize(self) -> None:
        self._own.synchronize()

    def mark(self) -> Mark:
        return self._own.mark()


class SharedLanes(DeviceWrapper):
    """A device whose streams share two of `inner`'s for their copies, one to the device and one to the host."""

    def __init__(self, inner: Device) -> None:
        super().__init__(inner)
        to_device, to_host = inner.new_stream("kv-to-device"), inner.new_stream("kv-to-host")
        self._lanes: dict[CopyKind, Stream] = {"h2d": to_device, "d2d": to_device, "d2h": to_host, "h2h": to_host}

    def new_stream(self, name: str) -> Stream:
        return LaneStream(self.inner, name)

    def copy_2d(self, copy: PitchedCopy, stream: Stream) -> int:
        assert isinstance(stream, LaneStream)
        return stream.send(self.inner, copy, self._lanes[copy.kind])
