"""All streams, events and waits of the offload path. Nobody else orders anything.

Slots of the ring are filled, attended and let go of in groups; a group, or a block of the layer buffer, has one event
of each kind.

1. New K/V are written before they are copied out: `kv_written`, per group.
2. A host block is filled before it is read, and its old content has arrived before it is overwritten. Once a step,
   before its first copy, every stream waits for all that was stored so far: `stored`, per stream, then `host_ready`.
   This is also what makes blocks of aborted and preempted sequences safe to reuse. Within a step no host memory is both
   stored and loaded.
3. A load is finished before attention reads the slots: `ring_slot_ready`, per group.
4. Attention is finished before the slots are overwritten: `ring_slot_compute_done`, per group.
5. Block moves run after everything computed so far and before everything computed next: `moves_begin`, `moves_end`.
6. The CPU arm reads host blocks after what was stored there has arrived: `host_ready` again. On a stream of its own it
   attends after its queries were written, which is `queries_written`, and copied down, `queries_arrived`; its partial
   state is copied up after it was written, `partial_written`, and merged after it has arrived, `partial_arrived`.

What needs no event: a slot is refilled after its own store-out because both run on the group's stream. A host block is
overwritten after earlier loads of it because a store waits for `kv_written`, which compute records after it has waited
for every load of earlier steps; after the arm has read it as well, because compute has waited for the arm's partial
state, or is the arm's stream itself. For the same reason the arm's buffers can be used again in the next layer: its
queries are written by compute, after the merge of the layer before.
"""

from __future__ import annotations

from contextlib import suppress

from nanovllm.device import CallStream, Device, Event, Stream
from nanovllm.errors import EngineError

# Copies one way share one link: a few streams keep it busy. With those for moves, the arm and computation they are as
# many as CUDA has hardware queues by default (CUDA_DEVICE_MAX_CONNECTIONS), of which no two need then be one.
NUM_GROUP_STREAMS = 4


class EventsByKey:
    """One event for each key, made when it is first recorded; before that there is nothing to wait for."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._events: dict[int, Event] = {}

    def record(self, stream: Stream, key: int) -> None:
        if key not in self._events:
            self._events[key] = self._device.new_event()
        stream.record(self._events[key])

    def wait(self, stream: Stream, key: int) -> None:
        if key in self._events:
            stream.wait(self._events[key])


class TransferOrder:
    """Streams for groups of slots, one for block moves, two for an arm beside the device, and the compute stream.

    Group i always uses stream i % NUM_GROUP_STREAMS, blocks of the layer buffer being numbered after the ring's groups.
    """

    def __init__(self, device: Device, num_groups: int) -> None:
        self._device = device
        self._compute = device.compute_stream
        self._group_streams = [
            device.new_stream(f"kv-slots-{index}") for index in range(min(num_groups, NUM_GROUP_STREAMS))
        ]
        self._move_stream = device.new_stream("kv-moves")
        self._cpu_attention: Stream = self._compute  # where host blocks are attended
        self._streams = [*self._group_streams, self._move_stream]
        self._make_events()

    def _make_events(self) -> None:
        self._ring_slot_ready = EventsByKey(self._device)
        self._ring_slot_compute_done = EventsByKey(self._device)
        self._kv_written = EventsByKey(self._device)
        self._stored = EventsByKey(self._device)
        self._storing: set[int] = set()  # streams on which something was stored since it was last waited for
        self._moved = False  # whether blocks were moved since then
        self._host_ready: Event | None = None  # made when it is first recorded
        self._moves_begin, self._moves_end = self._device.new_event(), self._device.new_event()
        self._queries_written, self._queries_arrived = self._device.new_event(), self._device.new_event()
        self._partial_written, self._partial_arrived = self._device.new_event(), self._device.new_event()

    def _stream(self, group: int) -> Stream:
        return self._group_streams[group % len(self._group_streams)]

    # ---- once a step, in this order

    def before_moves(self) -> Stream:
        """Blocks may be moved on the returned stream: after what was computed, and after what was stored."""
        self._wait_for_stores()
        self._moved = True
        self._compute.record(self._moves_begin)
        self._move_stream.wait(self._moves_begin)
        return self._move_stream

    def after_moves(self) -> None:
        self._move_stream.record(self._moves_end)
        self._compute.wait(self._moves_end)

    def before_copies(self) -> None:
        """Host blocks are loaded, stored and attended from now on: what was stored or moved there has arrived."""
        if not self._storing and not self._moved:
            return
        self._wait_for_stores()
        self._moved = False
        self._host_ready = self._host_ready or self._device.new_event()
        self._move_stream.record(self._host_ready)
        for stream in self._group_streams:
            stream.wait(self._host_ready)

    def before_cpu_attention(self) -> None:
        """The arm reads host blocks from now on, until the next step."""
        if self._host_ready is not None:
            self._cpu_attention.wait(self._host_ready)

    def _wait_for_stores(self) -> None:
        for index in sorted(self._storing):
            self._stored.record(self._group_streams[index], index)
            self._stored.wait(self._move_stream, index)
        self._storing.clear()

    # ---- a group's life, in order

    def before_fill(self, group: int) -> Stream:
        """The group's slots may be overwritten by what is put on the returned stream."""
        stream = self._stream(group)
        self._ring_slot_compute_done.wait(stream, group)
        return stream

    def after_fill(self, group: int) -> None:
        self._ring_slot_ready.record(self._stream(group), group)

    def before_compute(self, group: int) -> None:
        """Compute uses the group next: what was loaded has arrived, what was stored out has left."""
        self._ring_slot_ready.wait(self._compute, group)

    def before_store(self, group: int) -> Stream:
        """New K/V were written into the group; the returned stream may copy them to the host."""
        stream = self._stream(group)
        self._kv_written.record(self._compute, group)
        self._kv_written.wait(stream, group)
        self._storing.add(group % len(self._group_streams))
        return stream

    def after_compute(self, group: int) -> None:
        """Attention over the group was put on the compute stream."""
        self._ring_slot_compute_done.record(self._compute, group)

    # ---- the CPU arm

    def add_cpu_attention_streams(self) -> None:
        """From now on the arm works on a stream of its own."""
        self._cpu_attention_copies = self._device.new_stream("kv-arm-copies")
        self._cpu_attention = self._cpu_attention_calls = self._device.new_call_stream("kv-arm")
        self._streams += [self._cpu_attention_calls, self._cpu_attention_copies]

    # ---- an arm beside the device, once a layer in this order

    def before_queries(self) -> Stream:
        """The arm's queries were written on the compute stream; the returned stream may copy them down."""
        self._compute.record(self._queries_written)
        self._cpu_attention_copies.wait(self._queries_written)
        return self._cpu_attention_copies

    def before_cpu_attention_call(self) -> CallStream:
        """The queries' copy was put on its stream; the arm may be launched on the returned one."""
        self._cpu_attention_copies.record(self._queries_arrived)
        self._cpu_attention_calls.wait(self._queries_arrived)
        return self._cpu_attention_calls

    def before_partial(self) -> Stream:
        """The arm was launched; the returned stream may copy its partial state up."""
        self._cpu_attention_calls.record(self._partial_written)
        self._cpu_attention_copies.wait(self._partial_written)
        return self._cpu_attention_copies

    def after_partial(self) -> None:
        self._cpu_attention_copies.record(self._partial_arrived)

    def before_merge(self) -> None:
        """Compute reads the arm's partial state next."""
        self._compute.wait(self._partial_arrived)

    def finish_cpu_attention(self) -> None:
        """Block the host until the arm's calls are done, and raise what failed of them."""
        self._cpu_attention_calls.synchronize()

    # ---- everything

    def synchronize(self) -> None:
        """Block the host until no copy is under way. Raises the first failure of a copy, after all have ended."""
        failure: EngineError | None = None
        for stream in [*self._streams, self._compute]:
            try:
                stream.synchronize()
            except EngineError as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def reset(self) -> None:
        """Let everything under way end, failed or not, and start afresh: with nothing under way all is in order."""
        with suppress(EngineError):  # whoever resets has already met the failure, or one before it
            self.synchronize()
        self._make_events()
