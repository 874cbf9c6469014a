"""RMS norms. Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from nanovllm.layers.build_context import BuildContext, Split
from nanovllm.layers.linear_method import ROWS, Axis, NamedTensors
from nanovllm.layers.module import Parameter
from nanovllm.ops.row_kernels import kernels_on


class RMSNorm(Parameter):
    """x / sqrt(mean(x^2) + eps) * weight of each row; see `RowKernels.rms_norm` for what is rounded when."""

    zero_centered: ClassVar[bool] = False  # whether the checkpoint has the weight minus 1
    wide: ClassVar[bool] = False  # whether the weight multiplies in fp32, before the rounding

    def __init__(
        self,
        size: int,
        eps: float,
        build: BuildContext,
        *,
        data: Tensor | None = None,
        order: Tensor | None = None,
        split: Split | None = None,
    ) -> None:
        """data: memory of the weight, which may have a row for each head; order: of the features, as their input has
        them; split: of the features, if ranks share them."""
        if data is None:
            data = torch.empty(size, dtype=self.dtype_of(build.dtype), device=build.device)
        self.eps = eps
        self._order = order
        self._kernels = kernels_on(build.device, build.dtype)
        self._is_divided = split is not None
        changes = self.zero_centered or order is not None
        held = None if split is None else split.held
        name = f"{build.prefix}weight"
        super().__init__(name, data, (size,), convert=self._from_checkpoint if changes else None, held=held)

    @classmethod
    def dtype_of(cls, dtype: torch.dtype) -> torch.dtype:
        """The dtype of a weight in a network of `dtype`: 1 plus a weight of 16 bits takes more than 16."""
        return torch.float32 if cls.zero_centered or cls.wide else dtype

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, size] -> [rows, size]."""
        return self._kernels.rms_norm(x, self.data, self.eps)

    def normalize_(self, x: Tensor) -> None:
        """The same in place."""
        self._kernels.copy_(x, self._kernels.rms_norm(x, self.data, self.eps))

    def own_tensors(self) -> NamedTensors:
        for name, tensor in super().own_tensors():
            yield name, tensor._replace(axes=(Axis(ROWS),) if self._is_divided else ())

    def _from_checkpoint(self, weight: Tensor) -> Tensor:
        weight = weight.float() + 1.0 if self.zero_centered else weight
        return weight if self._order is None else weight[self._order.to(weight.device)]


class WideRMSNorm(RMSNorm):
    """A norm whose weight multiplies in fp32, before the rounding."""

    wide = True


class ZeroCenteredRMSNorm(RMSNorm):
    """A norm whose weight the checkpoint has minus 1. It multiplies in fp32, before the rounding."""

    zero_centered = True
