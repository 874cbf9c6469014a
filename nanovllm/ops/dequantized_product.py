"""Products of many rows with packed weights on a GPU: the weight in 16 bits in scratch memory, then torch's product.

With many rows the matrix units determine the time, and torch's library uses them best. The scratch is written and read
once a product: beside 4,096 rows that is about 6% of the product's time, counted in bytes at the memory's rate.

The scratch comes from torch's allocator and goes back when the product is launched, so that the next product takes the
same memory. No layer keeps any, and whoever measures the peak of a step measures it (`memory/profiling.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, Self, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

SCRATCH_BYTES = 256 << 20  # at most; larger matrices, such as those of logits, are multiplied in parts of their outputs
_OUTPUT_MULTIPLE = 128  # of a part: a whole number of the library's tiles


class Matrix(Protocol):
    """What is asked of a packed weight here; see `packed_weights.PackedWeight`."""

    @property
    def shape(self) -> tuple[int, int]: ...

    def rows(self, index: slice, /) -> Self: ...


SomeMatrix = TypeVar("SomeMatrix", bound=Matrix)


def dequantized_linear(
    x: Tensor,
    weight: SomeMatrix,
    bias: Tensor | None,
    dequantize_: Callable[[SomeMatrix, Tensor], object],
    out: Tensor | None = None,
) -> Tensor:
    """x W^T + b: [rows, in] -> [rows, out]. The bits of a row may depend on the number of rows, as torch's do.

    dequantize_: writes a weight's values, rounded to x's dtype, into the second argument [out, in], contiguous. It is
    called with some of the outputs at a time, as `rows` of a slice gives them. out: memory for the result, whose rows
    may be strided.
    """
    (out_features, in_features) = weight.shape
    rows = x.shape[0]
    count = outputs_at_once(out_features, in_features, x.dtype.itemsize)
    scratch = x.new_empty(count, in_features)
    if count == out_features and out is None:
        dequantize_(weight, scratch)
        return F.linear(x, scratch, bias)
    y = x.new_empty(rows, out_features) if out is None else out
    for begin in range(0, out_features, count):
        part = slice(begin, min(begin + count, out_features))
        values = scratch[: part.stop - begin]
        into = y[:, part]
        dequantize_(weight.rows(part), values)
        if bias is None:
            torch.mm(x, values.t(), out=into)
        else:
            torch.addmm(bias[part], x, values.t(), out=into)
    return y


def outputs_at_once(out_features: int, in_features: int, itemsize: int) -> int:
    """How many outputs the scratch holds: all, or such that the parts are about equal."""
    most = max(1, SCRATCH_BYTES // (in_features * itemsize * _OUTPUT_MULTIPLE)) * _OUTPUT_MULTIPLE
    parts = -(-out_features // most)
    return out_features if parts == 1 else -(-out_features // (parts * _OUTPUT_MULTIPLE)) * _OUTPUT_MULTIPLE
