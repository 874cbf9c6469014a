"""Packed weights in panels, the order of the CPU's kernels, become those in the order of a GPU's kernels, there.

The work is done in pieces by torch's operations on whole words where a scheme allows it. Nothing is rounded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from nanovllm.ops.gguf_planes import write_planes
from nanovllm.ops.packed_panels import OUTPUTS, panels_to_rows
from nanovllm.ops.packed_weights import PackedWeight

# Of panels that are converted at a time: they and what becomes of them fit into the L2 cache of a large GPU.
PIECE_BYTES = 16 << 20


def take_(weight: PackedWeight, other: PackedWeight) -> None:
    """Write the matrix of `other` into the memory of `weight`, which is on the same device.

    `other` is in the same order or in panels. Raises ValueError if its form differs otherwise.
    """
    if _form(weight) == _form(other) and _order(weight) == _order(other):
        for mine, theirs in zip(weight.parts, other.parts, strict=True):
            mine.copy_(theirs)
    elif can_take_panels(weight, other):
        take_panels_(weight, [part.unsqueeze(0) for part in other.parts], weight.out_features)
    else:
        raise ValueError(f"{_described(weight)} cannot become {_described(other)}.")


def can_take_panels(weight: PackedWeight, other: PackedWeight, out_features: int | None = None) -> bool:
    """Whether `other` is in panels and `take_panels_` writes it into `weight`, a stack of matrices or one alone.

    out_features: of each in the stack, None for one alone.
    """
    (all_outputs, *form) = _form(weight)
    outputs = all_outputs if out_features is None else out_features
    is_in_panels = other.panel_outputs is not None
    return weight.panel_outputs is None and is_in_panels and _form(other) == (outputs, *form)


def take_panels_(
    weight: PackedWeight, parts: Sequence[Tensor], out_features: int, numbers: Sequence[int] | None = None
) -> None:
    """Write matrices in panels into `weight`, a stack of matrices [out_features, in_features] in rows or planes.

    parts: data, scales and zeros, those that there are, of n matrices: [n, *shape of one in panels], maybe strided
    along the first dimension; numbers: where they go in the stack, None: they are all, in order.
    """
    for part, values in zip(weight.parts, parts, strict=True):
        is_data = part is weight.data
        stack = (part.view(torch.uint8) if is_data else part).unflatten(0, (-1, out_features))
        for matrices, panels in _pieces(values):
            piece = values[matrices, panels]
            begin = panels.start * OUTPUTS
            own = stack[:, begin : begin + piece.shape[1] * OUTPUTS]
            some = None if numbers is None else numbers[matrices]
            whole = own[matrices] if some is None else None
            rows = _rows_of_data(weight, piece, whole) if is_data else piece.transpose(2, 3).flatten(1, 2)
            if rows is not whole:  # they are filled up to 16 outputs and whole blocks
                rows = rows[:, : own.shape[1], : own.shape[2]]
                write_matrices_(own if whole is None else whole, rows, some)


def write_matrices_(stack: Tensor, matrices: Tensor, numbers: Sequence[int] | None) -> None:
    """Write matrices [n, ...] over those of a stack [all, ...] that have these numbers; None: over all."""
    if numbers is None:
        stack.copy_(matrices)
    elif numbers:
        torch._foreach_copy_([stack[number] for number in numbers], list(matrices.unbind()))


def _rows_of_data(weight: PackedWeight, panels: Tensor, memory: Tensor | None) -> Tensor:
    """uint8 [n, panels, bytes of a panel] -> [n, 16 * panels, bytes of a row as `weight` has them, or more].

    memory: where the rows without those that fill up panels go if they fit exactly, and then the result.
    """
    count, num_panels, panel_bytes = panels.shape
    shape = (count, num_panels * OUTPUTS, panel_bytes // OUTPUTS)
    fits = memory is not None and memory.shape == shape and not weight.planes
    rows = memory if memory is not None and fits else panels.new_empty(shape)
    panels_to_rows(weight.scheme, panels, weight.block_bytes, rows)
    if not weight.planes:
        return rows
    planes = memory if memory is not None else panels.new_empty(*shape[:2], weight.data.shape[1])
    write_planes(weight.scheme, rows[:, : planes.shape[1]], planes)
    return planes


def _pieces(values: Tensor) -> Iterator[tuple[slice, slice]]:
    """Some matrices and some panels at a time, of [n, panels, ...]: whole matrices where several fit into a piece."""
    num_matrices, num_panels = values.shape[:2]
    panel_bytes = values[:1, :1].nbytes
    most_panels = max(1, PIECE_BYTES // max(1, panel_bytes))
    most_matrices = max(1, most_panels // max(1, num_panels))
    for begin in range(0, num_matrices, most_matrices):
        for first in range(0, num_panels, most_panels):
            yield slice(begin, begin + most_matrices), slice(first, first + most_panels)


def _form(weight: PackedWeight) -> tuple[object, ...]:
    scales, zeros = (None if part is None else part.dtype for part in (weight.scales, weight.zeros))
    return weight.out_features, weight.in_features, weight.scheme, weight.group_size, scales, zeros


def _order(weight: PackedWeight) -> tuple[bool, bool]:
    return weight.panel_outputs is not None, weight.planes


def _described(weight: PackedWeight) -> str:
    order = "planes" if weight.planes else "rows" if weight.panel_outputs is None else "panels"
    return f"{weight.scheme} {list(weight.shape)} in {order}"
