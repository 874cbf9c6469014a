"""The method of checkpoints whose matrices become `PackedWeight`s: which tensors fill which part of which matrix."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Literal, Protocol

import torch
from torch import Tensor

from nanovllm.layers.linear import DenseWeight
from nanovllm.layers.linear_method import (
    CheckpointTensor,
    NamedSlots,
    NamedTensors,
    StoredWeight,
    WeightSlot,
    dense_tensors,
)
from nanovllm.ops.cpu_kernels import WeightPart
from nanovllm.ops.packed_weights import PackedWeight, dequantize, kernel_weight, packed_linear
from nanovllm.quantization.config_fields import Modules

Scheme = Literal["int4", "int8", "fp8"]
_DATA_DTYPES = {"int4": torch.uint8, "int8": torch.int8, "fp8": torch.float8_e4m3fn}
# Standard deviation of what `randomize` draws for the data: evenly distributed values around zero.
_DEVIATION = {"int4": (21.25) ** 0.5, "int8": (5461.25) ** 0.5, "fp8": 448 / 3**0.5}


@dataclass(frozen=True, slots=True)
class Layout:
    """What is known of a `PackedWeight` from the config. Each output has a row of `scale_columns` scales.

    scales_dtype: of torch, by name. Modules with equal layouts can be stored one below the other.
    """

    scheme: Scheme
    in_features: int
    group_size: int
    scales_dtype: str
    zeros: bool = False

    @property
    def scale_columns(self) -> int:
        return -(-self.in_features // self.group_size)

    def nbytes(self, out_features: int) -> int:
        """Bytes of a weight of this layout."""
        data = out_features * (self.in_features // 2 if self.scheme == "int4" else self.in_features)
        scales = out_features * self.scale_columns
        zeros = out_features * self.scale_columns if self.zeros else 0
        scale_bytes: int = getattr(torch, self.scales_dtype).itemsize
        return data + scales * scale_bytes + zeros

    def empty(self, out_features: int, device: torch.device) -> PackedWeight:
        """A weight of this layout, not initialized."""
        columns = self.in_features // 2 if self.scheme == "int4" else self.in_features
        dtype = _DATA_DTYPES[self.scheme]
        scales_shape = (out_features, self.scale_columns)
        return PackedWeight(
            self.scheme,
            torch.empty(out_features, columns, dtype=dtype, device=device),
            torch.empty(scales_shape, dtype=getattr(torch, self.scales_dtype), device=device),
            torch.empty(out_features, self.scale_columns, dtype=dtype, device=device) if self.zeros else None,
            self.group_size,
            self.in_features,
        )


@dataclass(frozen=True, slots=True)
class Filling:
    """How one tensor of a checkpoint fills its module's rows of a weight.

    part: of the `PackedWeight`, None for a tensor that is only checked; convert: from the tensor to the rows of the
    part; raises ModelError for values that cannot be used.
    """

    tensor: CheckpointTensor
    part: Literal["data", "scales", "zeros"] | None
    convert: Callable[[Tensor], Tensor]


class PackedFormat(Protocol):
    """A format of checkpoints. Plain data."""

    def layout(self, out_features: int, in_features: int) -> Layout:
        """How a matrix is stored in memory."""
        ...

    def fillings(self, out_features: int, in_features: int) -> Mapping[str, Filling]:
        """The tensors of a module, by the last part of their names. Raises ModelError for sizes that do not fit."""
        ...


class QuantizedWeight:
    """Modules of one layout in one `PackedWeight`, one below the other."""

    def __init__(
        self, format: PackedFormat, layout: Layout, parts: Mapping[str, int], dtype: torch.dtype, device: torch.device
    ) -> None:
        self._format = format
        self._layout = layout
        self._parts = dict(parts)
        self._dtype = dtype
        self.dense = None
        self.packed = layout.empty(sum(parts.values()), device)

    @property
    def out_features(self) -> int:
        return self.packed.out_features

    def apply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return packed_linear(x, self.packed, bias)

    def rows(self, indices: Tensor) -> Tensor:
        return dequantize(self.packed.rows(indices)).to(self._dtype)

    def slots(self) -> NamedSlots:
        start = 0
        for module, size in self._parts.items():
            part = self.packed.rows(slice(start, start + size))
            for suffix, filling in self._format.fillings(size, self._layout.in_features).items():
                yield f"{module}.{suffix}", self._slot(filling, part)
            start += size

    def finish_loading(self) -> None:
        self.packed = self.packed.in_panels(in_place=True)

    def kernel_parts(self) -> Sequence[WeightPart] | None:
        return None if self.packed.panel_outputs is None else [kernel_weight(self.packed)]

    def use_torch_products(self) -> None:
        """There is no product of torch for packed weights."""

    def _slot(self, filling: Filling, part: PackedWeight) -> WeightSlot:
        shape = filling.tensor.shape
        if filling.part is None:
            nothing = part.data.flatten()[:0]
            return WeightSlot(nothing, shape, lambda tensor: filling.convert(tensor).flatten()[:0], lambda _: None)
        view: Tensor = getattr(part, filling.part)
        if view.dtype is torch.float8_e4m3fn:
            view = view.view(torch.uint8)
        return WeightSlot(view, shape, filling.convert, partial(self._randomize, filling.part, view))

    def _randomize(self, part: str | None, view: Tensor, generator: torch.Generator) -> None:
        """Fill with values of variance 1 / in_features; see `loader.fill_with_random_weights`."""
        scheme, in_features = self._layout.scheme, self._layout.in_features
        if part == "scales":
            view.fill_(in_features**-0.5 / _DEVIATION[scheme])
        elif part == "zeros":
            view.fill_(8 if scheme == "int4" else 0)
        elif scheme == "fp8":
            values = torch.empty(view.shape, device=view.device).uniform_(-448, 448, generator=generator)
            view.copy_(values.to(torch.float8_e4m3fn).view(torch.uint8))
        else:
            low, high = (0, 256) if scheme == "int4" else (-128, 128)
            view.random_(low, high, generator=generator)


class StackedWeights:
    """Weights of different forms one below the other. Each is applied by itself."""

    def __init__(self, weights: list[StoredWeight], sizes: list[int], dtype: torch.dtype) -> None:
        """sizes: output features of each."""
        self._weights = weights
        self._sizes = sizes
        self._dtype = dtype
        self.dense = None

    def apply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        biases = [None] * len(self._sizes) if bias is None else bias.split(self._sizes)
        return torch.cat([weight.apply(x, of) for weight, of in zip(self._weights, biases, strict=True)], dim=-1)

    def rows(self, indices: Tensor) -> Tensor:
        start, found = 0, []
        for weight, size in zip(self._weights, self._sizes, strict=True):
            inside = (indices >= start) & (indices < start + size)
            found.append(torch.where(inside[:, None], weight.rows((indices - start).clamp(0, size - 1)), 0))
            start += size
        return torch.stack(found).sum(0).to(self._dtype)

    def slots(self) -> NamedSlots:
        for weight in self._weights:
            yield from weight.slots()

    def finish_loading(self) -> None:
        for weight in self._weights:
            weight.finish_loading()

    def kernel_parts(self) -> Sequence[WeightPart] | None:
        found = [weight.kernel_parts() for weight in self._weights]
        known = [parts for parts in found if parts is not None]
        return [part for parts in known for part in parts] if len(known) == len(found) else None

    def use_torch_products(self) -> None:
        for weight in self._weights:
            weight.use_torch_products()


@dataclass(frozen=True, slots=True)
class PackedMethod:
    """A `LinearMethod` that stores the included modules in one format, and the others as plain numbers."""

    name: str
    format: PackedFormat
    modules: Modules

    def tensors(self, module: str, out_features: int, in_features: int) -> NamedTensors:
        if not self.modules.include(module):
            yield from dense_tensors(module, out_features, in_features)
            return
        for suffix, filling in self.format.fillings(out_features, in_features).items():
            yield f"{module}.{suffix}", filling.tensor

    def weight_bytes(self, module: str, out_features: int, in_features: int, itemsize: int) -> int:
        if not self.modules.include(module):
            return out_features * in_features * itemsize
        return self.format.layout(out_features, in_features).nbytes(out_features)

    def create(
        self, parts: Mapping[str, int], in_features: int, dtype: torch.dtype, device: torch.device
    ) -> StoredWeight:
        def layout_of(part: tuple[str, int]) -> Layout | None:
            module, size = part
            return self.format.layout(size, in_features) if self.modules.include(module) else None

        weights: list[StoredWeight] = []
        sizes: list[int] = []
        for layout, group in groupby(parts.items(), layout_of):
            own = dict(group)
            sizes.append(sum(own.values()))
            if layout is None:
                weights.append(DenseWeight(own, in_features, dtype, device))
            else:
                weights.append(QuantizedWeight(self.format, layout, own, dtype, device))
        return weights[0] if len(weights) == 1 else StackedWeights(weights, sizes, dtype)
