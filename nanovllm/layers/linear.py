"""Linear projections, whose weights may hold several checkpoint tensors, and the destinations of those tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.ops import cpu_kernels

FEW_ROWS = 24  # with at most so many rows, reading the weights determines the time of a product


@dataclass(frozen=True, slots=True)
class WeightSlot:
    """The destination of one checkpoint tensor: a view of a parameter, and the shape that the tensor must have.

    The view may be wider than the tensor (one norm weight for several heads); `write` broadcasts.
    """

    view: Tensor
    shape: tuple[int, ...]

    def write(self, tensor: Tensor) -> None:
        """Copy `tensor` (of `shape`, any floating dtype, any device) into the parameter and convert it."""
        self.view.copy_(tensor)


NamedSlots = Iterator[tuple[str, WeightSlot]]


def slot_of(view: Tensor) -> WeightSlot:
    """The slot of a checkpoint tensor with exactly the shape of `view`."""
    return WeightSlot(view, tuple(view.shape))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b: [rows, in] -> [rows, out]. On the CPU the bits of a row do not depend on the other rows."""
    if x.is_cpu and x.dtype in cpu_kernels.KERNEL_DTYPES:
        return cpu_kernels.cpu_linear(x, weight, bias)
    return F.linear(x, weight, bias)


def fastest_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`linear`, but with torch's product for more than FEW_ROWS rows, whose bits may depend on the number of rows."""
    return F.linear(x, weight, bias) if x.shape[0] > FEW_ROWS else linear(x, weight, bias)


class RowAdapters(Protocol):
    """What some rows of a product get in addition, such as the low-rank products of LoRA adapters."""

    def add_(self, linear: Linear, x: Tensor, y: Tensor) -> None:
        """Add to y [rows, out], which is `linear` of x [rows, in]."""
        ...


class Linear:
    """y = x W^T + b for projections that share an input: q, k and v, or gate and up, run as one product.

    weight: [sum of part sizes, in_features]; bias: [sum of part sizes] or None.
    """

    def __init__(
        self,
        in_features: int,
        parts: Mapping[str, int],
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`parts` maps each checkpoint module name (such as "q_proj") to its output features, in order."""
        out_features = sum(parts.values())
        self.parts = dict(parts)
        self.product = linear
        self.weight = torch.empty(out_features, in_features, dtype=dtype, device=device)
        self.bias = torch.empty(out_features, dtype=dtype, device=device) if bias else None

    def __call__(self, x: Tensor, adapters: RowAdapters | None = None) -> Tensor:
        """x: [rows, in_features] -> [rows, sum of part sizes], in the order of the parts."""
        y = self.product(x, self.weight, self.bias)
        if adapters is not None:
            adapters.add_(self, x, y)
        return y

    def slots(self, prefix: str) -> NamedSlots:
        """Each part's `{prefix}{name}.weight` and, with biases, `{prefix}{name}.bias`."""
        start = 0
        for name, size in self.parts.items():
            rows = slice(start, start + size)
            yield f"{prefix}{name}.weight", slot_of(self.weight[rows])
            if self.bias is not None:
                yield f"{prefix}{name}.bias", slot_of(self.bias[rows])
            start += size
