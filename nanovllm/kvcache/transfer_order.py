"""All streams, events and waits of the offload path. Nobody else orders anything.

1. New K/V are written before they are copied out: `kv_written`, per slot.
2. A host block is filled before it is read, and its old content has arrived before it is overwritten: `host_ready`, per
   host block. This is also what makes blocks of aborted and preempted sequences safe to reuse.
3. A load is finished before attention reads the slot: `ring_slot_ready`, per slot.
4. Attention is finished before the slot is overwritten: `ring_slot_compute_done`, per slot.
5. Block moves run after everything computed so far and before everything computed next: `moves_begin`, `moves_end`.
6. The CPU arm reads a host block after what was stored there has arrived: `host_ready` again. On a stream of its own it
   attends after its queries were written, which is `queries_written`, and copied down, `queries_arrived`; its partial
   state is copied up after it was written, `partial_written`, and merged after it has arrived, `partial_arrived`.

What needs no event: a slot is refilled after its own store-out because both run on the slot's stream. A host block is
overwritten after earlier loads of it because a store waits for `kv_written`, which compute records after it has waited
for every load of earlier steps; after the arm has read it as well, because compute has waited for the arm's partial
state, or is the arm's stream itself. For the same reason the arm's buffers can be used again in the next layer: its
queries are written by compute, after the merge of the layer before.
"""

from __future__ import annotations

from contextlib import suppress

from nanovllm.device import CallStream, Device, Event, Stream
from nanovllm.errors import EngineError


class EventsByKey:
    """One event for each slot or block, made when it is first recorded; before that there is nothing to wait for."""

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
    """Streams for slots, one for block moves, two for an arm beside the device, and the device's compute stream.

    Slot i always uses stream i % num_slots: ring slots have one each, the layer buffer's share those.
    """

    def __init__(self, device: Device, num_slots: int) -> None:
        self._device = device
        self._compute = device.compute_stream
        self._slot_streams = [device.new_stream(f"kv-slot-{index}") for index in range(num_slots)]
        self._move_stream = device.new_stream("kv-moves")
        self._arm: Stream = self._compute  # where host blocks are attended
        self._streams = [*self._slot_streams, self._move_stream]
        self._make_events()

    def _make_events(self) -> None:
        self._ring_slot_ready = EventsByKey(self._device)
        self._ring_slot_compute_done = EventsByKey(self._device)
        self._kv_written = EventsByKey(self._device)
        self._host_ready = EventsByKey(self._device)
        self._moves_begin, self._moves_end = self._device.new_event(), self._device.new_event()
        self._queries_written, self._queries_arrived = self._device.new_event(), self._device.new_event()
        self._partial_written, self._partial_arrived = self._device.new_event(), self._device.new_event()

    def _stream(self, slot: int) -> Stream:
        return self._slot_streams[slot % len(self._slot_streams)]

    # ---- a slot's life, in order

    def before_fill(self, slot: int) -> Stream:
        """The slot may be overwritten by what is put on the returned stream."""
        stream = self._stream(slot)
        self._ring_slot_compute_done.wait(stream, slot)
        return stream

    def before_load(self, stream: Stream, host_block: int) -> None:
        """What is put on `stream` next reads `host_block`: what was stored there has arrived."""
        self._host_ready.wait(stream, host_block)

    def after_fill(self, slot: int) -> None:
        self._ring_slot_ready.record(self._stream(slot), slot)

    def before_compute(self, slot: int) -> None:
        """Compute uses the slot next: what was loaded has arrived, what was stored out has left."""
        self._ring_slot_ready.wait(self._compute, slot)

    def before_store(self, slot: int, host_block: int) -> Stream:
        """New K/V were written into the slot; the returned stream may copy them to `host_block`."""
        stream = self._stream(slot)
        self._kv_written.record(self._compute, slot)
        self._kv_written.wait(stream, slot)
        self._host_ready.wait(stream, host_block)
        return stream

    def after_store(self, slot: int, host_block: int) -> None:
        self._host_ready.record(self._stream(slot), host_block)

    def after_compute(self, slot: int) -> None:
        """Attention over the slot was put on the compute stream."""
        self._ring_slot_compute_done.record(self._compute, slot)

    # ---- block moves

    def before_moves(self) -> Stream:
        self._compute.record(self._moves_begin)
        self._move_stream.wait(self._moves_begin)
        return self._move_stream

    def before_move_to_host(self, host_block: int) -> None:
        """The move stream overwrites `host_block` next: what was stored there for its last owner has arrived."""
        self._host_ready.wait(self._move_stream, host_block)

    def after_move_to_host(self, host_block: int) -> None:
        self._host_ready.record(self._move_stream, host_block)

    def after_moves(self) -> None:
        self._move_stream.record(self._moves_end)
        self._compute.wait(self._moves_end)

    # ---- the CPU arm

    def put_arm_beside(self) -> None:
        """From now on the arm works on a stream of its own."""
        self._arm_copies = self._device.new_stream("kv-arm-copies")
        self._arm = self._arm_calls = self._device.new_call_stream("kv-arm")
        self._streams += [self._arm_calls, self._arm_copies]

    def before_arm(self, host_block: int) -> None:
        """The arm reads `host_block` from now on."""
        self._host_ready.wait(self._arm, host_block)

    # ---- an arm beside the device, once a layer in this order

    def before_queries(self) -> Stream:
        """The arm's queries were written on the compute stream; the returned stream may copy them down."""
        self._compute.record(self._queries_written)
        self._arm_copies.wait(self._queries_written)
        return self._arm_copies

    def before_arm_call(self) -> CallStream:
        """The queries' copy was put on its stream; the arm may be launched on the returned one."""
        self._arm_copies.record(self._queries_arrived)
        self._arm_calls.wait(self._queries_arrived)
        return self._arm_calls

    def before_partial(self) -> Stream:
        """The arm was launched; the returned stream may copy its partial state up."""
        self._arm_calls.record(self._partial_written)
        self._arm_copies.wait(self._partial_written)
        return self._arm_copies

    def after_partial(self) -> None:
        self._arm_copies.record(self._partial_arrived)

    def before_merge(self) -> None:
        """Compute reads the arm's partial state next."""
        self._compute.wait(self._partial_arrived)

    def finish_arm(self) -> None:
        """Block the host until the arm's calls are done, and raise what failed of them."""
        self._arm_calls.synchronize()

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
