"""All streams, events and waits of the offload path. No other module orders copies, attention and CPU work.

The ring's slots are loaded, attended and released in groups. Each group has one event of each kind, and so has each
block of the layer buffer. Seven orderings keep the KV correct:

1. New K/V are written before they are copied out: `kv_written`, per group.
2. A host block is complete before it is read, and copies to and from its old content end before it is overwritten. Once
   a step, before its first copy, every stream waits for all stores of earlier steps: `stored`, per stream, then
   `host_ready`. This also makes it safe to reuse the blocks of aborted and preempted sequences. Within a step no host
   memory is both stored and loaded.
3. A load ends before attention reads the slots: `ring_slot_ready`, per group.
4. Attention ends before the slots are overwritten: `ring_slot_compute_done`, per group.
5. Block moves run after all computation issued before them and before all computation issued after them:
   `moves_begin`, `moves_end`.
6. CPU attention reads host blocks after the stores to them have ended: `host_ready` again. If it runs concurrently, on
   its own stream, it starts after its queries are written (`queries_written`) and copied to the host
   (`queries_arrived`). Its partial state is copied back after it is written (`partial_written`), and merged after it
   has arrived (`partial_arrived`).
7. Blocks are copied to buffers of a block store, or from them, after all that used the blocks before: an event of
   `before_store_copies`. Threads of the store issue some of these copies. Whoever does waits until they have ended: so
   blocks are attended or written again only after that.

What needs no event:

- A slot is refilled after its own tokens were stored, because both copies run on the group's stream.
- A host block is overwritten after earlier loads of it, because a store waits for `kv_written`, which compute records
  after it has waited for every load of earlier steps.
- A host block is overwritten after CPU attention has read it, because compute has waited for the partial state, or is
  itself the stream of CPU attention.
- The buffers of CPU attention are reused in the next layer, because compute writes the next queries after it has merged
  the last partial state.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from nanovllm.device import CallStream, Device, Event, Stream
from nanovllm.errors import EngineError

# Copies in one direction share one link: a few streams keep it busy. Together with the streams for moves, CPU attention
# and computation they are as many as CUDA has hardware queues by default (CUDA_DEVICE_MAX_CONNECTIONS), so no two
# streams share a queue. With a block store there is one more, which is idle but for its copies.
NUM_GROUP_STREAMS = 4


class TransferOrder:
    """Owns the streams for groups of slots, block moves and concurrent CPU attention; orders them with compute.

    Group i always uses stream i % NUM_GROUP_STREAMS. Blocks of the layer buffer are numbered after the ring's groups.
    """

    def __init__(self, device: Device, num_groups: int) -> None:
        self._device = device
        self._compute = device.compute_stream
        self._group_streams = [
            device.new_stream(f"kv-slots-{index}") for index in range(min(num_groups, NUM_GROUP_STREAMS))
        ]
        self._move_stream = device.new_stream("kv-moves")
        self._cpu_attention: Stream = self._compute  # the stream on which the CPU attends to host blocks
        self._streams = [*self._group_streams, self._move_stream]
        self._store_stream: Stream | None = None  # of the block store's copies, created with the first of them
        self._store_lock = threading.Lock()  # held by the thread that uses that stream
        self._make_events()

    def _make_events(self) -> None:
        # By group, and `stored` by stream. An event is created at its first record.
        self._ring_slot_ready = defaultdict[int, Event](self._device.new_event)
        self._ring_slot_compute_done = defaultdict[int, Event](self._device.new_event)
        self._kv_written = defaultdict[int, Event](self._device.new_event)
        self._stored = defaultdict[int, Event](self._device.new_event)
        self._storing: set[int] = set()  # streams with stores that no `host_ready` covers yet
        self._host_ready: Event | None = None  # created at its first record
        self._moves_begin, self._moves_end = self._device.new_event(), self._device.new_event()
        self._queries_written, self._queries_arrived = self._device.new_event(), self._device.new_event()
        self._partial_written, self._partial_arrived = self._device.new_event(), self._device.new_event()

    # ---- once a step, in this order

    @contextmanager
    def moves(self, any_moves: bool) -> Iterator[Stream]:
        """Context in which blocks may be moved on the stream, after all earlier computation and stores.

        After it host blocks may be loaded, stored and attended: all of that follows the moves and the earlier stores.
        """
        self._gather(any_moves)
        yield self._move_stream
        if any_moves:
            self._move_stream.record(self._moves_end)
            self._compute.wait(self._moves_end)
        if any_moves or self._storing:
            self._storing.clear()
            self._host_ready = self._host_ready or self._device.new_event()
            self._move_stream.record(self._host_ready)
            for stream in self._group_streams:
                stream.wait(self._host_ready)

    def _gather(self, computed: bool) -> None:
        """Let the stream of moves wait for the stores so far, and for all computation."""
        for index in sorted(self._storing):
            self._group_streams[index].record(self._stored[index])
            self._move_stream.wait(self._stored[index])
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
        stream = self._group_streams[group % len(self._group_streams)]
        if group in self._ring_slot_compute_done:
            stream.wait(self._ring_slot_compute_done[group])
        return stream

    def after_fill(self, group: int, stream: Stream) -> None:
        """The copies have been issued on the stream of `before_fill`."""
        stream.record(self._ring_slot_ready[group])

    def before_compute(self, group: int) -> None:
        """Compute uses the group next, after its loads."""
        self._compute.wait(self._ring_slot_ready[group])

    def before_store(self, group: int) -> Stream:
        """New K/V are written into the group; the returned stream may copy them to the host."""
        index = group % len(self._group_streams)
        stream = self._group_streams[index]
        self._compute.record(self._kv_written[group])
        stream.wait(self._kv_written[group])
        self._storing.add(index)
        return stream

    def after_compute(self, group: int) -> None:
        """All attention over the group has been issued on the compute stream."""
        self._compute.record(self._ring_slot_compute_done[group])

    # ---- concurrent CPU attention, once a layer in this order

    def add_cpu_attention_streams(self) -> None:
        """From now on CPU attention runs on a stream of its own."""
        self._cpu_attention_copies = self._device.new_stream("kv-cpu-attention-copies")
        self._cpu_attention = self._cpu_attention_calls = self._device.new_call_stream("kv-cpu-attention")
        self._streams += [self._cpu_attention_calls, self._cpu_attention_copies]

    def before_queries(self) -> Stream:
        """The queries are written on the compute stream; the returned stream may copy them to the host."""
        self._compute.record(self._queries_written)
        self._cpu_attention_copies.wait(self._queries_written)
        return self._cpu_attention_copies

    def before_cpu_attention_call(self) -> CallStream:
        """The copy of the queries has been issued; CPU attention may be launched on the returned stream."""
        self._cpu_attention_copies.record(self._queries_arrived)
        self._cpu_attention_calls.wait(self._queries_arrived)
        return self._cpu_attention_calls

    def before_partial(self) -> Stream:
        """CPU attention has been launched; the returned stream may copy its partial state to the device."""
        self._cpu_attention_calls.record(self._partial_written)
        self._cpu_attention_copies.wait(self._partial_written)
        return self._cpu_attention_copies

    def after_partial(self) -> None:
        self._cpu_attention_copies.record(self._partial_arrived)

    def before_merge(self) -> None:
        """Compute reads the partial state next."""
        self._compute.wait(self._partial_arrived)

    def finish_cpu_attention(self) -> None:
        """Block the host until the calls of CPU attention have ended. Raises EngineError if one failed."""
        self._cpu_attention_calls.synchronize()

    # ---- the block store, between steps

    def before_store_copies(self) -> Event:
        """An event after all that was submitted so far, for `store_copies`. Called by the engine's thread."""
        self._store_stream = self._store_stream or self._device.new_stream("kv-store")
        settled = self._device.new_event()
        self._gather(computed=True)
        self._move_stream.record(settled)
        return settled

    @contextmanager
    def store_copies(self, settled: Event) -> Iterator[Stream]:
        """Context in which the stream may copy between blocks and buffers. They have ended when it ends.

        Any thread may use it, and one at a time does. Raises EngineError if a copy failed.
        """
        assert self._store_stream is not None, "`settled` comes from `before_store_copies`"
        with self._store_lock:
            self._store_stream.wait(settled)
            try:
                yield self._store_stream
            finally:
                self._store_stream.synchronize()

    # ---- everything

    def synchronize(self) -> None:
        """Block the host until no copy is under way. Raises the first failure, after all copies have ended."""
        failure: EngineError | None = None
        for stream in [*self._streams, self._compute]:
            try:
                stream.synchronize()
            except EngineError as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def reset(self) -> None:
        """Let all work under way end, failed or not, and start with new events: then there is nothing to wait for."""
        with suppress(EngineError):  # the caller resets because of this failure or an earlier one
            self.synchronize()
        self._make_events()
