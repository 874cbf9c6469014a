"""What a directory of KV blocks holds, for people: list, check, remove."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nanovllm.errors import ConfigError, quoted
from nanovllm.features.kv_disk.policy import UNIT
from nanovllm.features.kv_disk.records import HEADER_BYTES, checksum_of
from nanovllm.features.kv_disk.segments import SUFFIX, read_headers

ABOUT = "about.json"  # in each model's directory: what it is of
DIGESTS = "digests.json"  # in the root: of the files of models


@dataclass(frozen=True, slots=True)
class Kept:
    """What is kept of one model as one kind of engine computes it, by one of its ranks.

    tokens: in the KV group that has most records. size: bytes. last_used: seconds since the epoch, 0 if never.
    damaged: bytes that are no whole record with its checksum; None if contents were not read.
    """

    path: Path
    model: str
    tokens: int
    size: int
    last_used: float
    damaged: int | None = None
    rank: int = 0
    ranks: int = 1


def kept_in(root: str | Path) -> list[Kept]:
    """What the directory holds, by model; contents are not read. Raises ConfigError if it is no such directory."""
    return [_kept(path, is_read=False) for path in _models(Path(root))]


def verify(root: str | Path) -> list[Kept]:
    """The same, with every record read and its checksum computed."""
    return [_kept(path, is_read=True) for path in _models(Path(root))]


def remove(root: str | Path) -> int:
    """Delete what `kept_in` lists and nothing else. Returns the bytes. Raises OSError if something stays."""
    size = 0
    for each in kept_in(root):
        size += each.size
        shutil.rmtree(each.path)
    for path in Path(root).glob(f"{DIGESTS}*"):  # and drafts of it
        path.unlink(missing_ok=True)
    return size


def _models(root: Path) -> list[Path]:
    if not root.is_dir():
        raise ConfigError(f"{quoted(str(root))} is no directory: give the path that kv_cache_dir had")
    return sorted(path.parent for path in root.glob(f"*/{ABOUT}"))


def _kept(directory: Path, is_read: bool) -> Kept:
    counts: dict[int, int] = {}
    size = damaged = 0
    last_used = 0.0
    for path in directory.glob(f"*{SUFFIX}"):
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # deleted meanwhile, or not ours to read
            continue
        try:
            found = os.fstat(fd)
            size = size + found.st_size
            last_used = max(last_used, found.st_mtime)
            end = 0
            with suppress(OSError):  # what the disk does not give is damaged
                for at, header in read_headers(fd, 0, found.st_size):
                    if is_read and checksum_of(os.pread(fd, header.size, at + HEADER_BYTES)) != header.checksum:
                        damaged += HEADER_BYTES + header.size
                    else:
                        counts[header.group] = counts.get(header.group, 0) + 1
                    end = at + HEADER_BYTES + header.size
            damaged += found.st_size - end
        finally:
            os.close(fd)
    tokens = max(counts.values(), default=0) * UNIT
    kept = Kept(directory, "unknown", tokens, size, last_used, damaged if is_read else None)
    return replace(kept, **_about(directory))


def _about(directory: Path) -> dict[str, Any]:
    try:
        found = json.loads((directory / ABOUT).read_text())
        return {"model": str(found["model"]), "rank": int(found["rank"]), "ranks": int(found["ranks"])}
    except (OSError, ValueError, KeyError, TypeError):
        return {}
