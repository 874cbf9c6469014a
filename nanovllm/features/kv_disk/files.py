"""The files of a block store: one for each unit of a KV group and each recurrent state, in a directory of each model.

A file is written under another name and renamed, and is never changed after that. So any number of processes share a
directory without locks: a file that another one has deleted is a miss.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
import struct
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import xxhash

from nanovllm.data.memory_checks import gib
from nanovllm.errors import ConfigError, quoted
from nanovllm.features.kv_disk.policy import UNIT

MAGIC = b"nvkv0002"  # the last four digits are the version of the format
HEADER = struct.Struct("<8sQ16s")  # magic, bytes of the content, xxh3-128 of the file's name and the content
SUFFIX = ".kv"
DRAFT = ".tmp"  # at the end of the name while a file is written
ABANDONED_SECONDS = 3600.0  # age of a draft that no process is writing any more
MARGINS = 32  # of the space one part is free after files were deleted
MODEL = "model.txt"  # in a model's directory: its name, for people
DIGESTS = "digests.json"  # in the root: of the files of models
DIRECTORY = re.compile("[0-9a-f]{32}")  # named by what decides bits
OLD_DIRECTORY = re.compile("[0-9a-f]{64}")  # of an older format, which is not read

logger = logging.getLogger(__name__)


class DamagedFile(Exception):
    """A file that does not hold what its name says: cut, changed, or another one."""


def _header(path: Path, content: memoryview) -> bytes:
    """The name counts, so that a copy under another name is not taken for what that name says."""
    checksum = xxhash.xxh3_128(f"{path.parent.name}/{path.name}".encode())
    checksum.update(content)  # other threads run meanwhile
    return HEADER.pack(MAGIC, len(content), checksum.digest())


def write(path: Path, content: memoryview) -> None:
    """Write a file, and its directory if it is missing. Raises OSError, and leaves nothing then."""
    path.parent.mkdir(0o700, parents=True, exist_ok=True)
    replace(path, _header(path, content), content)


def replace(path: Path, *parts: bytes | memoryview) -> None:
    """Put a file in its place at once: whoever reads it finds the old or the new one, also after a kill."""
    draft = path.with_name(f"{path.name}.{os.getpid()}-{secrets.token_hex(4)}{DRAFT}")
    try:
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            for part in parts:
                file.write(part)
        os.replace(draft, path)
    except OSError:
        with suppress(OSError):  # a read-only file system refuses this too
            draft.unlink(missing_ok=True)
        raise


def read(path: Path, into: memoryview) -> None:
    """Fill memory with the content of a file. Raises OSError and DamagedFile."""
    with path.open("rb") as file:
        header = file.read(HEADER.size)
        is_whole = file.readinto(into) == len(into) and not file.read(1)
    if not is_whole or header != _header(path, into):
        raise DamagedFile(f"{path.name} is damaged")


# ---- space


def all_files(root: Path) -> list[tuple[Path, os.stat_result]]:
    """The files of all models, least recently used first; drafts that killed processes have left are deleted."""
    files: list[tuple[Path, os.stat_result]] = []
    for path in (*root.glob(f"*/*{SUFFIX}"), *root.rglob(f"*{DRAFT}")):
        with suppress(FileNotFoundError):  # another process has deleted it
            stat = path.stat()
            if path.suffix == DRAFT and time.time() - stat.st_mtime > ABANDONED_SECONDS:
                path.unlink()
            else:
                files.append((path, stat))
    return sorted(files, key=lambda file: file[1].st_mtime_ns)


class Space:
    """Keeps the files of all models within a number of bytes, by deleting the least recently used ones.

    Only what this process writes is counted between two looks at all files. So each further engine that writes at the
    same time may exceed the space by a margin.
    """

    def __init__(self, root: Path, limit: int | None, num_writers: int) -> None:
        """limit: None for half of what is free and taken. num_writers: ranks of an engine, which share it."""
        self._root = root
        self._limit = limit
        self._num_writers = num_writers
        self._left = 0  # bytes until the files must be looked at again

    def make_room(self, size: int) -> bool:
        """Delete files until `size` bytes fit. False if they never do. Raises OSError."""
        if size <= self._left:
            self._left -= size
            return True
        files = all_files(self._root)
        total = sum(stat.st_size for _, stat in files)
        if self._limit is None:
            self._limit = (shutil.disk_usage(self._root).free + total) // 2
            logger.info("kv_cache_dir_space: %s, half of what is free in %s", gib(self._limit), self._root)
        margin = max(size * self._num_writers, self._limit // MARGINS)
        if margin > self._limit:
            return False
        for path, stat in files:
            if total + margin <= self._limit:
                break
            path.unlink(missing_ok=True)
            total -= stat.st_size
        self._left = margin // self._num_writers - size
        return True


# ---- what a directory holds, for people


@dataclass(frozen=True, slots=True)
class Kept:
    """What is kept of one model as one kind of engine computes it."""

    path: Path
    model: str
    tokens: int
    size: int  # bytes
    last_used: float  # seconds since the epoch
    damaged: int  # bytes of files that are damaged or cannot be read; 0 if they were not read


def kept_in(root: str | Path, *, verify: bool = False) -> list[Kept]:
    """What the directory holds, by model. verify: read all files. Raises ConfigError if there is no such directory."""
    return [_kept(path, verify) for path in _directories(Path(root))]


def remove(root: str | Path) -> int:
    """Delete what `kept_in` lists and nothing else. Returns the bytes. Raises OSError if something stays."""
    size = sum(kept.size for kept in kept_in(root))
    for path in _directories(Path(root)):
        shutil.rmtree(path)
    (Path(root) / DIGESTS).unlink(missing_ok=True)
    return size


def _directories(root: Path) -> list[Path]:
    if not root.is_dir():
        raise ConfigError(f"{quoted(str(root))} is no directory: give the path that kv_cache_dir had")
    kinds = (DIRECTORY, OLD_DIRECTORY)
    return sorted(path for path in root.iterdir() if any(kind.fullmatch(path.name) for kind in kinds) and path.is_dir())


def _kept(directory: Path, verify: bool) -> Kept:
    keys = set[str]()
    size = damaged = 0
    last_used = 0.0
    is_old = OLD_DIRECTORY.fullmatch(directory.name) is not None
    model = "an older format" if is_old else "unknown"
    with suppress(OSError):
        model = (directory / MODEL).read_text(errors="replace")
    for path in directory.glob(f"*{SUFFIX}"):
        with suppress(FileNotFoundError):
            stat = path.stat()
            size += stat.st_size
            last_used = max(last_used, stat.st_mtime)
            if verify and not is_old and not _is_whole(path, stat.st_size):
                damaged += stat.st_size
            elif not is_old:
                keys.add(path.name.partition("-")[0])
    return Kept(directory, model, len(keys) * UNIT, size, last_used, damaged)


def _is_whole(path: Path, size: int) -> bool:
    try:
        read(path, memoryview(bytearray(max(0, size - HEADER.size))))
    except (OSError, DamagedFile):
        return False
    return True
