"""A GGUF file's header: its metadata, and the type and bytes of each tensor. Nothing in the file is trusted.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The package gguf (0.19) takes 17 s of CPU time
and 530 MB for a vocabulary of 250,000 tokens, 23 s and 870 MB with as many merges; this reader takes 0.3 s and 70 MB.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from nanovllm.data.json_fields import Field, integer
from nanovllm.errors import ModelError, quoted

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_HEADER_BYTES = 256 << 20  # the largest known ones have 20 MB
MAX_ENTRIES = 1 << 16  # of metadata and of tensors each
MAX_SIZE = 2**31 - 1  # of a dimension
SHARD = re.compile(r"(.+)-00001-of-(\d{5})\.gguf", re.IGNORECASE)

# The names of the types by GGML's code.
_NAMES = (
    *("F32", "F16", "Q4_0", "Q4_1", "", "", "Q5_0", "Q5_1", "Q8_0", "Q8_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("Q8_K", "IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S", "IQ4_NL", "IQ3_S", "IQ2_S", "IQ4_XS", "I8", "I16", "I32"),
    *("I64", "F64", "IQ1_M", "BF16", "", "", "", "TQ1_0", "TQ2_0", "", "", "", "MXFP4", "NVFP4"),
)
# Of the types that are read: numbers in a block, and its bytes.
_BLOCKS = {
    **{"F32": (1, 4), "F16": (1, 2), "BF16": (1, 2), "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22)},
    **{"Q5_1": (32, 24), "Q8_0": (32, 34), "Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210)},
    "MXFP4": (32, 17),
}

# Kinds of values: struct's letter of each number; text and lists are apart.
NUMBERS: Mapping[int, str] = MappingProxyType(
    {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
)
TEXT = 8
LIST = 9
LENGTH = struct.Struct("<Q")


class TensorType(NamedTuple):
    """How numbers are stored."""

    name: str
    block_size: int  # numbers in a block; 0 if the type is not supported
    block_bytes: int


TENSOR_TYPES = MappingProxyType({name: TensorType(name, *sizes) for name, sizes in _BLOCKS.items()})


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor of a file."""

    name: str
    shape: tuple[int, ...]  # outermost dimension first
    type: TensorType
    file: Path
    offset: int  # of its first byte in the file

    @property
    def num_bytes(self) -> int:
        """0 if the type is not supported."""
        kind = self.type
        return math.prod(self.shape) // kind.block_size * kind.block_bytes if kind.block_size else 0


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The header of a file. The methods check a value when they read it; their ModelErrors name key and value."""

    path: Path
    metadata: Mapping[str, Any]  # a list of numbers is an array, a list of texts is a list
    tensors: Mapping[str, GgufTensor]  # by name

    def get(self, key: str, field: Field) -> Any:
        """The value, or None if the file has none. A list with the same number for every layer gives that number."""
        value = self.metadata.get(key)
        if isinstance(value, np.ndarray):
            value = value[0].item() if len(value) and (value == value[0]).all() else value.tolist()
        if value is not None and not field.holds(value):
            raise ModelError(f"{self.path}: {key}={quoted(value)}: must be {field.rule}.")
        return value

    def each(self, key: str, count: int, field: Field) -> list[Any]:
        """A value for each of `count` layers. Raises ModelError if the file has none, or another number of them."""
        value = self.metadata.get(key)
        if not isinstance(value, np.ndarray):
            return [self.need(key, field)] * count
        values: list[Any] = value.tolist()
        if len(values) != count or not all(map(field.holds, values)):
            raise ModelError(f"{self.path}: {key}={quoted(values)}: must be for each of {count} layers {field.rule}.")
        return values

    def need(self, key: str, field: Field) -> Any:
        """The value. Raises ModelError if the file has none."""
        if key not in self.metadata:
            raise ModelError(f"{self.path} has no {key}, which its network needs.")
        return self.get(key, field)

    def texts(self, key: str) -> list[str]:
        """The texts of a list; none if the file does not have it."""
        value = self.metadata.get(key, [])
        if isinstance(value, np.ndarray) and not len(value):  # an empty list of another type
            return []
        if not isinstance(value, list):
            raise ModelError(f"{self.path}: {key}={quoted(value)}: must be a list of texts.")
        return value

    def numbers(self, key: str, count: int, default: float | None) -> Any:
        """A list of `count` numbers: the file's, or `default` for each. Without a default the file must have it."""
        value = self.metadata.get(key)
        if value is None and default is not None:
            return [default] * count
        if not isinstance(value, np.ndarray) or len(value) != count or not np.isfinite(value).all():
            given = f"{len(value)} values" if isinstance(value, np.ndarray | list) else quoted(value)
            raise ModelError(f"{self.path}: {key} must be a list of {count} finite numbers, and it has {given}.")
        return value

    def check_types(self) -> None:
        """Raise ModelError for a tensor of a type that is not supported."""
        for tensor in self.tensors.values():
            if not tensor.type.block_size:
                raise ModelError(
                    f"{tensor.file}: tensor {quoted(tensor.name)} is of type {tensor.type.name}, which is not "
                    f"supported; supported: {', '.join(TENSOR_TYPES)}."
                )


def read_header(path: Path) -> GgufHeader:
    """The header of a GGUF model: of one file, or of the first of several with the tensors of all.

    Raises ModelError for a file that is damaged, truncated or of another format; the message names the key or the
    tensor, and the offset in bytes. `check_types` refuses types of tensors later, because an architecture that is not
    supported is the better reason to refuse a file. Allocates no more than the size of the headers plus a constant.
    """
    header = _read_file(path)
    count = header.get("split.count", integer(0, 65535)) or 1
    if count == 1:
        return header
    match = SHARD.fullmatch(path.name)
    if match is None or int(match[2]) != count:
        raise ModelError(
            f"{path} is one of {count} files of a model: give the first, which is named like "
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
            size = file.seek(0, 2)
            file.seek(0)
            if (begin := file.read(4)) != MAGIC:
                raise ModelError(f"{path} is not a GGUF file: it begins with {quoted(begin)}, not {quoted(MAGIC)}.")
            with mmap.mmap(file.fileno(), min(size, MAX_HEADER_BYTES), access=mmap.ACCESS_READ) as data:
                return _Reader(path, data, size).header()
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}.") from error
    except MemoryError:
        raise ModelError(f"{path} cannot be read: its header takes more memory than there is.") from None


class _Reader:
    """Reads values one after the other, and only bytes that the file has."""

    def __init__(self, path: Path, data: mmap.mmap, size: int) -> None:
        self._path = path
        self._data = data
        self._size = size  # of the file
        self._at = len(MAGIC)  # the next byte
        self._what = "the header"  # what is being read, for messages

    def header(self) -> GgufHeader:
        try:
            return self._header()
        except (ValueError, OverflowError) as error:
            if isinstance(error, ModelError):
                raise
            raise self._error(str(error)) from None

    def _error(self, why: str) -> ModelError:
        where = f"{self._what} at byte {self._at}"
        return ModelError(f"{self._path} is damaged or truncated: {where}: {why}; copy it again.")

    def _skip(self, num_bytes: int) -> int:
        """Move past `num_bytes`, and return where they begin."""
        start = self._at
        if start + num_bytes > len(self._data):
            most = f", and at most {MAX_HEADER_BYTES} bytes of header are read" if self._size > len(self._data) else ""
            raise self._error(f"it has {num_bytes} bytes, and the file ends at byte {self._size}{most}")
        self._at += num_bytes
        return start

    def _number(self, letter: str) -> Any:
        return struct.unpack_from(f"<{letter}", self._data, self._skip(struct.calcsize(f"<{letter}")))[0]

    def _text(self) -> str:
        start = self._skip(self._number("Q"))
        return self._data[start : self._at].decode()

    def _value(self, kind: int) -> Any:
        if kind == TEXT:
            return self._text()
        if kind == LIST:
            return self._list(self._number("I"), self._number("Q"))
        return self._number(_letter(kind))

    def _list(self, kind: int, count: int) -> Any:
        if kind == TEXT:
            return self._texts(count)
        letter = _letter(kind)
        dtype = np.dtype("?" if letter == "?" else f"<{letter}")
        return np.frombuffer(self._data, dtype, count, self._skip(count * dtype.itemsize)).copy()

    def _texts(self, count: int) -> list[str]:
        """As `_text`, but in a third of the time: a vocabulary has several 100,000."""
        texts = []
        data = self._data
        last = len(self._data) - LENGTH.size
        for _ in range(count):
            start = self._at + LENGTH.size
            size = LENGTH.unpack_from(data, self._at)[0] if self._at <= last else LENGTH.size
            if start + size > len(data):
                self._skip(LENGTH.size + size)  # raises
            self._at = start + size
            texts.append(data[start : self._at].decode())
        return texts

    def _header(self) -> GgufHeader:
        if (version := self._number("I")) not in VERSIONS:
            raise ModelError(f"{self._path} has GGUF version {version}; supported: {', '.join(map(str, VERSIONS))}.")
        num_tensors = self._number("Q")
        num_values = self._number("Q")
        if max(num_tensors, num_values) > MAX_ENTRIES:
            raise ValueError(f"it counts {num_tensors} tensors and {num_values} values; at most {MAX_ENTRIES} are read")
        metadata: dict[str, Any] = {}
        for index in range(num_values):
            self._what = f"metadata key {index}"
            key = self._text()
            self._what = quoted(key)
            if key in metadata:
                raise ValueError("the metadata has it twice")
            metadata[key] = self._value(self._number("I"))
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 0 < alignment <= 1 << 20 or alignment & (alignment - 1):
            raise ValueError(f"general.alignment is {quoted(alignment)}, and must be a power of two")
        tensors: dict[str, GgufTensor] = {}
        for index in range(num_tensors):
            self._what = f"the name of tensor {index}"
            name = self._text()
            self._what = f"tensor {quoted(name)}"
            if name in tensors:
                raise ValueError("the file holds it twice")
            tensors[name] = self._tensor(name, alignment)
        data = -(-self._at // alignment) * alignment
        return GgufHeader(self._path, metadata, self._placed(tensors, data))

    def _tensor(self, name: str, alignment: int) -> GgufTensor:
        """The tensor, with its offset in the data, which follows the header."""
        if not 1 <= (dimensions := self._number("I")) <= 4:
            raise ValueError(f"it has {dimensions} dimensions, not 1 to 4")
        shape = tuple(self._number("Q") for _ in range(dimensions))[::-1]
        code = self._number("I")
        offset = self._number("Q")
        known = (_NAMES[code] if code < len(_NAMES) else "") or f"number {code}"
        kind = TENSOR_TYPES.get(known, TensorType(known, 0, 0))
        if not all(1 <= size <= MAX_SIZE for size in shape) or (kind.block_size and shape[-1] % kind.block_size):
            raise ValueError(f"type {kind.name} cannot have shape {list(shape)}")
        if offset % alignment:
            raise ValueError(f"its data begin at {offset}, not a multiple of {alignment}")
        return GgufTensor(name, shape, kind, self._path, offset)

    def _placed(self, tensors: Mapping[str, GgufTensor], data: int) -> dict[str, GgufTensor]:
        """The tensors with their offsets in the file, whose data begin at `data`. All are in it, and none overlap."""
        placed = {name: replace(tensor, offset=data + tensor.offset) for name, tensor in tensors.items()}
        end = data
        for tensor in sorted(placed.values(), key=lambda tensor: tensor.offset):
            self._what = f"tensor {quoted(tensor.name)}"
            self._at = tensor.offset
            if tensor.offset < end:
                raise ValueError("it begins within another one")
            end = tensor.offset + tensor.num_bytes
            if end > self._size:
                raise ValueError(f"it has {tensor.num_bytes} bytes, and the file ends at byte {self._size}")
        return placed


def _letter(kind: int) -> str:
    if kind not in NUMBERS:
        raise ValueError(f"no model that is supported has a value of type {kind} here")
    return NUMBERS[kind]
