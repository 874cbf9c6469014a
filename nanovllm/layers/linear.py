"""Linear projections, whose weights may hold several checkpoint tensors, and the plain form of a weight."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.layers.linear_method import LinearMethod, NamedSlots, StoredWeight, slot_of
from nanovllm.ops import cpu_kernels
from nanovllm.ops.cpu_kernels import WeightPart
from nanovllm.ops.kernel_config import FEW_ROWS, few_rows_config_on
from nanovllm.ops.row_kernels import GATED_UNITS

MAX_OWN_ROWS = 24  # with more rows torch may multiply, where bits may depend on the batch


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b: [rows, in] -> [rows, out]. On the CPU the bits of a row do not depend on the other rows."""
    if x.is_cpu and x.dtype in cpu_kernels.KERNEL_DTYPES:
        return cpu_kernels.cpu_linear(x, weight, bias)
    return F.linear(x, weight, bias)


def fastest_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`linear`, but beyond MAX_OWN_ROWS torch's product, whose bits may depend on the number of rows."""
    return F.linear(x, weight, bias) if x.shape[0] > MAX_OWN_ROWS else linear(x, weight, bias)


class RowAdapters(Protocol):
    """What some rows of a product get in addition, such as the low-rank products of LoRA adapters."""

    def add_(self, linear: Linear, x: Tensor, y: Tensor) -> None:
        """Add to y [rows, out], which is `linear` of x [rows, in]."""
        ...


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
        self._interleaved = False  # see `cpu_kernels.interleave_`

    @property
    def dense(self) -> Tensor:
        """The matrix; a copy after `finish_loading`, where its memory was reordered for the kernels."""
        if not self._interleaved:
            return self._matrix
        plain = self._matrix.clone()
        cpu_kernels.interleave_(plain, back=True)
        return plain

    def apply(self, x: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        if self._interleaved:
            y = cpu_kernels.cpu_linear(x, self._matrix, bias, interleaved=True)
        elif self._few_rows is not None and x.shape[0] <= FEW_ROWS:
            from nanovllm.ops.triton_few_rows import few_rows_linear

            y = few_rows_linear(x, self._matrix, bias, self._few_rows)
        else:
            y = self._product(x, self._matrix, bias)
        return y if out is None else out.copy_(y)

    def rows(self, indices: Tensor) -> Tensor:
        if self._matrix.is_cpu and self._matrix.dtype in cpu_kernels.KERNEL_DTYPES:
            return cpu_kernels.rows_of(self._matrix, indices, interleaved=self._interleaved)
        return F.embedding(indices, self._matrix)

    def slots(self) -> NamedSlots:
        for module, part in zip(self._parts, self.dense.split(list(self._parts.values())), strict=True):
            yield f"{module}.weight", slot_of(part)

    def finish_loading(self) -> None:
        if not self._interleaved and cpu_kernels.can_interleave(self._matrix):
            cpu_kernels.interleave_(self._matrix)
            self._interleaved = True

    def kernel_parts(self) -> Sequence[WeightPart]:
        return [cpu_kernels.interleaved_part(self._matrix) if self._interleaved else self._matrix]

    def use_torch_products(self) -> None:
        if self._interleaved:
            cpu_kernels.interleave_(self._matrix, back=True)
            self._interleaved = False
        self._product = fastest_linear


def create_weight(
    method: LinearMethod | None, parts: Mapping[str, int], in_features: int, dtype: torch.dtype, device: torch.device
) -> StoredWeight:
    """The stored weight of modules that share an input, in the plain form if `method` is None."""
    return (DenseWeight if method is None else method.create)(parts, in_features, dtype, device)


class Linear:
    """y = x W^T + b for projections that share an input: q, k and v, or gate and up, run as one product.

    weight: of shape [sum of part sizes, in_features]; bias: [sum of part sizes] or None.
    """

    def __init__(
        self,
        in_features: int,
        parts: Mapping[str, int],
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        prefix: str = "",
        method: LinearMethod | None = None,
    ) -> None:
        """`parts` maps each checkpoint module name (such as "q_proj") to its output features, in order.

        prefix: of these names in the checkpoint; method: how the weight is stored, None for the plain form.
        """
        self.in_features = in_features
        self.parts = {f"{prefix}{name}": size for name, size in parts.items()}
        self.weight = create_weight(method, self.parts, in_features, dtype, device)
        self.bias = torch.empty(sum(parts.values()), dtype=dtype, device=device) if bias else None

    def __call__(self, x: Tensor, adapters: RowAdapters | None = None) -> Tensor:
        """x: [rows, in_features] -> [rows, sum of part sizes], in the order of the parts."""
        y = self.weight.apply(x, self.bias)
        if adapters is not None:
            adapters.add_(self, x, y)
        return y

    def slots(self) -> NamedSlots:
        """The slots of the weight and, with biases, each part's `{module}.bias`."""
        yield from self.weight.slots()
        if self.bias is not None:
            for module, part in zip(self.parts, self.bias.split(list(self.parts.values())), strict=True):
                yield f"{module}.bias", slot_of(part)


class GatedMLP:
    """down(activation(gate(x)) * up(x)). Gate and up are one product."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        gate_up: Mapping[str, int],
        prefix: str,
        biases: tuple[bool, bool],
        activation: str,
        method: LinearMethod | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """gate_up: the modules of the gate and up projections in the checkpoint, and their output features.

        prefix: of the names of its modules in the checkpoint; biases: whether gate and up, and whether down has them;
        activation: one of GATED_UNITS; method: how the weights are stored.
        """
        self._gated_unit = GATED_UNITS[activation]
        linear = partial(Linear, prefix=prefix, method=method, dtype=dtype, device=device)
        self.gate_up = linear(hidden_size, gate_up, bias=biases[0])
        self.down = linear(intermediate_size, {"down_proj": hidden_size}, bias=biases[1])

    def __call__(self, x: Tensor, adapters: RowAdapters | None = None) -> Tensor:
        """[rows, hidden] -> [rows, hidden]."""
        return self.down(self._gated_unit(self.gate_up(x, adapters)), adapters)

    def slots(self) -> NamedSlots:
        yield from self.gate_up.slots()
        yield from self.down.slots()

    def weights(self) -> Iterator[StoredWeight]:
        yield self.gate_up.weight
        yield self.down.weight
