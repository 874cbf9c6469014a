"""A GGUF file's header: its metadata, and the type and bytes of each tensor. Nothing in the file is trusted.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The package gguf reads it too, but allocates by
counts before it knows that the file has so many bytes, and takes seconds for a vocabulary of 50,000 tokens.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

import numpy as np

from nanovllm.errors import ModelError, quoted

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_HEADER_BYTES = 256 << 20  # the largest known ones have 20 MB
MAX_KEY_BYTES = 65535
MAX_DIMENSIONS = 4
MAX_ENTRIES = 1 << 16  # of metadata and of tensors each
MAX_SIZE = 2**31 - 1  # of a dimension
MAX_ALIGNMENT = 1 << 20
READ_BYTES = 1 << 20
SHARD = re.compile(r"(.+)-00001-of-(\d{5})\.gguf", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class TensorType:
    """How numbers are stored: blocks of `block_size` numbers in `block_bytes` bytes."""

    name: str
    block_size: int = 0
    block_bytes: int = 0

    @property
    def is_supported(self) -> bool:
        return self.block_size > 0


# By GGML's code; those without sizes are only named in messages.
TENSOR_TYPES: Mapping[int, TensorType] = MappingProxyType(
    {
        0: TensorType("F32", 1, 4),
        1: TensorType("F16", 1, 2),
        2: TensorType("Q4_0", 32, 18),
        3: TensorType("Q4_1", 32, 20),
        6: TensorType("Q5_0", 32, 22),
        7: TensorType("Q5_1", 32, 24),
        8: TensorType("Q8_0", 32, 34),
        9: TensorType("Q8_1"),
        10: TensorType("Q2_K"),
        11: TensorType("Q3_K"),
        12: TensorType("Q4_K", 256, 144),
        13: TensorType("Q5_K", 256, 176),
        14: TensorType("Q6_K", 256, 210),
        15: TensorType("Q8_K"),
        16: TensorType("IQ2_XXS"),
        17: TensorType("IQ2_XS"),
        18: TensorType("IQ3_XXS"),
        19: TensorType("IQ1_S"),
        20: TensorType("IQ4_NL"),
        21: TensorType("IQ3_S"),
        22: TensorType("IQ2_S"),
        23: TensorType("IQ4_XS"),
        24: TensorType("I8"),
        25: TensorType("I16"),
        26: TensorType("I32"),
        27: TensorType("I64"),
        28: TensorType("F64"),
        29: TensorType("IQ1_M"),
        30: TensorType("BF16", 1, 2),
        34: TensorType("TQ1_0"),
        35: TensorType("TQ2_0"),
        39: TensorType("MXFP4"),
        40: TensorType("NVFP4"),
    }
)
SUPPORTED = tuple(kind.name for kind in TENSOR_TYPES.values() if kind.is_supported)

# Kinds of values: struct's letter of each number; text and lists are apart.
NUMBERS: Mapping[int, str] = MappingProxyType(
    {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
)
TEXT, LIST = 8, 9
LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor: its shape, outermost dimension first, and its bytes in the file from `offset` on."""

    name: str
    shape: tuple[int, ...]
    type: TensorType
    file: Path
    offset: int

    @property
    def row_bytes(self) -> int:
        """Bytes of a row; rows are the innermost dimension. 0 if the type is not supported, whose size is not known."""
        if not self.type.is_supported:
            return 0
        return self.shape[-1] // self.type.block_size * self.type.block_bytes

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape[:-1]) * self.row_bytes


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """metadata: numbers, text, and lists: of numbers as an array, of text as a list. tensors: by name."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    def check_types(self) -> None:
        """Raise ModelError for a tensor of a type that is not supported."""
        for tensor in self.tensors.values():
            if not tensor.type.is_supported:
                raise ModelError(
                    f"{tensor.file}: tensor {quoted(tensor.name)} is of type {tensor.type.name}, which is not "
                    f"supported; supported: {', '.join(SUPPORTED)}."
                )


def read_header(path: Path) -> GgufHeader:
    """The header of a GGUF model: of one file, or of the first of several with the tensors of all.

    Raises ModelError for a file that is damaged, truncated or of another format; the message has the key or the tensor
    and the offset in bytes. Types that are not supported are left to `check_types`, since an architecture that is not
    says more. Allocates no more than the headers' own size plus a constant.
    """
    header = _read_file(path)
    count = header.metadata.get("split.count", 1)
    if count in (0, 1):
        return header
    match = SHARD.fullmatch(path.name)
    if header.metadata.get("split.no") != 0 or match is None or int(match[2]) != count:
        raise ModelError(
            f"{path} is one of {quoted(count)} files of a model: give the first, which is named like "
            "model-00001-of-00003.gguf, and leave the others beside it."
        )
    tensors = dict(header.tensors)
    for number in range(2, count + 1):
        part = _read_file(path.with_name(f"{match[1]}-{number:05d}-of-{match[2]}{path.suffix}"))
        if twice := sorted(tensors.keys() & part.tensors.keys()):
            raise ModelError(f"{part.path} holds tensor {quoted(twice[0])}, which {tensors[twice[0]].file} holds too.")
        tensors |= part.tensors
    return GgufHeader(path, header.metadata, tensors)


def _read_file(path: Path) -> GgufHeader:
    try:
        with path.open("rb") as file:
            reader = _Reader(path, file, file.seek(0, 2))
            file.seek(0)
            return _header(reader)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}.") from error
    except MemoryError:
        raise ModelError(f"{path} cannot be read: its header takes more memory than there is.") from None


class _Reader:
    """Reads values one after the other, and only bytes that the file has."""

    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self.path = path
        self.size = size  # of the file
        self.at = 0
        self._file = file
        self._read = bytearray()

    def error(self, what: str) -> ModelError:
        return ModelError(f"{self.path} is damaged or truncated: {what}; copy it again.")

    def advance(self, num_bytes: int, what: str) -> int:
        """Move past `num_bytes` that are in memory then, and return where they begin. what: for messages."""
        start, end = self.at, self.at + num_bytes
        if end > self.size:
            raise self.error(f"{what} at byte {start} needs {num_bytes} bytes, and the file ends at byte {self.size}")
        if end > MAX_HEADER_BYTES:
            raise self.error(
                f"{what} at byte {start} ends after the {MAX_HEADER_BYTES >> 20} MiB of the largest header"
            )
        if end > len(self._read):
            self._read += self._file.read(max(end - len(self._read), READ_BYTES))
            if end > len(self._read):
                raise self.error(f"{what} at byte {start} could not be read")
        self.at = end
        return start

    def number(self, letter: str, what: str) -> Any:
        start = self.advance(struct.calcsize(f"<{letter}"), what)
        return struct.unpack_from(f"<{letter}", self._read, start)[0]

    def text(self, what: str, most: int = MAX_HEADER_BYTES) -> str:
        size = self.number("Q", what)
        if size > most:
            raise self.error(f"{what} at byte {self.at} has {size} bytes; at most {most} are possible")
        start = self.advance(size, what)
        try:
            return self._read[start : self.at].decode()
        except UnicodeDecodeError:
            raise self.error(f"{what} at byte {start} is not UTF-8") from None

    def value(self, key: str, kind: int) -> Any:
        if kind == TEXT:
            return self.text(key)
        if kind == LIST:
            return self._list(key)
        if kind not in NUMBERS:
            raise self.error(f"{key} at byte {self.at} has type {kind}, which GGUF does not have")
        return self.number(NUMBERS[kind], key)

    def _list(self, key: str) -> Any:
        kind, count = self.number("I", key), self.number("Q", key)
        if kind == LIST:
            raise ModelError(f"{self.path}: {key} is a list of lists, which no supported model has.")
        if kind == TEXT:
            if count > (self.size - self.at) // 8:  # each has its length in 8 bytes
                raise self.error(f"{key} at byte {self.at} counts {count} texts, more than the rest of the file holds")
            return self._texts(key, count)
        if kind not in NUMBERS:
            raise self.error(f"{key} at byte {self.at} is a list of type {kind}, which GGUF does not have")
        dtype = np.dtype(f"<{NUMBERS[kind]}") if kind != 7 else np.dtype("?")
        start = self.advance(count * dtype.itemsize, key)
        return np.frombuffer(self._read, dtype, count, start).copy()

    def _texts(self, key: str, count: int) -> list[str]:
        """As `text`, but in a third of the time for those that are in memory: a vocabulary has several 100,000."""
        found, read = [], self._read
        for _ in range(count):
            start = self.at + 8
            end = start + (LENGTH.unpack_from(read, self.at)[0] if start <= len(read) else 0)
            if start <= len(read) >= end:
                try:
                    found.append(read[start:end].decode())
                except UnicodeDecodeError:
                    raise self.error(f"{key} at byte {start} is not UTF-8") from None
                self.at = end
            else:
                found.append(self.text(key))
        return found


def _header(reader: _Reader) -> GgufHeader:
    num_tensors, num_values = _counts(reader)
    metadata: dict[str, Any] = {}
    for index in range(num_values):
        key = reader.text(f"metadata key {index}", MAX_KEY_BYTES)
        if key in metadata:
            raise reader.error(f"the metadata has {quoted(key)} twice")
        metadata[key] = reader.value(quoted(key), reader.number("I", quoted(key)))
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 0 < alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise reader.error(f"general.alignment is {quoted(alignment)}, and must be a power of two")
    tensors: dict[str, GgufTensor] = {}
    for index in range(num_tensors):
        tensor = _tensor(reader, index)
        if tensor.name in tensors:
            raise reader.error(f"it holds tensor {quoted(tensor.name)} twice")
        if tensor.offset % alignment:
            raise reader.error(f"tensor {quoted(tensor.name)} begins at {tensor.offset}, not a multiple of {alignment}")
        tensors[tensor.name] = tensor
    return GgufHeader(reader.path, metadata, _placed(reader, tensors, -(-reader.at // alignment) * alignment))


def _counts(reader: _Reader) -> tuple[int, int]:
    """The numbers of tensors and of metadata entries."""
    start = reader.advance(4, "the format's name")
    if reader._read[start : start + 4] != MAGIC:
        raise ModelError(
            f"{reader.path} is not a GGUF file: it begins with {quoted(bytes(reader._read[start : start + 4]))}, "
            f"not {quoted(MAGIC)}."
        )
    version = reader.number("I", "the version")
    if version not in VERSIONS:
        order = "; its bytes are in big-endian order" if version & 0xFFFF == 0 and version else ""
        raise ModelError(
            f"{reader.path} has GGUF version {version}{order}; supported: {', '.join(map(str, VERSIONS))}."
        )
    num_tensors, num_values = reader.number("Q", "the number of tensors"), reader.number("Q", "the number of values")
    for what, count in (("tensors", num_tensors), ("metadata values", num_values)):
        if count > MAX_ENTRIES:
            raise reader.error(f"it counts {count} {what}, and at most {MAX_ENTRIES} are read")
    return num_tensors, num_values


def _tensor(reader: _Reader, index: int) -> GgufTensor:
    """The tensor, with its offset in the data, which follows the header."""
    name = reader.text(f"the name of tensor {index}", MAX_KEY_BYTES)
    what = f"tensor {quoted(name)}"
    dimensions = reader.number("I", what)
    if not 1 <= dimensions <= MAX_DIMENSIONS:
        raise reader.error(f"{what} at byte {reader.at} has {dimensions} dimensions, not 1 to {MAX_DIMENSIONS}")
    shape = tuple(reader.number("Q", what) for _ in range(dimensions))[::-1]
    if not all(1 <= size <= MAX_SIZE for size in shape):
        raise reader.error(f"{what} has shape {list(shape)}, and each size must be from 1 to {MAX_SIZE}")
    code, offset = reader.number("I", what), reader.number("Q", what)
    kind = TENSOR_TYPES.get(code, TensorType(f"type {code}"))
    if kind.is_supported and shape[-1] % kind.block_size:
        raise reader.error(f"{what} has rows of {shape[-1]} numbers, and {kind.name} has blocks of {kind.block_size}")
    return GgufTensor(name, shape, kind, reader.path, offset)


def _placed(reader: _Reader, tensors: Mapping[str, GgufTensor], data: int) -> dict[str, GgufTensor]:
    """The tensors with their offsets in the file, whose data begin at `data`. All are in the file, and none overlap."""
    placed, end, before = {}, data, ""
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].offset):
        start = data + tensor.offset
        what = f"tensor {quoted(name)} at byte {start}"
        if start < end:
            raise reader.error(f"{what} begins within tensor {quoted(before)}, which ends at byte {end}")
        end, before = start + tensor.num_bytes, name
        if end > reader.size:
            raise reader.error(f"{what} has {tensor.num_bytes} bytes, and the file ends at byte {reader.size}")
        placed[name] = GgufTensor(name, tensor.shape, tensor.type, tensor.file, start)
    return {name: placed[name] for name in tensors}
