"""The adapters of a batch: which rows each one is added to."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nanovllm.features.lora.weights import AdapterWeights
from nanovllm.layers.linear import Linear
from nanovllm.ops.upload import upload


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
    first, last = ranges[0].start, ranges[-1].stop
    if sum(map(len, ranges)) == last - first:
        return slice(first, last)
    return upload(torch.cat([torch.arange(rows.start, rows.stop) for rows in ranges]), device)
