"""A GGUF file as a network: its config, its tensors, and how its matrices stay packed in memory."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
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
from nanovllm.formats.gguf.names import NamedTensor, named_tensors
from nanovllm.formats.gguf.rows import ValueHeads
from nanovllm.formats.quantization.mxfp4 import Mxfp4
from nanovllm.formats.quantization.packed_method import QuantizedWeight
from nanovllm.layers import linear_method as seam
from nanovllm.layers.dense_weight import DenseWeight
from nanovllm.layers.packed_matrix import PackedMatrix, stack_by_form
from nanovllm.ops.gguf_planes import empty_rows
from nanovllm.ops.packed_weights import PackedWeight, gguf_weight

MXFP4 = TENSOR_TYPES["MXFP4"]
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
    """A `LinearMethod`: every matrix of a GGUF file stays in its own type."""

    types: Mapping[str, str]  # of each packed module; other modules are plain numbers
    value_heads: ValueHeads | None = None  # the order of value heads, if there are recurrent layers

    @property
    def name(self) -> str:
        return "gguf"

    def tensors(self, module: str, out_features: int, in_features: int) -> seam.NamedTensors:
        """See `LinearMethod.tensors`. The shape counts numbers, not bytes."""
        if module not in self.types:
            yield from seam.dense_tensors(module, out_features, in_features)
            return
        if self.types[module] == MXFP4.name:
            for suffix, filling in Mxfp4().fillings(out_features, in_features).items():
                yield f"{module}.{suffix}", filling.tensor
            return
        yield f"{module}.weight", seam.CheckpointTensor((out_features, in_features), (self.types[module],))

    def units(self, module: str, out_features: int, in_features: int) -> tuple[int, int]:
        kind = self._type(module)
        if kind is not None and self._heads_of_inputs(module, kind) is not None:
            return 1, in_features
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
            if kind == MXFP4:
                return QuantizedWeight(Mxfp4(), Mxfp4().layout(0, in_features), own, dtype, device)
            weight = GgufWeight(kind, own, in_features, dtype, device)
            heads = self._heads_of_inputs(next(iter(own)), kind)
            return weight if heads is None else ReorderedInputs(weight, heads)

        return stack_by_form(parts, lambda module, _: self._type(module), create, dtype)

    def _heads_of_inputs(self, module: str, kind: TensorType) -> ValueHeads | None:
        """The value heads that are the inputs of a matrix, if its columns keep the file's order of them; else None."""
        heads = self.value_heads
        of_heads = heads is not None and heads.tiled and module.endswith(".linear_attn.out_proj")
        return heads if of_heads and heads is not None and not heads.moves(kind.block_size) else None

    def _type(self, module: str) -> TensorType | None:
        """The type of a packed matrix; None if it is stored as plain numbers."""
        return TENSOR_TYPES[self.types[module]] if module in self.types else None


class GgufWeight(PackedMatrix):
    """Matrices of one type, as their bytes lie in the file."""

    def __init__(
        self, kind: TensorType, parts: Mapping[str, int], in_features: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        scheme = kind.name.lower()
        rows = sum(parts.values())
        if device.type == "cuda":
            data = empty_rows(scheme, rows, in_features, device)
        else:
            data = torch.empty(
                rows, in_features // kind.block_size * kind.block_bytes, dtype=torch.uint8, device=device
            )
        super().__init__(gguf_weight(scheme, data), parts, dtype)
        self._kind = kind

    def slots(self) -> seam.NamedSlots:
        for module, part in self.module_weights():
            randomize = _randomizer(part.data, self._kind, part.in_features)
            yield f"{module}.weight", seam.WeightSlot(part.data, part.shape, randomize=randomize)


class ReorderedInputs:
    """A packed matrix whose columns keep the file's order of value heads, because a block spans several heads.

    `apply` puts the inputs into that order.
    """

    dense = None

    def __init__(self, weight: GgufWeight, heads: ValueHeads) -> None:
        self._weight = weight
        self._heads = (heads.key_heads, heads.repeats)

    @property
    def packed(self) -> PackedWeight:
        return self._weight.packed

    def apply(self, x: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        """See `StoredWeight.apply`."""
        tiled = x.unflatten(1, (*self._heads, -1)).transpose(1, 2).flatten(1)
        return self._weight.apply(tiled, bias, out)

    def rows(self, indices: Tensor) -> Tensor:
        rows = self._weight.rows(indices)
        return rows.unflatten(1, (*self._heads[::-1], -1)).transpose(1, 2).flatten(1)

    def slots(self) -> seam.NamedSlots:
        yield from self._weight.slots()

    def finish_loading(self) -> None:
        self._weight.finish_loading()

    def tensors(self) -> Iterable[Tensor]:
        return self._weight.tensors()

    def read_from(self, tensors: Sequence[Tensor]) -> ReorderedInputs:
        weight = copy(self)
        weight._weight = self._weight.read_from(tensors)
        return weight

    def for_cpu(self) -> ReorderedInputs:
        weight = copy(self)
        weight._weight = self._weight.for_cpu()
        return weight

    def take_(self, other: seam.StoredWeight) -> None:
        if not isinstance(other, ReorderedInputs) or self._heads != other._heads:
            raise ValueError(f"A matrix with inputs in a file's order cannot become this {type(other).__name__}.")
        self._weight.take_(other._weight)

    def kernel_parts(self) -> None:
        """None: the kernels of a whole layer know one order."""

    def use_torch_products(self) -> None:
        self._weight.use_torch_products()


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
    """What a file says about the network."""

    fields: dict[str, Any]  # as in config.json
    generation: Mapping[str, Any]  # as in generation_config.json
    rope_factors: tuple[float, ...]  # what each RoPE frequency is divided by; empty if the file has none
    method: GgufMethod | None  # how the matrices are stored; None if all are plain numbers


def read_config(path: Path) -> GgufConfig:
    """The network of a file. Raises ModelError for a file that is damaged or not supported."""
    header = read_header(path)
    fields = config.config_fields(header)  # first: of another architecture, the tensors' types do not matter
    header.check_types()
    types = {
        named.name.removesuffix(".weight"): named.tensor.type.name
        for named in named_tensors(header)
        if named.tensor.type.name not in PLAIN
    }
    _, architecture = architecture_of(header)
    value_heads = None if architecture.value_heads is None else architecture.value_heads(header)
    method = GgufMethod(types, value_heads) if types else None
    return GgufConfig(fields, config.generation_fields(header), config.rope_factors(header), method)


def list_tensors(path: Path) -> dict[str, StoredTensor]:
    """Each tensor by its name in Hugging Face format. Shapes count numbers, those of packed matrices too.

    A matrix in MXFP4 becomes two tensors, blocks and scales, as in a checkpoint in MXFP4. Raises ModelError for a file
    that is damaged or not supported.
    """
    stored = {}
    for named in named_tensors(read_header(path)):
        name = named.name
        tensor = named.tensor
        kind = named.tensor.type.name
        if name == config.ROPE_FACTORS:
            continue
        if kind != MXFP4.name or len(named.shape) != 2:
            stored[name] = StoredTensor(tensor.file, named.shape, kind, partial(read_tensor, named))
            continue
        module = name.removesuffix(".weight")
        (rows, columns) = named.shape[-2:]
        for suffix, filling in Mxfp4().fillings(rows, columns).items():
            read = partial(_read_mxfp4, named, suffix)
            stored[f"{module}.{suffix}"] = StoredTensor(tensor.file, filling.tensor.shape, "U8", read)
    return stored


def read_tensor(named: NamedTensor, part: tuple[slice, ...] = ()) -> Tensor:
    """The tensor's data: numbers in its shape, or of a packed type the bytes [rows, bytes of a row].

    part: what is read, as slices of the first axes: rows, and columns of whole blocks.
    """
    tensor = named.tensor
    everything = slice(None)
    num_columns = tensor.shape[-1] if len(tensor.shape) == 2 else 1
    num_rows = tensor.shape[0] if named.rows is None else len(named.rows)
    kept = (*part, everything, everything)[:2]
    rows = np.arange(num_rows) if named.rows is None else named.rows
    columns = range(num_columns)[kept[1]]
    read = columns if named.columns is None else range(num_columns)
    data = _read_rows(tensor, rows[kept[0]], read, num_columns)
    if named.columns is not None:
        data = _picked(data, named.columns[kept[1]], tensor.type)
    values = torch.from_numpy(data)
    if tensor.type.name in PLAIN:
        values = values.view(PLAIN[tensor.type.name])
    if len(tensor.shape) == 1:
        values = values.flatten()
    return values if named.change is None else named.change.numbers(values)


def _picked(data: Any, columns: Any, kind: TensorType) -> Any:
    """The bytes of `columns`, which make whole blocks, from the bytes of whole rows."""
    blocks = data.reshape(len(data), -1, kind.block_bytes)[:, columns[:: kind.block_size] // kind.block_size]
    return blocks.reshape(len(data), -1)


def _read_mxfp4(named: NamedTensor, suffix: str, part: tuple[slice, ...] = ()) -> Tensor:
    """The blocks uint8 [rows, groups, 16] or the scales uint8 [rows, groups] of a matrix in MXFP4.

    A byte of a GGUF block holds the numbers i and i + 16, the first in its low half. A byte of a checkpoint's block
    holds the numbers 2 i and 2 i + 1.
    """
    size = MXFP4.block_size
    (rows, kept) = (*part, slice(None), slice(None))[:2]
    groups = range(named.shape[-1] // size)[kept]
    read = read_tensor(named, (rows, slice(groups.start * size, groups.stop * size)))
    data = read.view(len(read), len(groups), MXFP4.block_bytes)
    if suffix == "scales":
        return data[..., 0]
    numbers = torch.cat((data[..., 1:] & 15, data[..., 1:] >> 4), dim=-1)
    return numbers[..., ::2] | numbers[..., 1::2] << 4


def _read_rows(tensor: GgufTensor, rows: Any, columns: range, num_columns: int) -> Any:
    """The bytes of some rows, in the order of `rows`, and of some columns: uint8 [rows, bytes].

    num_columns: of the whole matrix.
    """
    if not len(rows):
        return np.empty((0, 0), np.uint8)
    ascending = np.sort(rows)
    runs = np.split(ascending, np.flatnonzero(np.diff(ascending) != 1) + 1)
    spans = [range(int(run[0]), int(run[-1]) + 1) for run in runs]
    pieces = [_read_bytes(tensor, span, columns, num_columns).reshape(len(span), -1) for span in spans]
    data = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
    return data if np.array_equal(rows, ascending) else data[np.searchsorted(ascending, rows)]


def _read_bytes(tensor: GgufTensor, rows: range, columns: range, num_columns: int) -> Any:
    """The same of consecutive rows; whole rows are one piece of the file, and else each row is one."""
    block = tensor.type
    first, size, row_bytes = (
        number // block.block_size * block.block_bytes for number in (columns.start, len(columns), num_columns)
    )
    if size == row_bytes:
        starts = [rows.start * row_bytes]
        shape = (1, len(rows) * row_bytes)
    else:
        starts = [row * row_bytes + first for row in rows]
        shape = (len(rows), size)
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
