"""All streams, events and waits of the offload path. No other module orders copies, attention and CPU work.

The ring's slots are loaded, attended and released in groups, each in a place of the ring. Events that are said to be
per group exist once for each place, and once for each block of the layer buffer. Seven orderings keep the KV correct,
and an eighth the weights:

1. New K/V are written before they are copied out: `kv_written`, per group.
2. A host block is complete before it is read, and copies to its old content end before it is overwritten. When a step
   begins, loads and block moves wait once for all copies to the host of earlier steps: `stored`, then `host_ready`.
   This also makes it safe to reuse the blocks of aborted and preempted sequences. Within a step no host memory is both
   written and loaded.
3. A load ends before attention reads the slots: `ring_slot_ready`, per group.
4. Attention, and the copy of what was written, end before the slots are overwritten: `ring_slot_compute_done` and
   `ring_slot_stored`, per group.
5. Block moves run after all computation issued before them and before all computation issued after them:
   `moves_begin`, `moves_end`.
6. CPU attention reads host blocks after the copies to them have ended: `host_ready` again. If it runs concurrently, on
   its own stream, it starts after its queries are written to host memory (`queries_written`), and its partial state is
   merged, from host memory, after it is written (`partial_written`).
7. Outside copies, between blocks and buffers that are not of this cache, such as those of files, run after everything
   that used the blocks before: `settled`, the event of `before_outside_copies`. The thread that issues the copies waits
   until they have ended, so that blocks are attended or written again only after that.
8. The matrices of a streamed layer are in their slot before the layer is computed, and used before those of another
   layer overwrite them: `weights_ready`, `weights_used`, per slot. They have a stream of their own (`WeightOrder`).
   Experts that nobody waits for are used when they have arrived (`after_fill_behind`, `before_arrived`).
   Host memory from which they were copied is read into from a file after that: `after_copies`, for which the reading
   thread waits.

What needs no event:

- A host block is written after earlier copies to it, because all copies to the host are on one stream.
- A host block is overwritten after earlier loads of it, and after it was moved, because such a copy waits for
  `kv_written`, which compute records after it has waited for every load of earlier steps, and for the moves of this
  one. Block moves and outside copies that overwrite it are ordered by 5 and 7.
- A host block is overwritten after CPU attention has read it, because compute has waited for the partial state, or is
  itself the stream of CPU attention.
- The buffers of CPU attention are reused in the next layer, because compute writes the next queries after it has merged
  the last partial state.

Copies in one direction share one link, and one stream keeps it busy: on an H200 as busy as four streams did. An engine
of one process has eight streams at most, with those of computation, CPU attention, the clock, outside copies and
weights, as many as CUDA has hardware queues by default (`create_device` asks for 32), so no two of them share a queue.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from nanovllm.device import CallStream, Device, Event, Mark, Stream
from nanovllm.errors import EngineError


class TransferOrder:
    """Owns the streams of loads, copies to the host, block moves and CPU attention; orders them with compute.

    Blocks of the layer buffer are numbered after the ring's places.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._compute = device.compute_stream
        self._loads = device.new_stream("kv-loads")
        self._stores = device.new_stream("kv-stores")
        self._move_stream = device.new_stream("kv-moves")
        self._cpu_attention: Stream = self._compute  # the stream on which the CPU attends to host blocks
        self._streams = [self._loads, self._stores, self._move_stream]
        self._outside_stream: Stream | None = None  # of outside copies, created with the first of them
        self._outside_lock = threading.Lock()  # held by the thread that uses that stream
        self._make_events()

    def _make_events(self) -> None:
        # By group of slots, which is no KV group. An event is created at its first record.
        self._ring_slot_ready = defaultdict[int, Event](self._device.new_event)
        self._ring_slot_compute_done = defaultdict[int, Event](self._device.new_event)
        self._ring_slot_stored = defaultdict[int, Event](self._device.new_event)
        self._kv_written = defaultdict[int, Event](self._device.new_event)
        self._to_refill: set[int] = set()  # groups with copies to the host that no load has waited for
        self._storing = False  # whether there are copies to the host that no `host_ready` covers yet
        self._stored = self._device.new_event()
        self._host_ready: Event | None = None  # created at its first record
        self._moves_begin = self._device.new_event()
        self._moves_end = self._device.new_event()
        self._queries_written = self._device.new_event()
        self._partial_written = self._device.new_event()

    # ---- before a step's copies, in this order; `moves` also between layers, where recurrent states are copied

    @contextmanager
    def moves(self, any_moves: bool) -> Iterator[Stream]:
        """Context in which blocks may be moved on the stream, after all earlier computation and copies to the host.

        After it host blocks may be loaded, written and attended: all of that follows the moves and the earlier copies.
        """
        self._gather(any_moves)
        yield self._move_stream
        if any_moves:
            self._move_stream.record(self._moves_end)
            self._compute.wait(self._moves_end)
        if any_moves or self._storing:
            self._storing = False
            self._host_ready = self._host_ready or self._device.new_event()
            self._move_stream.record(self._host_ready)
            self._loads.wait(self._host_ready)

    def _gather(self, computed: bool) -> None:
        """Let the stream of moves wait for the copies to the host so far, and for all computation."""
        if self._storing:
            self._stores.record(self._stored)
            self._move_stream.wait(self._stored)
        if computed:
            self._compute.record(self._moves_begin)
            self._move_stream.wait(self._moves_begin)

    def before_cpu_attention(self) -> None:
        """CPU attention reads host blocks from now on, until the next step."""
        if self._host_ready is not None:
            self._cpu_attention.wait(self._host_ready)

    # ---- the life of a group of slots, in this order

    def before_fill(self, group: int) -> Stream:
        """Copies on the returned stream may overwrite the group's slots."""
        if group in self._ring_slot_compute_done:
            self._loads.wait(self._ring_slot_compute_done[group])
        if group in self._to_refill:
            self._to_refill.remove(group)
            self._loads.wait(self._ring_slot_stored[group])
        return self._loads

    def after_fill(self, group: int) -> None:
        """The copies have been issued on the stream of `before_fill`."""
        self._loads.record(self._ring_slot_ready[group])

    def before_compute(self, group: int) -> None:
        """Compute uses the group next, after its loads."""
        self._compute.wait(self._ring_slot_ready[group])

    def before_store(self, group: int) -> Stream:
        """New K/V are written into the group; the returned stream may copy them to the host."""
        self._compute.record(self._kv_written[group])
        self._stores.wait(self._kv_written[group])
        return self._stores

    def after_store(self, group: int) -> None:
        """The copies have been issued on the stream of `before_store`."""
        self._stores.record(self._ring_slot_stored[group])
        self._to_refill.add(group)
        self._storing = True

    def after_compute(self, group: int) -> None:
        """All attention over the group has been issued on the compute stream."""
        self._compute.record(self._ring_slot_compute_done[group])

    # ---- concurrent CPU attention, once a layer in this order

    def add_cpu_attention_stream(self) -> None:
        """From now on CPU attention runs on a stream of its own."""
        self._cpu_attention = self._cpu_attention_calls = self._device.new_call_stream("kv-cpu-attention")
        self._streams.append(self._cpu_attention_calls)

    def before_cpu_attention_call(self) -> CallStream:
        """The compute stream has written the queries to the host. Returns the stream to launch CPU attention on."""
        self._compute.record(self._queries_written)
        self._cpu_attention_calls.wait(self._queries_written)
        return self._cpu_attention_calls

    def after_cpu_attention_call(self) -> None:
        """CPU attention has been launched."""
        self._cpu_attention_calls.record(self._partial_written)

    def before_merge(self) -> None:
        """Compute reads the partial state on the host next."""
        self._compute.wait(self._partial_written)

    def finish_cpu_attention(self) -> None:
        """Let the calling thread wait until the calls of CPU attention have ended. Raises EngineError if one failed."""
        self._cpu_attention_calls.synchronize()

    # ---- outside copies, between steps

    def before_outside_copies(self) -> Event:
        """An event after all that was submitted so far, for `outside_copies`. Called by the engine's thread."""
        self._outside_stream = self._outside_stream or self._device.new_stream("kv-outside")
        settled = self._device.new_event()
        self._gather(computed=True)
        self._move_stream.record(settled)
        return settled

    @contextmanager
    def outside_copies(self, settled: Event) -> Iterator[Stream]:
        """Context in which the stream may copy between blocks and outside buffers. The copies have ended when it ends.

        Any thread may use it, and one at a time does. Raises EngineError if a copy failed.
        """
        assert self._outside_stream is not None, "`settled` comes from `before_outside_copies`"
        with self._outside_lock:
            self._outside_stream.wait(settled)
            try:
                yield self._outside_stream
            finally:
                self._outside_stream.synchronize()

    # ---- everything

    def synchronize(self) -> None:
        """Let the calling thread wait until no copy of a step is under way. Then raises the first failure.

        The thread of outside copies waits for them itself.
        """
        failure: EngineError | None = None
        for stream in [*self._streams, self._compute]:
            try:
                stream.synchronize()
            except EngineError as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def reset(self) -> None:
        """Let all work of steps end, failed or not, and start with new events: then there is nothing to wait for."""
        with suppress(EngineError):  # the caller resets because of this failure or an earlier one
            self.synchronize()
        self._make_events()


class WeightOrder:
    """Owns the stream on which the weights of layers are copied to the device; orders it with compute.

    The expert cache counts as a slot.
    """

    cache = -1

    def __init__(self, device: Device) -> None:
        self._device = device
        self._compute = device.compute_stream
        self._loads = device.new_stream("weight-loads")
        self._make_events()

    def _make_events(self) -> None:
        # By slot. An event is created at its first record.
        self._weights_ready = defaultdict[int, Event](self._device.new_event)
        self._weights_used = defaultdict[int, Event](self._device.new_event)

    def before_fill(self, slot: int) -> Stream:
        """Copies on the returned stream may overwrite the slot."""
        if slot in self._weights_used:
            self._loads.wait(self._weights_used[slot])
        return self._loads

    def after_fill(self, slot: int) -> None:
        """The copies have been issued on the stream of `before_fill`."""
        self._loads.record(self._weights_ready[slot])

    def after_fill_behind(self) -> tuple[Event, Mark]:
        """Copies for which compute does not wait have been issued on the stream of `before_fill`.

        When the mark is passed they have ended, and `before_arrived` takes their event.
        """
        arrived = self._device.new_event()
        self._loads.record(arrived)
        return arrived, self._loads.mark()

    def after_copies(self) -> Event:
        """The copies so far are on the stream of `before_fill`. The host memory that they read may be overwritten when
        the event has happened."""
        copied = self._device.new_event()
        self._loads.record(copied)
        return copied

    def before_arrived(self, arrived: Event) -> None:
        """Compute uses what has been copied behind from now on."""
        self._compute.wait(arrived)

    def before_compute(self, slot: int) -> None:
        """Compute uses the slot next, after its copies."""
        self._compute.wait(self._weights_ready[slot])

    def after_compute(self, slot: int) -> None:
        """All products with the matrices in the slot have been issued on the compute stream."""
        self._compute.record(self._weights_used[slot])

    def reset(self) -> None:
        """Let all copies end, failed or not, and all that was computed with them, and start with new events."""
        for stream in (self._loads, self._compute):
            with suppress(EngineError):
                stream.synchronize()
        self._make_events()
