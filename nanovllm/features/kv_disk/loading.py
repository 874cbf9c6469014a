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
from typing import Protocol

from nanovllm.device.base import Busy
from nanovllm.device.busy import BusyMeter

THREADS = 4  # each with one record under way, of some MiB
PATIENCE_SECONDS = 10.0  # for one record; after that nothing is read until the disk answers
CLOSE_SECONDS = 1.0  # for threads that are idle


class Target(Protocol):
    """Where the content of one record goes. Used by one thread."""

    def views(self) -> Sequence[memoryview]:
        """The memory to read into, in the order of the content: the target's own."""
        ...

    def take(self) -> None:
        """The content is there, and is right: copy it to where it goes."""
        ...


@dataclass(frozen=True, slots=True)
class Record:
    """A record to read, and where to. key, group: its name in the index."""

    key: bytes
    group: int
    target: Target
    num_bytes: int


class Load:
    """The records that one sequence waits for. Implements `engine.request.Loading`.

    wrong: the first record that could not be read, and why; no record if the disk does not answer.
    """

    def __init__(self, records: Sequence[Record], reads: Reads, at_end: Callable[[Load], None]) -> None:
        """at_end: called by the engine's thread when it learns that the read has ended."""
        self.records = records
        self.wrong: tuple[Record | None, str] | None = None
        self._reads = reads
        self._at_end = at_end
        self._left = len(records)
        self._copying = 0  # records
        self._is_cancelled = False

    @property
    def has_ended(self) -> bool:
        return self._left == 0 or self._reads.are_stuck

    def succeeds(self) -> bool:
        if self._left:
            self.cancel()
            self.wrong = self.wrong or (None, f"the disk has not answered for {PATIENCE_SECONDS:g} s")
        self._at_end(self)
        return self.wrong is None

    def cancel(self) -> None:
        """See `engine.request.Loading`. Waits for copies in memory, not for the disk."""
        with self._reads.changed:
            self._is_cancelled = True
            self._reads.changed.wait_for(lambda: self._copying == 0)
        self._reads.forget(self)

    # ---- the readers' threads

    @property
    def is_wanted(self) -> bool:
        return not self._is_cancelled and self.wrong is None

    def take(self, record: Record) -> None:
        """Copy what was read into the blocks, if they still wait for it."""
        with self._reads.changed:
            if not self.is_wanted:
                return
            self._copying += 1
        try:
            record.target.take()
        finally:
            with self._reads.changed:
                self._copying -= 1
                self._reads.changed.notify_all()

    def end(self, record: Record, wrong: str | None) -> None:
        with self._reads.changed:
            self._left -= 1
            if wrong is not None and self.wrong is None:
                self.wrong = (record, wrong)
            self._reads.changed.notify_all()


class Reads:
    """The threads, which start with the first read, and the reads under way.

    read: reads a record into memory and returns what is wrong with it, or None.
    """

    def __init__(self, read: Callable[[bytes, int, Sequence[memoryview]], str | None]) -> None:
        self.changed = threading.Condition()
        self._read = read
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._loads: list[Load] = []
        self._meter = BusyMeter()
        self._begun: dict[int, float] = {}  # when each thread began with what it does, by its id

    def start(self, records: Sequence[Record], at_end: Callable[[Load], None]) -> Load:
        load = Load(records, self, at_end)
        self._loads.append(load)
        for record in records:
            self.submit(partial(self._read_record, load, record))
        return load

    def submit(self, work: Callable[[], None]) -> None:
        """Let a thread do other work with the disk too. It raises nothing."""
        self._queue.put(work)
        if len(self._threads) < THREADS:
            # A daemon: a disk that does not answer must not keep the process from ending.
            thread = threading.Thread(target=self._run, name="kv-disk-reader", daemon=True)
            self._threads.append(thread)
            thread.start()

    @property
    def are_stuck(self) -> bool:
        """Whether a thread has waited for the disk for too long. It may answer later."""
        earliest = min(self._begun.copy().values(), default=None)
        return earliest is not None and time.monotonic() - earliest > PATIENCE_SECONDS

    def busy(self) -> Busy:
        """Bytes read so far, and the time during which something was read."""
        return self._meter.read()

    def wait(self, seconds: float) -> None:
        """Wait until a read has ended, at most so long."""
        with self.changed:
            self.changed.wait_for(lambda: any(load.has_ended for load in self._loads), seconds)

    def forget(self, load: Load) -> None:
        if load in self._loads:
            self._loads.remove(load)

    def cancel_all(self) -> None:
        for load in list(self._loads):
            load.cancel()

    def close(self) -> None:
        """Cancel all reads, and end the threads. Safe to call twice."""
        self.cancel_all()
        threads, self._threads = self._threads, []
        for _ in threads:
            self._queue.put(None)
        deadline = time.monotonic() + CLOSE_SECONDS
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            self._begun[threading.get_ident()] = time.monotonic()
            work()
            del self._begun[threading.get_ident()]

    def _read_record(self, load: Load, record: Record) -> None:
        wrong = None
        try:
            if load.is_wanted:
                with self._meter.running(record.num_bytes):
                    wrong = self._read(record.key, record.group, record.target.views())
                if wrong is None:
                    load.take(record)
        except Exception as error:
            wrong = f"{type(error).__name__}: {error}"
        load.end(record, wrong)
