"""Weight matrices that stay packed in memory: what all formats of quantized checkpoints and files share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from itertools import groupby
from typing import Self, TypeVar

import torch
from torch import Tensor

from nanovllm.layers.linear_method import NamedSlots, StoredWeight
from nanovllm.ops.cpu_kernels import WeightPart
from nanovllm.ops.packed_weights import PackedWeight, dequantized_rows, kernel_weight, packed_linear
from nanovllm.ops.panel_conversion import take_

Form = TypeVar("Form")


class PackedMatrix:
    """Modules that share an input in one `PackedWeight`, one below the other; see `StoredWeight`.

    A format of checkpoints adds `slots`, which fill `module_weights` from its tensors.
    """

    dense = None

    def __init__(self, packed: PackedWeight, parts: Mapping[str, int], dtype: torch.dtype) -> None:
        """packed: not initialized; parts: output features of each module; dtype: of the network."""
        self.packed = packed
        self._parts = dict(parts)
        self._dtype = dtype

    def apply(self, x: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        """See `StoredWeight.apply`. On the CPU the bits of a row do not depend on the other rows."""
        return packed_linear(x, self.packed, bias, out)

    def rows(self, indices: Tensor) -> Tensor:
        return dequantized_rows(self.packed, indices, self._dtype)

    def slots(self) -> NamedSlots:
        """None of a part of a weight, which no file fills."""
        return iter(())

    def module_weights(self) -> Iterator[tuple[str, PackedWeight]]:
        """Each module and its rows: views until `finish_loading`."""
        start = 0
        packed = self.packed.in_rows()
        for module, size in self._parts.items():
            yield module, packed.rows(slice(start, start + size))
            start += size

    def finish_loading(self) -> None:
        """Rearrange the weight for the kernels, where it lies, so that it is never in memory twice."""
        self.packed = self.packed.for_kernels()

    def tensors(self) -> Iterable[Tensor]:
        return self.packed.parts

    def read_from(self, tensors: Sequence[Tensor]) -> Self:
        weight = copy(self)
        weight.packed = self.packed.read_from(tensors)
        return weight

    def for_cpu(self) -> Self:
        weight = copy(self)
        weight.packed = self.packed.in_rows().to("cpu").in_panels()
        return weight

    def take_(self, other: StoredWeight) -> None:
        if not isinstance(other, PackedMatrix):
            raise ValueError(f"A packed weight cannot become a {type(other).__name__}.")
        take_(self.packed, other.packed)

    def kernel_parts(self) -> Sequence[WeightPart] | None:
        return None if self.packed.panel_outputs is None else [kernel_weight(self.packed)]

    def use_torch_products(self) -> None:
        """torch has no products with packed weights."""


class StackedWeights:
    """Weights of different forms, `weights`, one below the other. Each is applied by itself."""

    dense = None

    def __init__(self, weights: list[StoredWeight], sizes: list[int], dtype: torch.dtype) -> None:
        """sizes: output features of each."""
        self.weights = weights
        self._sizes = sizes
        self._dtype = dtype

    def apply(self, x: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        """See `StoredWeight.apply`. Each product writes into its part of the result."""
        y = x.new_empty(x.shape[0], sum(self._sizes)) if out is None else out
        biases = [None] * len(self._sizes) if bias is None else bias.split(self._sizes)
        for weight, of, part in zip(self.weights, biases, y.split(self._sizes, dim=-1), strict=True):
            weight.apply(x, of, part)
        return y

    def rows(self, indices: Tensor) -> Tensor:
        start = 0
        rows = []
        for weight, size in zip(self.weights, self._sizes, strict=True):
            inside = (indices >= start) & (indices < start + size)
            rows.append(torch.where(inside[:, None], weight.rows((indices - start).clamp(0, size - 1)), 0))
            start += size
        return torch.stack(rows).sum(0).to(self._dtype)

    def slots(self) -> NamedSlots:
        for weight in self.weights:
            yield from weight.slots()

    def finish_loading(self) -> None:
        for weight in self.weights:
            weight.finish_loading()

    def tensors(self) -> Iterable[Tensor]:
        return [tensor for weight in self.weights for tensor in weight.tensors()]

    def read_from(self, tensors: Sequence[Tensor]) -> StackedWeights:
        left = iter(tensors)
        weights = [weight.read_from([next(left) for _ in weight.tensors()]) for weight in self.weights]
        return StackedWeights(weights, self._sizes, self._dtype)

    def for_cpu(self) -> StackedWeights:
        return StackedWeights([weight.for_cpu() for weight in self.weights], self._sizes, self._dtype)

    def take_(self, other: StoredWeight) -> None:
        if not isinstance(other, StackedWeights) or self._sizes != other._sizes:
            raise ValueError(f"Weights of {self._sizes} outputs cannot become a {type(other).__name__} of others.")
        for mine, theirs in zip(self.weights, other.weights, strict=True):
            mine.take_(theirs)

    def kernel_parts(self) -> Sequence[WeightPart] | None:
        of_weights = [weight.kernel_parts() for weight in self.weights]
        known = [parts for parts in of_weights if parts is not None]
        return [part for parts in known for part in parts] if len(known) == len(of_weights) else None

    def use_torch_products(self) -> None:
        for weight in self.weights:
            weight.use_torch_products()


def stack_by_form(
    parts: Mapping[str, int],
    form_of: Callable[[str, int], Form],
    create: Callable[[Form, dict[str, int]], StoredWeight],
    dtype: torch.dtype,
) -> StoredWeight:
    """One weight for each run of neighbouring modules of one form, one below the other.

    parts: output features of each module, in order; create: the weight of modules of one form.
    """
    weights: list[StoredWeight] = []
    sizes: list[int] = []
    for form, group in groupby(parts.items(), lambda part: form_of(*part)):
        own = dict(group)
        weights.append(create(form, own))
        sizes.append(sum(own.values()))
    return weights[0] if len(weights) == 1 else StackedWeights(weights, sizes, dtype)
