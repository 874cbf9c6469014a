"""The matrices of an adapter: packed into one tensor that is copied as a whole, and added to their rows of a batch."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanovllm.errors import ModelError
from nanovllm.features.lora.adapter_files import WEIGHTS, ModuleAdapter
from nanovllm.formats.checkpoint import joined, open_file
from nanovllm.layers.causal_lm import CausalLM
from nanovllm.layers.dense_weight import linear as multiply
from nanovllm.layers.linear import Linear
from nanovllm.layers.linear_method import COLUMNS, ROWS, Axis, CheckpointTensor
from nanovllm.memory.adapters import aligned
from nanovllm.ops.upload import upload


@dataclass(frozen=True, slots=True)
class PartLayout:
    """Where one module of a linear layer has its part."""

    adapter: ModuleAdapter
    columns: slice  # of y
    ranks: slice  # rows of the layer's A
    b_offset: int  # of its B, in elements

    @property
    def size(self) -> int:
        """Elements of its B."""
        return (self.columns.stop - self.columns.start) * self.adapter.rank

    def b(self, memory: Tensor) -> Tensor:
        """Its B in the memory of an adapter: [out, rank]."""
        return memory[self.b_offset : self.b_offset + self.size].view(-1, self.adapter.rank)


@dataclass(frozen=True, slots=True)
class LinearLayout:
    """Where the matrices of a linear layer are. Its parts share the input, so that their A are one matrix."""

    linear: Linear
    a_offset: int  # in elements
    parts: Sequence[PartLayout]

    def views(self, memory: Tensor) -> LinearWeights:
        """The matrices in the memory of an adapter."""
        rank = self.parts[-1].ranks.stop
        in_size = self.linear.in_features
        a = memory[self.a_offset : self.a_offset + rank * in_size].view(rank, in_size)
        return LinearWeights(a, [(part.columns, part.ranks, part.b(memory)) for part in self.parts])


@dataclass(frozen=True, slots=True)
class LinearWeights:
    """The matrices of a linear layer. Each B is already multiplied by the scale."""

    a: Tensor  # [ranks of all parts, in]
    parts: Sequence[tuple[slice, slice, Tensor]]  # columns of y, rows of a, and B [out, rank]

    def add_(self, x: Tensor, y: Tensor, rows: slice | Tensor) -> None:
        """Add scale * B A x to `rows` of y [rows, out]; x is [rows, in]. Each row is computed independently."""
        low_rank = multiply(x[rows], self.a)
        for columns, ranks, b in self.parts:
            y[rows, columns] += multiply(low_rank[:, ranks], b)


AdapterWeights = Mapping[Linear, LinearWeights]


@dataclass(frozen=True, slots=True)
class PackedAdapter:
    """An adapter in host memory."""

    elements: Tensor  # [n], in the model's dtype
    layout: Sequence[LinearLayout]  # which of them is what

    def weights_in(self, memory: Tensor) -> AdapterWeights:
        """The matrices in a copy of the elements."""
        return {linear.linear: linear.views(memory) for linear in self.layout}


def read_packed(directory: Path, modules: Mapping[str, ModuleAdapter], model: CausalLM) -> PackedAdapter:
    """Read the tensors of the parts that `read_adapter` has found.

    A tensor-parallel rank that has some rows of a module reads these rows of B. A rank that has some columns reads
    these columns of A; B A x of its columns of x is its part of the sum over the ranks. Raises ModelError for numbers
    that are not finite in the model's dtype.
    """
    layout, size = _layout(modules, model)
    elements = torch.zeros(size, dtype=model.dtype)
    path = directory / WEIGHTS
    with open_file(path) as stored:
        for linear_layout in layout:
            weights = linear_layout.views(elements)
            for part, (_, ranks, b) in zip(linear_layout.parts, weights.parts, strict=True):
                adapter = part.adapter
                held = linear_layout.linear.held(adapter.module)
                a = _read(stored, adapter.a, (None, Axis(COLUMNS)), held)
                weights.a[ranks].copy_(_finite(path, adapter.a, a, model.dtype))
                scaled_b = _read(stored, adapter.b, (Axis(ROWS), None), held) * adapter.scale
                b.copy_(_finite(path, adapter.b, scaled_b, model.dtype))
    return PackedAdapter(elements, layout)


def _read(
    stored: Any, name: str, axes: tuple[Axis | None, ...], held: tuple[Sequence[range], Sequence[range]]
) -> Tensor:
    """What this rank holds of a tensor, in fp32; axes, held: as in `CheckpointTensor`."""
    tensor = stored.get_slice(name)
    shape = tuple(tensor.get_shape())
    part = CheckpointTensor(shape, axes=axes, held=held).part(shape)
    return joined(lambda slices: tensor[slices or slice(None)], part).float()


def _finite(path: Path, name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    converted = tensor.to(dtype)
    if not bool(converted.isfinite().all()):
        what = "NaN or infinity" if not bool(tensor.isfinite().all()) else f"numbers beyond {dtype}"
        raise ModelError(f"{path}: {name} holds {what}: get the adapter anew, or use dtype='float32'.")
    return converted


def _layout(modules: Mapping[str, ModuleAdapter], model: CausalLM) -> tuple[list[LinearLayout], int]:
    """Where each matrix is, and the number of elements."""
    layout: list[LinearLayout] = []
    offset = 0
    for linear in (linear for layer in model.layers for linear in layer.linears):
        ends = list(accumulate(linear.parts.values()))
        adapted = [
            (modules[module], slice(end - size, end))
            for (module, size), end in zip(linear.parts.items(), ends, strict=True)
            if module in modules
        ]
        if not adapted:
            continue
        a_offset = offset
        offset = offset + aligned(linear.in_features * sum(adapter.rank for adapter, _ in adapted))
        parts: list[PartLayout] = []
        rank = 0
        for adapter, columns in adapted:
            parts.append(PartLayout(adapter, columns, slice(rank, rank + adapter.rank), offset))
            rank = rank + adapter.rank
            offset = offset + aligned(parts[-1].size)
        layout.append(LinearLayout(linear, a_offset, parts))
    return layout, offset


@dataclass(frozen=True, slots=True)
class BatchAdapters:
    """The adapters of a part of a batch. See `layers.dense_weight.RowAdapters`."""

    groups: Sequence[tuple[slice | Tensor, AdapterWeights]]  # rows of an adapter, int64 or a slice, and its weights

    def add_(self, linear: Linear, x: Tensor, y: Tensor) -> None:
        """Add each adapter's product to its rows of y, if it adapts this layer."""
        for rows, weights in self.groups:
            if linear in weights:
                weights[linear].add_(x, y, rows)


def batch_parts(
    sequences: Sequence[tuple[int | None, int]],
    weights: Mapping[int, AdapterWeights],
    part_rows: int,
    device: torch.device,
) -> list[BatchAdapters | None]:
    """The adapters of each part of a batch, where a part has `part_rows` rows; empty if no row has an adapter.

    sequences: in order, the number of each sequence's adapter and how many rows it has. A number that `weights` does
    not have is no adapter.
    """
    return [
        BatchAdapters([(_index(ranges, device), weights[number]) for number, ranges in part.items()]) if part else None
        for part in ranges_of_parts(sequences, weights, part_rows)
    ]


def ranges_of_parts(
    sequences: Sequence[tuple[int | None, int]], known: Container[int | None], part_rows: int
) -> list[dict[int, list[range]]]:
    """The rows of each adapter in each part of a batch, counted within the part; see `batch_parts`."""
    if not any(number in known for number, _ in sequences):
        return []
    parts: list[dict[int, list[range]]] = [{} for _ in range(0, sum(n for _, n in sequences), part_rows)]
    start = 0
    for number, num_rows in sequences:
        end = start + num_rows
        while start < end:
            index, first = divmod(start, part_rows)
            rows = range(first, min(first + end - start, part_rows))
            if number is not None and number in known:
                parts[index].setdefault(number, []).append(rows)
            start += len(rows)
    return parts


def _index(ranges: Sequence[range], device: torch.device) -> slice | Tensor:
    """The rows of the ranges: a slice if they are adjacent, so that no row is copied, else int64 [rows]."""
    first = ranges[0].start
    last = ranges[-1].stop
    if sum(map(len, ranges)) == last - first:
        return slice(first, last)
    return upload(torch.cat([torch.arange(rows.start, rows.stop) for rows in ranges]), device)
