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
from nanovllm.layers.linear import Linear, linear
from nanovllm.layers.linear_method import COLUMNS, ROWS, Axis
from nanovllm.memory.adapters import aligned
from nanovllm.models.decoder import Decoder
from nanovllm.ops.upload import upload


@dataclass(frozen=True, slots=True)
class PartLayout:
    """One module of a linear layer: its adapter, the columns of y, rows of the layer's A, and where its B begins."""

    adapter: ModuleAdapter
    columns: slice
    ranks: slice
    b_offset: int

    @property
    def size(self) -> int:
        """Elements of its B."""
        return (self.columns.stop - self.columns.start) * self.adapter.rank

    def b(self, memory: Tensor) -> Tensor:
        """Its B in the memory of an adapter: [out, rank]."""
        return memory[self.b_offset : self.b_offset + self.size].view(-1, self.adapter.rank)


@dataclass(frozen=True, slots=True)
class LinearLayout:
    """Where the matrices of a linear layer are. The A of its parts, which share the input, are one matrix."""

    linear: Linear
    a_offset: int
    parts: Sequence[PartLayout]

    def views(self, memory: Tensor) -> LinearWeights:
        """The matrices in the memory of an adapter."""
        rank = self.parts[-1].ranks.stop
        in_size = self.linear.in_features
        a = memory[self.a_offset : self.a_offset + rank * in_size].view(rank, in_size)
        return LinearWeights(a, [(part.columns, part.ranks, part.b(memory)) for part in self.parts])


@dataclass(frozen=True, slots=True)
class LinearWeights:
    """a: [ranks of all parts, in]; parts: columns of y, rows of a, and B [out, rank] with the scale in it."""

    a: Tensor
    parts: Sequence[tuple[slice, slice, Tensor]]

    def add_(self, x: Tensor, y: Tensor, rows: slice | Tensor) -> None:
        """Add scale * B A x to `rows` of y [rows, out]; x is [rows, in]. Each row is computed independently."""
        low_rank = linear(x[rows], self.a)
        for columns, ranks, b in self.parts:
            y[rows, columns] += linear(low_rank[:, ranks], b)


AdapterWeights = Mapping[Linear, LinearWeights]


@dataclass(frozen=True, slots=True)
class PackedAdapter:
    """An adapter in host memory: elements [n] in the model's dtype, and which of them is what."""

    elements: Tensor
    layout: Sequence[LinearLayout]

    def weights_in(self, memory: Tensor) -> AdapterWeights:
        """The matrices in a copy of the elements."""
        return {each.linear: each.views(memory) for each in self.layout}


def read_packed(directory: Path, modules: Mapping[str, ModuleAdapter], model: Decoder) -> PackedAdapter:
    """Read the tensors of the parts that `read_adapter` has found.

    Raises ModelError for numbers that are not finite in the model's dtype.

    A tensor-parallel rank reads its rows of B where it has a module's rows, and its columns of A where it has its
    columns. B A x of its columns of x is then its part of the sum over the ranks.
    """
    layout, size = _layout(modules, model)
    elements = torch.zeros(size, dtype=model.dtype)
    path = directory / WEIGHTS
    with open_file(path) as stored:
        for each in layout:
            weights = each.views(elements)
            for part, (_, ranks, b) in zip(each.parts, weights.parts, strict=True):
                found = part.adapter
                read_a = _read(stored, found, found.a, (None, Axis(COLUMNS)), model)
                weights.a[ranks].copy_(_finite(path, found.a, read_a, model.dtype))
                scaled = _read(stored, found, found.b, (Axis(ROWS), None), model) * found.scale
                b.copy_(_finite(path, found.b, scaled, model.dtype))
    return PackedAdapter(elements, layout)


def _read(stored: Any, adapter: ModuleAdapter, name: str, axes: Sequence[Axis | None], model: Decoder) -> Tensor:
    """What this rank holds of a tensor, in fp32; `axes` as in `Sharding.part`."""
    sharding = model.spec.sharding_of(adapter.module)
    tensor = stored.get_slice(name)
    part = () if sharding is None else sharding.part(adapter.module, axes, tensor.get_shape())
    return joined(lambda slices: tensor[slices or slice(None)], part).float()


def _finite(path: Path, name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    converted = tensor.to(dtype)
    if not bool(converted.isfinite().all()):
        what = "NaN or infinity" if not bool(tensor.isfinite().all()) else f"numbers beyond {dtype}"
        raise ModelError(f"{path}: {name} holds {what}: get the adapter anew, or use dtype='float32'.")
    return converted


def _layout(modules: Mapping[str, ModuleAdapter], model: Decoder) -> tuple[list[LinearLayout], int]:
    """Where each matrix is, and the number of elements."""
    layout: list[LinearLayout] = []
    offset = 0
    for each in (found for layer in model.layers for found in layer.linears):
        ends = list(accumulate(each.parts.values()))
        adapted = [
            (modules[module], slice(end - size, end))
            for (module, size), end in zip(each.parts.items(), ends, strict=True)
            if module in modules
        ]
        if not adapted:
            continue
        a_offset = offset
        offset = offset + aligned(each.in_features * sum(adapter.rank for adapter, _ in adapted))
        parts: list[PartLayout] = []
        rank = 0
        for adapter, columns in adapted:
            parts.append(PartLayout(adapter, columns, slice(rank, rank + adapter.rank), offset))
            rank = rank + adapter.rank
            offset = offset + aligned(parts[-1].size)
        layout.append(LinearLayout(each, a_offset, parts))
    return layout, offset


@dataclass(frozen=True, slots=True)
class BatchAdapters:
    """Of a part of a batch: the rows of each adapter, int64 or a slice, and its weights.

    See `layers.linear.RowAdapters`.
    """

    groups: Sequence[tuple[slice | Tensor, AdapterWeights]]

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
    """The adapters of each part of `part_rows` rows of a batch; empty if no row has one.

    sequences: each one's adapter, by its number in `weights`, and its rows, in order. Other numbers are none.
    """
    return [
        BatchAdapters([(_index(ranges, device), weights[number]) for number, ranges in part.items()]) if part else None
        for part in ranges_of_parts(sequences, weights, part_rows)
    ]


def ranges_of_parts(
    sequences: Sequence[tuple[int | None, int]], known: Container[int | None], part_rows: int
) -> list[dict[int, list[range]]]:
    """For each part of a batch the rows of each adapter, counted within the part; see `batch_parts`."""
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
