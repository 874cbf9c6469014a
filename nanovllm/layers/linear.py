"""Linear projection whose weight may hold several checkpoint tensors side by side."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.layers.weights import NamedSlots, whole
from nanovllm.ops import cpu_linear

SMALL_PRODUCT = 4096  # multiplications up to which torch does not give a 16-bit product to oneDNN


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b, with each row's bits independent of the other rows: [rows, in] -> [rows, out].

    On the CPU, a few bf16 rows go through a kernel of this package's own, in torch's order of summation. Torch itself
    sums small products in another order than large ones: in fp32 below 12 rows that are no multiple of 4, in 16 bits a
    single row, and products of up to SMALL_PRODUCT multiplications. Such products are padded with rows of zeros, so
    that a token's result is the same alone, in a batch, and in a chunk of its prompt. An fp32 row alone takes three
    times as long for it.
    """
    if cpu_linear.supports(x, weight, bias):
        return cpu_linear.few_row_linear(x, weight, bias)
    rows = x.shape[0]
    padded = _padded_rows(rows, weight) if x.is_cpu else rows
    if padded == rows:
        return F.linear(x, weight, bias)
    return F.linear(F.pad(x, (0, 0, 0, padded - rows)), weight, bias)[:rows]


def _padded_rows(rows: int, weight: Tensor) -> int:
    if weight.dtype == torch.float32:
        return -(-rows // 4) * 4 if rows < 12 else rows
    return max(rows, 2, SMALL_PRODUCT // weight.numel() + 1)


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
        self.weight = torch.empty(out_features, in_features, dtype=dtype, device=device)
        self.bias = torch.empty(out_features, dtype=dtype, device=device) if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        """x: [rows, in_features] -> [rows, sum of part sizes], in the order of the parts."""
        return linear(x, self.weight, self.bias)

    def slots(self, prefix: str) -> NamedSlots:
        """Each part's `{prefix}{name}.weight` and, with biases, `{prefix}{name}.bias`."""
        start = 0
        for name, size in self.parts.items():
            rows = slice(start, start + size)
            yield f"{prefix}{name}.weight", whole(self.weight[rows])
            if self.bias is not None:
                yield f"{prefix}{name}.bias", whole(self.bias[rows])
            start += size
