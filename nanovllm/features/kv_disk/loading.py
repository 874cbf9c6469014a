"""Reading behind the steps: threads read records, several at once, for sequences that wait for them.

A record is read into a buffer, and copied into its blocks if the sequence still waits for it. So a disk that does not
answer holds no blocks: a read is cancelled at once, and threads that hang keep nobody waiting.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from nanovllm.device.base import Busy, Event
from nanovllm.device.busy import BusyMeter
from nanovllm.features.kv_disk.messages import StatePlace, UnitPlace
from nanovllm.features.kv_disk.records import Name
from nanovllm.features.kv_disk.units import UnitCopier, bytes_of

THREADS = 4  # each with one record under way, of some MiB
CLOSE_SECONDS = 1.0  # for threads that are idle


@dataclass(frozen=True, slots=True)
class Record:
    """A record to read, and the blocks or the slot of a state that it goes to. settled: of `UnitCopier.begin`."""

    name: Name
    place: UnitPlace | StatePlace
    settled: Event


class RunningRead:
    """The records that one sequence waits for.

    wrong: the first record that could not be read, and why.
    """

    def __init__(
        self,
        records: Sequence[Record],
        reads: Reads,
        progressed: Callable[[], None],
        ended: Callable[[RunningRead], None],
    ) -> None:
        """Called by the readers' threads: progressed, when a record has ended and others have not; ended, after the
        last one.
        """
        self.records = records
        self.wrong: tuple[Record, str] | None = None
        self._reads = reads
        self._progressed = progressed
        self._ended = ended
        self._left = len(records)
        self._copying = 0  # records
        self._is_cancelled = False

    def cancel(self) -> None:
        """When this returns, nothing is written into blocks any more. Waits for copies in memory, not for the disk."""
        with self._reads.changed:
            self._is_cancelled = True
            self._reads.changed.wait_for(lambda: self._copying == 0)

    # ---- the readers' threads

    @property
    def is_wanted(self) -> bool:
        return not self._is_cancelled and self.wrong is None

    def take(self, record: Record, buffer: Tensor) -> None:
        """Copy what was read into the blocks, if they still wait for it."""
        with self._reads.changed:
            if not self.is_wanted:
                return
            self._copying += 1
        try:
            self._reads.copier.copy_in(buffer, record.place, record.settled)
        finally:
            with self._reads.changed:
                self._copying -= 1
                self._reads.changed.notify_all()

    def end(self, record: Record, wrong: str | None) -> None:
        with self._reads.changed:
            self._left -= 1
            if wrong is not None and self.wrong is None:
                self.wrong = (record, wrong)
            is_last = self._left == 0
        if is_last:
            self._ended(self)
        else:
            self._progressed()


class DiskThreads:
    """Threads that wait for the disk, up to `most` of them. They start with the first work for them."""

    def __init__(self, name: str, most: int, begin_thread: Callable[[], None] = lambda: None) -> None:
        """begin_thread: called in each thread."""
        self._name = name
        self._most = most
        self._begin_thread = begin_thread
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def submit(self, work: Callable[[], None]) -> None:
        """Let a thread do work that raises nothing."""
        self._queue.put(work)
        if len(self._threads) < self._most:
            # A daemon: a disk that does not answer must not keep the process from ending.
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def close(self) -> None:
        """End the threads. Safe to call twice."""
        threads = self._threads
        self._threads = []
        for _ in threads:
            self._queue.put(None)
        deadline = time.monotonic() + CLOSE_SECONDS
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self) -> None:
        self._begin_thread()
        while (work := self._queue.get()) is not None:
            work()


class Reads(DiskThreads):
    """The threads that read records.

    read: reads a record into memory and returns what is wrong with it, or None.
    """

    def __init__(self, read: Callable[[Name, memoryview], str | None], copier: UnitCopier) -> None:
        super().__init__("kv-disk-reader", THREADS, copier.begin_thread)
        self.copier = copier
        self.changed = threading.Condition()
        self._read = read
        self._meter = BusyMeter()

    def start(self, running: RunningRead) -> None:
        for record in running.records:
            self.submit(partial(self._read_record, running, record))

    def busy(self) -> Busy:
        """Bytes read so far, and the time during which something was read."""
        return self._meter.read()

    def _read_record(self, running: RunningRead, record: Record) -> None:
        wrong = None
        try:
            if running.is_wanted:
                buffer = self.copier.new_buffer(record.place)
                with self._meter.running(buffer.nbytes):
                    wrong = self._read(record.name, bytes_of(buffer))
                if wrong is None:
                    running.take(record, buffer)
        except Exception as error:
            wrong = f"{type(error).__name__}: {error}"
        running.end(record, wrong)
