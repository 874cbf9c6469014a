"""The plain form of a weight matrix, which may hold several checkpoint tensors, and its product."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import copy

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.layers.linear_method import LinearMethod, NamedSlots, StoredWeight, slot_of
from nanovllm.ops import cpu_kernels
from nanovllm.ops.cpu_kernels import WeightPart
from nanovllm.ops.kernel_config import FEW_ROWS, few_rows_config_on

MAX_OWN_ROWS = 24  # with more rows torch may multiply, where bits may depend on the batch


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b: [rows, in] -> [rows, out]. On the CPU the bits of a row do not depend on the other rows."""
    if x.is_cpu and x.dtype in cpu_kernels.KERNEL_DTYPES:
        return cpu_kernels.cpu_linear(x, weight, bias)
    return F.linear(x, weight, bias)


def fastest_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`linear`, but beyond MAX_OWN_ROWS torch's product, whose bits may depend on the number of rows."""
    return F.linear(x, weight, bias) if x.shape[0] > MAX_OWN_ROWS else linear(x, weight, bias)


class DenseWeight:
    """The plain form of a weight matrix: [sum of part sizes, in_features] in the network's dtype."""

    def __init__(
        self,
        parts: Mapping[str, int],
        in_features: int,
        dtype: torch.dtype,
        device: torch.device,
        memory: Tensor | None = None,
    ) -> None:
        """See `LinearMethod.create`. memory: the matrix, where it is a part of a larger tensor."""
        self._parts = dict(parts)
        self._product = linear
        shape = (sum(parts.values()), in_features)
        self._matrix = torch.empty(shape, dtype=dtype, device=device) if memory is None else memory
        self._few_rows = few_rows_config_on(device, shape, dtype)
        self.is_interleaved = False  # see `cpu_kernels.interleave_`

    @property
    def dense(self) -> Tensor:
        """The matrix; a copy after `finish_loading`, where its memory was reordered for the kernels."""
        if not self.is_interleaved:
            return self._matrix
        plain = self._matrix.clone()
        cpu_kernels.interleave_(plain, back=True)
        return plain

    def apply(self, x: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        if self.is_interleaved:
            y = cpu_kernels.cpu_linear(x, self._matrix, bias, interleaved=True)
        elif self._few_rows is not None and x.shape[0] <= FEW_ROWS:
            from nanovllm.ops.triton_few_rows import few_rows_linear

            y = few_rows_linear(x, self._matrix, bias, self._few_rows)
        else:
            y = self._product(x, self._matrix, bias)
        return y if out is None else out.copy_(y)

    def rows(self, indices: Tensor) -> Tensor:
        if self._matrix.is_cpu and self._matrix.dtype in cpu_kernels.KERNEL_DTYPES:
            return cpu_kernels.rows_of(self._matrix, indices, interleaved=self.is_interleaved)
        return F.embedding(indices, self._matrix)

    def slots(self) -> NamedSlots:
        for module, part in zip(self._parts, self.dense.split(list(self._parts.values())), strict=True):
            yield f"{module}.weight", slot_of(part)

    def finish_loading(self) -> None:
        if not self.is_interleaved and cpu_kernels.can_interleave(self._matrix):
            cpu_kernels.interleave_(self._matrix)
            self.is_interleaved = True

    def tensors(self) -> Iterable[Tensor]:
        return (self._matrix,)

    def read_from(self, tensors: Sequence[Tensor]) -> DenseWeight:
        weight = copy(self)
        (weight._matrix,) = tensors
        return weight

    def for_cpu(self) -> DenseWeight:
        matrix = self.dense.to("cpu", copy=True)
        return DenseWeight(self._parts, matrix.shape[1], matrix.dtype, matrix.device, matrix)

    def take_(self, other: StoredWeight) -> None:
        """See `StoredWeight.take_`. An interleaved matrix becomes a plain one on any device."""
        if not isinstance(other, DenseWeight) or self.is_interleaved > other.is_interleaved:
            raise ValueError(f"A matrix of plain numbers cannot become this {type(other).__name__}.")
        if self.is_interleaved == other.is_interleaved:
            self._matrix.copy_(other._matrix)
        else:
            cpu_kernels.interleaved_to_rows(other._matrix, self._matrix)

    def kernel_parts(self) -> Sequence[WeightPart]:
        return [cpu_kernels.interleaved_part(self._matrix) if self.is_interleaved else self._matrix]

    def use_torch_products(self) -> None:
        if self.is_interleaved:
            cpu_kernels.interleave_(self._matrix, back=True)
            self.is_interleaved = False
        self._product = fastest_linear


def create_weight(
    method: LinearMethod | None, parts: Mapping[str, int], in_features: int, dtype: torch.dtype, device: torch.device
) -> StoredWeight:
    """The stored weight of modules that share an input, in the plain form if `method` is None."""
    return (DenseWeight if method is None else method.create)(parts, in_features, dtype, device)
