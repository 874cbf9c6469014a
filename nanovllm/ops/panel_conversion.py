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

# Of panels that are converted at a time. A scheme takes up to four times as much meanwhile, which a GPU that lacks
# memory for its weights can spare, and smaller pieces would be more launches than a layer of experts can hide.
PIECE_BYTES = 16 << 20


def take_(weight: PackedWeight, other: PackedWeight) -> None:
    """Write the matrix of `other` into the memory of `weight`, which is on the same device.

    `other` is in the same order or in panels. Raises ValueError if its form differs otherwise.
    """
    if _form(weight) == _form(other) and _order(weight) == _order(other):
        for mine, theirs in zip(weight.parts, other.parts, strict=True):
            mine.copy_(theirs)
    elif _form(weight) == _form(other) and weight.panel_outputs is None and other.panel_outputs is not None:
        take_panels_(weight, [part.unsqueeze(0) for part in other.parts], weight.out_features)
    else:
        raise ValueError(f"{_described(weight)} cannot become {_described(other)}.")


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
            own = stack[:, panels.start * OUTPUTS : panels.stop * OUTPUTS]
            into = own[matrices] if numbers is None else own.new_empty(len(piece), *own.shape[1:])
            if is_data:
                _write_data(weight, piece, into)
            else:
                _write_groups(piece, into)
            if numbers is not None:
                write_matrices_(own, into, numbers[matrices])


def write_matrices_(stack: Tensor, matrices: Tensor, numbers: Sequence[int] | None) -> None:
    """Write matrices [n, ...] over those of a stack [all, ...] that have these numbers; None: over all."""
    if numbers is None:
        stack.copy_(matrices)
    elif numbers:
        torch._foreach_copy_([stack[number] for number in numbers], list(matrices.unbind()))


def _write_data(weight: PackedWeight, panels: Tensor, into: Tensor) -> None:
    """Data of n matrices, uint8 [n, panels, bytes of a panel], to [n, outputs, bytes of a row as `weight` has them].

    Panels may be filled up to more outputs and inputs.
    """
    count, num_panels, panel_bytes = panels.shape
    shape = (count, num_panels * OUTPUTS, panel_bytes // OUTPUTS)
    fits = into.shape == shape and not weight.planes
    rows = into if fits else panels.new_empty(shape)
    panels_to_rows(weight.scheme, panels, weight.block_bytes, rows)
    if weight.planes:
        write_planes(weight.scheme, rows[:, : into.shape[1]], into)
    elif not fits:
        into.copy_(rows[:, : into.shape[1], : into.shape[2]])


def _write_groups(panels: Tensor, into: Tensor) -> None:
    """Scales or zeros of n matrices, [n, panels, groups, OUTPUTS], to [n, outputs, groups]."""
    rows = panels.transpose(2, 3)
    if into.shape[1] == rows.shape[1] * OUTPUTS:
        into.unflatten(1, (-1, OUTPUTS)).copy_(rows)
    else:
        into.copy_(rows.flatten(1, 2)[:, : into.shape[1]])


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
