"""The records of a segment file: a header with key, size and checksums, then the bytes of one unit of one KV group."""

from __future__ import annotations

import struct
from typing import NamedTuple

import xxhash

MAGIC = b"nvkv0001"  # the last four digits are the version of the format
KEY_BYTES = 32
_FIELDS = struct.Struct(f"<8s{KEY_BYTES}sIQ16s")  # magic, key, group, size, xxh3-128 of the content
HEADER_BYTES = _FIELDS.size + 8  # and the xxh3-64 of these fields
Name = tuple[bytes, int]  # of a record: its key, and its KV group; of a state the number of groups


class Header(NamedTuple):
    """key: of the tokens and all before them, and of what decides their bits; size: bytes of the content."""

    key: bytes
    group: int
    size: int
    checksum: bytes


def checksum_of(content: bytes | memoryview) -> bytes:
    """Other threads run meanwhile."""
    found = xxhash.xxh3_128()
    found.update(content)
    return found.digest()


def pack(header: Header) -> bytes:
    fields = _FIELDS.pack(MAGIC, *header)
    return fields + xxhash.xxh3_64_digest(fields)


def unpack(data: bytes) -> Header | None:
    """The header, or None for anything else: other bytes, too few of them, or another version."""
    if len(data) != HEADER_BYTES or xxhash.xxh3_64_digest(data[: _FIELDS.size]) != data[_FIELDS.size :]:
        return None
    magic, *fields = _FIELDS.unpack(data[: _FIELDS.size])
    return Header(*fields) if magic == MAGIC else None
