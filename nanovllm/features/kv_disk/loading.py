"""Reading behind the steps: threads read records, several at once, into the blocks of sequences that wait for them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from nanovllm.device.base import Busy
from nanovllm.device.busy import BusyMeter

THREADS = 4  # each with one record under way, of some MiB
CLOSE_SECONDS = 5.0  # for threads that are idle


class Target(Protocol):
    """Where the content of one record goes. Used by one thread."""

    def views(self) -> Sequence[memoryview]:
        """The memory to read into, in the order of the content."""
        ...

    def take(self) -> None:
        """The content is there, and is right."""
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

    wrong: the first record that could not be read, and why.
    """

    def __init__(self, records: Sequence[Record], reads: Reads, at_end: Callable[[Load], None]) -> None:
        """at_end: called by the engine's thread when it learns that the read has ended."""
        self.records = records
        self.wrong: tuple[Record, str] | None = None
        self._reads = reads
        self._at_end = at_end
        self._left = len(records)
        self._active = 0
        self._is_cancelled = False

    @property
    def has_ended(self) -> bool:
        return self._left == 0

    def succeeds(self) -> bool:
        self._at_end(self)
        return self.wrong is None

    def cancel(self) -> None:
        with self._reads.changed:
            self._is_cancelled = True
            self._reads.changed.wait_for(lambda: self._active == 0)
        self._reads.forget(self)

    # ---- the readers' threads

    def begin(self) -> bool:
        """Begin with a record; False if the read has failed or is cancelled."""
        with self._reads.changed:
            if self._is_cancelled or self.wrong is not None:
                return False
            self._active += 1
            return True

    def end(self, record: Record, wrong: str | None, has_begun: bool) -> None:
        with self._reads.changed:
            self._left -= 1
            self._active -= has_begun
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
        self._queue: queue.SimpleQueue[tuple[Load, Record] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._loads: list[Load] = []
        self._meter = BusyMeter()

    def start(self, records: Sequence[Record], at_end: Callable[[Load], None]) -> Load:
        load = Load(records, self, at_end)
        self._loads.append(load)
        for record in records:
            self._queue.put((load, record))
        while len(self._threads) < min(THREADS, len(records)):
            # A daemon: a disk that does not answer must not keep the process from ending.
            thread = threading.Thread(target=self._run, name="kv-disk-reader", daemon=True)
            self._threads.append(thread)
            thread.start()
        return load

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
        for thread in threads:
            thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            load, record = item
            wrong, has_begun = None, load.begin()
            try:
                if has_begun:
                    wrong = self._read_record(record)
            except Exception as error:
                wrong = f"{type(error).__name__}: {error}"
            load.end(record, wrong, has_begun)

    def _read_record(self, record: Record) -> str | None:
        with self._meter.running(record.num_bytes):
            wrong = self._read(record.key, record.group, record.target.views())
            if wrong is None:
                record.target.take()
        return wrong
