"""Segment files: large, written from start to end by one process, read by any number of them, deleted whole.

Nothing is locked. A process creates each of its segments under a name that did not exist, and nobody else writes to it.
A file that was deleted stays readable for those who have it open. What a killed process leaves is whole records and at
most one cut one, which no header describes rightly or which ends behind the file.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from nanovllm.features.kv_disk.records import HEADER_BYTES, Header, Name, checksum_of, pack, unpack

SUFFIX = ".kv"
SEGMENT_BYTES = 256 << 20
SEGMENTS = 8  # of which the space has room for, at least, so that eviction takes little at once
Place = tuple[Path, int, Header]  # a segment, where a record begins in it, and its header


def read_headers(fd: int, begin: int, size: int) -> Iterator[tuple[int, Header]]:
    """The whole records of a file of `size` bytes from `begin` on: where each begins, and its header."""
    while begin + HEADER_BYTES <= size:
        header = unpack(os.pread(fd, HEADER_BYTES, begin))
        if header is None or begin + HEADER_BYTES + header.size > size:
            return
        yield begin, header
        begin += HEADER_BYTES + header.size


def _read_all(fd: int, into: list[memoryview], at: int) -> int:
    """Read into the pieces one after the other, up to the end of the file. Returns the number of bytes."""
    begin = at
    while into:
        number = os.preadv(fd, into, at)
        if number == 0:
            break
        at += number
        into = _rest(into, number)
    return at - begin


def _rest(parts: list[memoryview], done: int) -> list[memoryview]:
    """The parts without their first `done` bytes. A call does less than asked after a signal, and from 2 GiB on."""
    index = 0
    while index < len(parts) and done >= len(parts[index]):
        done -= len(parts[index])
        index += 1
    return [parts[index][done:], *parts[index + 1 :]] if index < len(parts) else []


def all_segments(root: Path) -> list[tuple[Path, os.stat_result]]:
    """The segments of all models under `root`, least recently used first."""
    found = []
    for path in root.glob(f"*/*{SUFFIX}"):
        try:
            found.append((path, path.stat()))
        except OSError:  # another process has deleted it
            continue
    return sorted(found, key=lambda each: each[1].st_mtime_ns)


@dataclass
class SegmentReader:
    """The index of one directory's segments, and the reading of records. Any thread may use it, and one scans."""

    directory: Path
    _index: dict[Name, Place] = field(default_factory=dict)
    _scanned: dict[Path, int] = field(default_factory=dict)  # bytes of each segment
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __contains__(self, name: Name) -> bool:
        return name in self._index

    def scan(self, goes_on: Callable[[], None] = lambda: None) -> tuple[list[Name], list[Name], list[OSError]]:
        """Find what has been written and deleted since the last scan, by this process or others. Raises OSError.

        Returns the records that are new, before those the ones that are gone, and why segments cannot be read. goes_on:
        called now and then.
        """
        present = set[Path]()
        added = list[Name]()
        gone = list[Name]()
        unreadable = list[OSError]()
        for path in sorted(self.directory.glob(f"*{SUFFIX}")):
            present.add(path)
            goes_on()
            try:
                self._scan_segment(path, goes_on, added, gone)
            except FileNotFoundError:
                present.discard(path)
            except OSError as error:  # it hides no other segment
                unreadable.append(OSError(error.errno, error.strerror, str(path)))
        with self._lock:
            for path in self._scanned.keys() - present:
                del self._scanned[path]
                gone += self._forget(path)
        return added, gone, unreadable

    def _scan_segment(self, path: Path, goes_on: Callable[[], None], added: list[Name], gone: list[Name]) -> None:
        begin = self._scanned.get(path, 0)
        size = path.stat().st_size
        if size < begin:  # cut since
            with self._lock:
                gone += self._forget(path)
            begin = 0
        if size == begin and path in self._scanned:
            return
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        found = list[tuple[int, Header]]()
        try:
            for record in read_headers(fd, begin, size):
                found.append(record)
                goes_on()
        finally:
            os.close(fd)
        for at, header in found:
            self.add(header, path, at)
            added.append((header.key, header.group))
            begin = at + HEADER_BYTES + header.size
        self._scanned[path] = begin

    def add(self, header: Header, path: Path, at: int) -> None:
        with self._lock:
            self._index[header.key, header.group] = (path, at, header)  # the latest: an earlier one may be damaged

    def _forget(self, path: Path) -> list[Name]:
        gone = [name for name, place in self._index.items() if place[0] == path]
        for name in gone:
            del self._index[name]
        return gone

    def discard(self, name: Name) -> None:
        """Do not find a record again: it cannot be read."""
        with self._lock:
            self._index.pop(name, None)

    def read(self, name: Name, into: memoryview) -> str | None:
        """Read a record's content. Returns what is wrong with the record, or None; then the memory holds its bytes."""
        place = self._index.get(name)
        if place is None:
            return "it was deleted meanwhile"
        (path, at, expected) = place
        size = len(into)
        if expected.size != size:
            return f"{path.name} holds {expected.size} bytes for it, expected {size}"
        header = bytearray(HEADER_BYTES)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                number = _read_all(fd, [memoryview(header), into], at)
            finally:
                os.close(fd)
        except OSError as error:
            return f"{path.name}: {error.strerror}"
        is_whole = number == HEADER_BYTES + size and unpack(bytes(header)) == expected
        return None if is_whole and checksum_of(into) == expected.checksum else f"{path.name} is damaged at {at}"

    def used(self, names: Iterable[Name]) -> None:
        """Note the use of records for eviction, by the time of their segments."""
        index = self._index
        for path in {place[0] for name in names if (place := index.get(name)) is not None}:
            try:
                os.utime(path)
            except OSError:  # another user's file, a file system without writing: it is evicted earlier
                continue


class SegmentWriter:
    """Appends records to segments of its own, within `space` bytes of all models together. Used by one thread.

    Methods raise OSError. Least recently used segments are deleted to make room, whoever wrote them.
    """

    def __init__(self, directory: Path, space: int, num_writers: int = 1) -> None:
        """num_writers: ranks of an engine, which share the space."""
        self.directory = directory
        self.space = space
        self.segment_bytes = min(SEGMENT_BYTES, space // (SEGMENTS * num_writers))
        self._fd = -1
        self._path = directory
        self._size = 0

    def append(self, name: Name, content: bytes | memoryview) -> tuple[Header, Path, int] | None:
        """Write a record; returns where it is. None if it is larger than the space."""
        header = Header(*name, len(content), checksum_of(content))
        size = HEADER_BYTES + len(content)
        if size > self.space:
            return None
        is_full = self._size > 0 and self._size + size > self.segment_bytes
        if self._fd < 0 or is_full or os.fstat(self._fd).st_nlink == 0:  # 0: another process has evicted it
            self._begin(max(size, self.segment_bytes))
        at = self._size
        parts = [memoryview(pack(header)), memoryview(content)]
        while parts:
            written = os.writev(self._fd, parts)
            self._size += written
            parts = _rest(parts, written)
        return header, self._path, at

    def _begin(self, size: int) -> None:
        """Start a segment with room for `size` bytes."""
        self.close()
        present = all_segments(self.directory.parent)
        total = sum(each.st_size for _, each in present)
        for path, found in present:
            if total + size <= self.space:
                break
            path.unlink(missing_ok=True)
            total -= found.st_size
        name = f"{time.time_ns():020d}-{os.getpid()}-{secrets.token_hex(4)}{SUFFIX}"
        path = self.directory / name
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._path = path
        self._size = 0

    def close(self) -> None:
        if self._fd >= 0:
            fd = self._fd
            self._fd = -1
            os.close(fd)
