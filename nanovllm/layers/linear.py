"""Linear projection whose weight may hold several checkpoint tensors side by side."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.layers.weights import NamedSlots, whole
from nanovllm.ops import cpu_linear

FEW_ROWS = 24  # up to which reading the weights is all the time that a product takes


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b: [rows, in] -> [rows, out]. On the CPU each row's bits are independent of the other rows."""
    if cpu_linear.takes(x, weight):
        return cpu_linear.cpu_linear(x, weight, bias)
    return F.linear(x, weight, bias)


def fastest_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`linear` without the promise: torch's product on many rows, where it has units that `linear` does not use."""
    return F.linear(x, weight, bias) if x.shape[0] > FEW_ROWS else linear(x, weight, bias)


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

    def __call__(self, x: Tensor) -> Tensor:
        """x: [rows, in_features] -> [rows, sum of part sizes], in the order of the parts."""
        return self.product(x, self.weight, self.bias)

    def slots(self, prefix: str) -> NamedSlots:
        """Each part's `{prefix}{name}.weight` and, with biases, `{prefix}{name}.bias`."""
        start = 0
        for name, size in self.parts.items():
            rows = slice(start, start + size)
            yield f"{prefix}{name}.weight", whole(self.weight[rows])
            if self.bias is not None:
                yield f"{prefix}{name}.bias", whole(self.bias[rows])
            start += size
