"""The file of weights for which host memory is too small.

Units (layers without experts, or single experts) lie in it one behind the other, in the form in which they are copied
to the device. It has no name, so that nothing is left of it when the process ends, however it ends.

Reads and writes are direct (O_DIRECT): the disk uses the memory of the units itself. Reads through the page cache were
about as fast on a virtual disk with two cores (2 GiB that were not cached, in pieces of 1 to 16 MiB, by 1 to 8 threads:
0.5 to 1.3 GB/s either way), but took four to ten times as much of a core, and cores multiply meanwhile. They also take
host memory beyond what weights may have. Where a file system has no direct reads, they go through the page cache.
"""

from __future__ import annotations

import errno
import os
import tempfile
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path

from nanovllm.data.memory_checks import gib
from nanovllm.errors import ConfigError, EngineError, quoted
from nanovllm.memory.weights import BLOCK

PIECE_BYTES = 4 << 20  # of a read, several of which are under way at once
READERS = 8  # threads, each with a piece under way
CLOSED = "the file of weights is closed: the engine it belongs to was shut down"
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def whole_blocks(num_bytes: int) -> int:
    """What a unit of so many bytes takes, in the file and in memory: direct reads begin and end at blocks."""
    return -(-num_bytes // BLOCK) * BLOCK


class Read:
    """A unit that is being read into memory."""

    def __init__(self, pieces: Sequence[Future[None]]) -> None:
        self._pieces = pieces

    @property
    def is_done(self) -> bool:
        """Whether it has ended, well or not."""
        return all(piece.done() for piece in self._pieces)

    @property
    def has_succeeded(self) -> bool:
        """Whether the unit is in the memory."""
        return self.is_done and all(piece.exception() is None for piece in self._pieces)

    def wait_for_end(self) -> None:
        """Wait until it has ended, well or not."""
        wait(self._pieces)

    def wait(self) -> None:
        """Wait until it has ended. Raises EngineError if the unit is not in the memory then."""
        self.wait_for_end()
        for piece in self._pieces:
            piece.result()


class WeightFile:
    """A file that is written once, from its beginning, and read by threads. Used by one thread."""

    def __init__(self, directory: str | Path, num_bytes: int) -> None:
        """directory: is made if need be. num_bytes: of all units, each in whole blocks.

        Raises ConfigError if the directory cannot hold them.
        """
        self._directory = directory
        self.num_bytes_read = 0  # that reads were begun for
        self._end = 0  # of the units so far
        self._num_writing = 0  # threads that write into memory
        self._epoch = 0  # reads of earlier ones do not begin any more
        self._settled = threading.Condition()  # of these two
        try:
            self._file = _open_without_name(Path(directory))
        except OSError as error:
            raise self._unusable(str(error)) from error
        self._close_file = weakref.finalize(self, os.close, self._file)
        try:
            os.posix_fallocate(self._file, 0, num_bytes)
        except OSError as error:
            self._close_file()
            lacks = f"the weights for which the host is too small take {gib(num_bytes)} of it, and it has less free"
            raise self._unusable(lacks if error.errno in NO_SPACE else str(error)) from error
        self._threads = ThreadPoolExecutor(READERS, "weight-reader")  # they start with the first read

    def append(self, unit: memoryview) -> int:
        """Write a unit, in whole blocks. Returns where in the file it begins. Raises ConfigError if that fails."""
        begin = self._end
        written = 0
        try:
            while written < len(unit):
                written += os.pwrite(self._file, unit[written:], begin + written)
        except OSError as error:
            raise self._unusable(str(error)) from error
        self._end += len(unit)
        return begin

    def read(self, begin: int, into: memoryview, before: Callable[[], None] = lambda: None) -> Read:
        """Begin to read the unit that was written at `begin`. into: of its size.

        before: called by each thread before it writes into the memory; an error of it is one of the read.
        Raises EngineError if the file is closed.
        """
        epoch = self._epoch
        pieces = []
        try:
            for offset in range(0, len(into), PIECE_BYTES):
                part = into[offset : offset + PIECE_BYTES]
                pieces.append(self._threads.submit(self._read_piece, epoch, begin + offset, part, before))
        except RuntimeError:
            raise EngineError(CLOSED) from None
        self.num_bytes_read += len(into)
        return Read(pieces)

    def _read_piece(self, epoch: int, begin: int, into: memoryview, before: Callable[[], None]) -> None:
        before()
        with self._settled:
            if epoch != self._epoch:
                raise EngineError("weights are not read: a step has failed meanwhile, or the engine was shut down")
            self._num_writing += 1
        try:
            self._fill(begin, into)
        finally:
            with self._settled:
                self._num_writing -= 1
                self._settled.notify_all()

    def _fill(self, begin: int, into: memoryview) -> None:
        done = 0
        while done < len(into):
            try:
                count = os.preadv(self._file, [into[done:]], begin + done)
            except OSError as error:
                raise EngineError(f"weights cannot be read from {self._place}: {error}") from error
            if not count:
                raise EngineError(f"weights cannot be read from {self._place}: the file has become shorter")
            done += count

    def settle(self) -> None:
        """Begin no more of the reads so far, and wait until no thread writes into memory."""
        with self._settled:
            self._epoch += 1
            self._settled.wait_for(lambda: not self._num_writing)

    def close(self) -> None:
        """End all reads, and free the disk's space. Safe to call twice."""
        self.settle()
        self._threads.shutdown()
        self._close_file()

    @property
    def _place(self) -> str:
        return f"weights_dir={quoted(str(self._directory))}"

    def _unusable(self, why: str) -> ConfigError:
        return ConfigError(f"{self._place}: {why}; name a directory on a local disk with enough space")


def _open_without_name(directory: Path) -> int:
    """A new file for direct reads and writes, where there are such, which is deleted when it is closed."""
    directory.mkdir(0o700, parents=True, exist_ok=True)
    file, path = tempfile.mkstemp(dir=directory, prefix="weights-")
    try:
        with suppress(OSError):  # there are none
            direct = os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
            os.close(file)
            file = direct
    finally:
        os.unlink(path)
    return file
