"""Writing behind the steps: a thread appends what was copied out of the KV cache to segments."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from torch import Tensor

from nanovllm.features.kv_disk.drafts import replace_json
from nanovllm.features.kv_disk.inspect import ABOUT
from nanovllm.features.kv_disk.records import Name
from nanovllm.features.kv_disk.segments import SegmentReader, SegmentWriter
from nanovllm.features.kv_disk.units import bytes_of

QUEUE_BYTES = 256 << 20  # copied out of the KV cache and not written yet
CLOSE_SECONDS = 60.0  # for what is in the queue at the end
STALL_SECONDS = 5.0  # of these, without a record written
# most that are written before somebody learns of them
SAID_RECORDS = 64
SAID_SECONDS = 1.0
NICENESS = 19  # of the thread: on a busy CPU it takes the time that steps leave


class WriterThread:
    """Writes what is put, in order, in a thread of its own that starts with the first of it.

    written, failed: called by that thread.
    """

    def __init__(
        self,
        writer: SegmentWriter,
        reader: SegmentReader,
        about: Mapping[str, Any],
        written: Callable[[list[Name]], None],
        failed: Callable[[Exception], None],
    ) -> None:
        """reader: learns of the records; about: what the directory is of."""
        self.has_failed = False
        self._writer = writer
        self._reader = reader
        self._about = about
        self._written = written
        self._failed = failed
        self._queue: queue.SimpleQueue[tuple[Name, Tensor] | None] = queue.SimpleQueue()
        self._bytes = 0  # in the queue
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    @property
    def has_room(self) -> bool:
        return self._bytes < QUEUE_BYTES and not self.has_failed

    def put(self, name: Name, content: Tensor) -> None:
        with self._lock:
            self._bytes += content.nbytes
        self._queue.put((name, content))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kv-disk-writer", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        with suppress(OSError):  # where a thread has no priority of its own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        written = list[Name]()
        said_at = time.monotonic()
        while (item := self._queue.get()) is not None:
            name, content = item
            try:
                if not self.has_failed and name not in self._reader and self._write(name, bytes_of(content)):
                    written.append(name)
            except Exception as error:
                self.has_failed = True
                self._failed(error)
            with self._lock:
                self._bytes -= content.nbytes
            is_due = len(written) >= SAID_RECORDS or time.monotonic() - said_at > SAID_SECONDS or self._queue.empty()
            if written and is_due:
                self._written(written)
                written = []
                said_at = time.monotonic()
        self._writer.close()

    def _write(self, name: Name, content: memoryview) -> bool:
        """Returns False if the record is larger than the space. Raises OSError."""
        about = self._writer.directory / ABOUT
        if not about.exists():
            replace_json(about, self._about)
        place = self._writer.append(name, content)
        if place is not None:
            self._reader.add(*place)
        return place is not None

    def close(self) -> int:
        """Write what is in the queue, unless the disk is too slow. Returns the bytes that are not written."""
        if self._thread is None:
            return 0
        thread = self._thread
        self._thread = None
        self._queue.put(None)
        left = -1
        deadline = time.monotonic() + CLOSE_SECONDS
        while thread.is_alive() and self._bytes != left and time.monotonic() < deadline:
            left = self._bytes
            thread.join(STALL_SECONDS)
        return self._bytes if thread.is_alive() else 0
