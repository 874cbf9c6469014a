"""A GGUF file as a network: its config, its tensors, and how its matrices stay packed in memory."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nanovllm.errors import ModelError, quoted
from nanovllm.formats.checkpoint import StoredTensor
from nanovllm.formats.gguf import config
from nanovllm.formats.gguf.architectures import architecture_of
from nanovllm.formats.gguf.header import TENSOR_TYPES, GgufTensor, TensorType, read_header
from nanovllm.formats.gguf.names import named_tensors
from nanovllm.layers import linear_method as seam
from nanovllm.layers.linear import DenseWeight
from nanovllm.layers.packed_matrix import PackedMatrix, stack_by_form
from nanovllm.ops.packed_weights import gguf_weight

PLAIN = MappingProxyType({"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16})
# For random weights. Of each type the bytes of a block that hold fp16 numbers, and their values as a multiple of
# 1 / sqrt(columns) if all other bytes are random, so that the weights have mean 0 and variance 1 / columns.
RANDOM_SCALES: Mapping[str, Mapping[int, float]] = MappingProxyType(
    {
        "Q4_0": {0: 1 / 4.6},
        "Q4_1": {0: 1 / 4.6, 2: -7.5 / 4.6},
        "Q5_0": {0: 1 / 9.2},
        "Q5_1": {0: 1 / 9.2, 2: -15.5 / 9.2},
        "Q8_0": {0: 1 / 74},
        "Q4_K": {0: 1 / 250, 2: 7.5 / 250},
        "Q5_K": {0: 1 / 500, 2: 15.5 / 500},
        "Q6_K": {208: 1 / 1370},
    }
)


@dataclass(frozen=True, slots=True)
class GgufMethod:
    """How the matrices of a GGUF file are stored: each in its own type. types: by module, of those that are packed."""

    types: Mapping[str, str]

    @property
    def name(self) -> str:
        return "gguf"

    def tensors(self, module: str, out_features: int, in_features: int) -> seam.NamedTensors:
        """See `LinearMethod.tensors`. The shape is that of the matrix, not that of its bytes."""
        if module not in self.types:
            yield from seam.dense_tensors(module, out_features, in_features)
            return
        yield f"{module}.weight", seam.CheckpointTensor((out_features, in_features), (self.types[module],))

    def units(self, module: str, out_features: int, in_features: int) -> tuple[int, int]:
        kind = self._type(module)
        return 1, 1 if kind is None else kind.block_size

    def weight_bytes(self, module: str, out_features: int, in_features: int, itemsize: int) -> int:
        kind = self._type(module)
        if kind is None:
            return out_features * in_features * itemsize
        return out_features * -(-in_features // kind.block_size) * kind.block_bytes

    def create(
        self, parts: Mapping[str, int], in_features: int, dtype: torch.dtype, device: torch.device
    ) -> seam.StoredWeight:
        def create(kind: TensorType | None, own: dict[str, int]) -> seam.StoredWeight:
            if kind is None:
                return DenseWeight(own, in_features, dtype, device)
            return GgufWeight(kind, own, in_features, dtype, device)

        return stack_by_form(parts, lambda module, _: self._type(module), create, dtype)

    def _type(self, module: str) -> TensorType | None:
        """The type of a packed matrix; None if it is stored as plain numbers."""
        return TENSOR_TYPES[self.types[module]] if module in self.types else None


class GgufWeight(PackedMatrix):
    """Matrices of one type, as their bytes lie in the file."""

    def __init__(
        self, kind: TensorType, parts: Mapping[str, int], in_features: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        row_bytes = in_features // kind.block_size * kind.block_bytes
        data = torch.empty(sum(parts.values()), row_bytes, dtype=torch.uint8, device=device)
        super().__init__(gguf_weight(kind.name.lower(), data), parts, dtype)
        self._kind = kind

    def slots(self) -> seam.NamedSlots:
        for module, part in self.module_weights():
            randomize = _randomizer(part.data, self._kind, part.in_features)
            yield f"{module}.weight", seam.WeightSlot(part.data, part.shape, randomize=randomize)


def _randomizer(view: Tensor, kind: TensorType, columns: int) -> Callable[[torch.Generator], None]:
    """What fills the bytes of a packed matrix at random."""

    def randomize(generator: torch.Generator) -> None:
        view.random_(0, 256, generator=generator)
        blocks = view.unflatten(-1, (-1, kind.block_bytes))
        for start, value in RANDOM_SCALES[kind.name].items():
            number = torch.tensor([value * columns**-0.5], dtype=torch.float16, device=view.device)
            blocks[..., start : start + 2] = number.view(torch.uint8)

    return randomize


class GgufConfig(NamedTuple):
    """What a file says about the network.

    fields: as in config.json; generation: as in generation_config.json; rope_factors: what each RoPE frequency is
    divided by, or none; method: how the matrices are stored, None if all are plain numbers.
    """

    fields: dict[str, Any]
    generation: Mapping[str, Any]
    rope_factors: tuple[float, ...]
    method: GgufMethod | None


def read_config(path: Path) -> GgufConfig:
    """The network of a file. Raises ModelError for a file that is damaged or not supported."""
    header = read_header(path)
    fields = config.config_fields(header)  # first: of another architecture, the tensors' types do not matter
    header.check_types()
    types = {
        name.removesuffix(".weight"): tensor.type.name
        for name, tensor in named_tensors(header)
        if tensor.type.name not in PLAIN
    }
    method = GgufMethod(types) if types else None
    return GgufConfig(fields, config.generation_fields(header), config.rope_factors(header), method)


def list_tensors(path: Path) -> dict[str, StoredTensor]:
    """Each tensor by its name in Hugging Face format. Shapes count numbers, also those of packed matrices.

    Raises ModelError for a file that is damaged or not supported.
    """
    header = read_header(path)
    heads, (_, architecture) = config.rotated_heads(header), architecture_of(header)
    found = {}
    for name, tensor in named_tensors(header):
        if name == config.ROPE_FACTORS:
            continue
        module = tensor.name.rpartition(".")[0].rpartition(".")[2]
        if architecture.adds_one and module.endswith("norm"):
            read = partial(_read_minus_one, tensor)
        else:
            read = partial(read_tensor, tensor, heads.get(module))
        found[name] = StoredTensor(tensor.file, tensor.shape, tensor.type.name, read)
    return found


def _read_minus_one(tensor: GgufTensor, part: tuple[slice, ...] = ()) -> Tensor:
    """As `read_tensor`, of the weights of a norm to which llama.cpp has added 1."""
    return read_tensor(tensor, None, part).float() - 1


def read_tensor(tensor: GgufTensor, heads: int | None, part: tuple[slice, ...] = ()) -> Tensor:
    """The tensor's data: numbers in its shape, or of a packed type the bytes [rows, bytes of a row].

    heads: the number of heads whose rows llama.cpp has put into another order for RoPE; they are put back. part: what
    is read, as slices of the first axes: rows of whole heads, and columns of whole blocks.
    """
    num_rows, num_columns = tensor.shape if len(tensor.shape) == 2 else (tensor.shape[0], 1)
    everything = slice(None)
    rows, columns = (
        range(size)[kept] for size, kept in zip((num_rows, num_columns), (*part, everything, everything), strict=False)
    )
    data = _read_bytes(tensor, rows, columns, num_columns)
    values = torch.from_numpy(data).view(len(rows), -1)
    if tensor.type.name in PLAIN:
        values = values.view(PLAIN[tensor.type.name])
    if len(tensor.shape) == 1:
        values = values.flatten()
    return values if heads is None else _in_halves(values, heads * len(rows) // num_rows)


def _read_bytes(tensor: GgufTensor, rows: range, columns: range, num_columns: int) -> Any:
    """The bytes of rows and columns of a matrix [., num_columns], a piece of the file after the other."""
    block = tensor.type
    first, size, row_bytes = (
        number // block.block_size * block.block_bytes for number in (columns.start, len(columns), num_columns)
    )
    if size == row_bytes:
        starts, shape = [rows.start * row_bytes], (1, len(rows) * row_bytes)
    else:
        starts, shape = [row * row_bytes + first for row in rows], (len(rows), size)
    # Memory of its own, which goes back to the system with the tensor: malloc would keep some of it.
    data = np.ndarray(shape, np.uint8, mmap.mmap(-1, max(1, shape[0] * shape[1]), flags=mmap.MAP_PRIVATE))
    with tensor.file.open("rb") as file:
        for piece, start in zip(data, starts, strict=True):
            file.seek(tensor.offset + start)
            num_read = file.readinto(piece.data)
            if num_read < len(piece):
                raise ModelError(
                    f"{tensor.file} is truncated: tensor {quoted(tensor.name)} at byte {tensor.offset} has "
                    f"{tensor.num_bytes} bytes, and only {start + num_read} could be read; copy it again."
                )
    return data


def _in_halves(rows: Tensor, heads: int) -> Tensor:
    """Rows of heads, in which the two numbers of a rotated pair are neighbours, with them half a head apart instead."""
    if rows.shape[0] % (2 * heads):
        return rows  # a shape that the loader has refused
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, -1)
    return pairs.transpose(1, 2).reshape(rows.shape)
