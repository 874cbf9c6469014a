"""How quantized checkpoints fill `PackedWeight`s: which tensor fills which part of which matrix.

The last section turns the integers of 4 or 8 bits that checkpoints pack into int32 into data and zeros of a
`PackedWeight`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from math import lcm, log2
from typing import Literal, Protocol

import torch
from torch import Tensor

from nanovllm.errors import ModelError
from nanovllm.formats.quantization.config_fields import Modules
from nanovllm.layers import linear_method as seam
from nanovllm.layers.dense_weight import DenseWeight
from nanovllm.layers.linear_method import COLUMNS, ROWS, CheckpointTensor
from nanovllm.layers.packed_matrix import PackedMatrix, stack_by_form
from nanovllm.ops.packed_panels import HALF_BYTES
from nanovllm.ops.packed_weights import PackedWeight, unpack_int4

Scheme = Literal["int4", "int8", "fp8", "mxfp4"]
_DATA_DTYPES = {"int4": torch.uint8, "int8": torch.int8, "fp8": torch.float8_e4m3fn, "mxfp4": torch.uint8}
# Standard deviation of what `randomize` draws for the data: evenly distributed values around zero.
_DEVIATION = {"int4": (21.25) ** 0.5, "int8": (5461.25) ** 0.5, "fp8": 448 / 3**0.5, "mxfp4": 8.5625**0.5}


@dataclass(frozen=True, slots=True)
class Layout:
    """What the config says of a `PackedWeight`. Modules with equal layouts can be stored one below the other."""

    scheme: Scheme
    in_features: int
    group_size: int  # inputs that share a scale
    scales_dtype: str  # of torch, by name
    zeros: bool = False  # there is a zero for each scale
    fp8_inputs: bool = False  # see `PackedWeight`

    @property
    def scale_columns(self) -> int:
        """Scales of each output."""
        return -(-self.in_features // self.group_size)

    @property
    def columns(self) -> int:
        """Entries of a row of the data; int4 and mxfp4 have two values in each."""
        return self.in_features // 2 if self.scheme in HALF_BYTES else self.in_features

    def nbytes(self, out_features: int) -> int:
        """Bytes of a weight of this layout."""
        scale_bytes: int = getattr(torch, self.scales_dtype).itemsize
        return out_features * (self.columns + self.scale_columns * (scale_bytes + self.zeros))

    def empty(self, out_features: int, device: torch.device) -> PackedWeight:
        """A weight of this layout, not initialized."""
        dtype = _DATA_DTYPES[self.scheme]
        scales_shape = (out_features, self.scale_columns)
        return PackedWeight(
            self.scheme,
            torch.empty(out_features, self.columns, dtype=dtype, device=device),
            torch.empty(scales_shape, dtype=getattr(torch, self.scales_dtype), device=device),
            torch.empty(scales_shape, dtype=dtype, device=device) if self.zeros else None,
            self.group_size,
            self.in_features,
            fp8_inputs=self.fp8_inputs,
        )


def integer_layout(in_features: int, bits: int, group_size: int, scales_dtype: str, *, zeros: bool) -> Layout:
    """The layout of integers of 4 or 8 bits in groups along a row; group_size -1: a row is one group."""
    group_size = in_features if group_size == -1 else min(group_size, in_features)
    return Layout("int4" if bits == 4 else "int8", in_features, group_size, scales_dtype, zeros)


@dataclass(frozen=True, slots=True)
class Filling:
    """How one tensor of a checkpoint fills its module's rows of a `PackedWeight`."""

    tensor: CheckpointTensor
    part: Literal["data", "scales", "zeros"] | None = None  # None: the tensor is only checked
    # From the tensor to the rows of the part. Raises ModelError for values that cannot be used.
    convert: Callable[[Tensor], Tensor] | None = None


class PackedFormat(Hashable, Protocol):
    """A format of checkpoints. Plain data: equal formats give equal layouts and fillings."""

    def layout(self, out_features: int, in_features: int) -> Layout:
        """How a matrix is stored in memory."""
        ...

    def fillings(self, out_features: int, in_features: int) -> Mapping[str, Filling]:
        """The tensors of a module, by the last part of their names. Raises ModelError for sizes that do not fit."""
        ...


# Computed once for all matrices of a size: a mixture of experts has 20,000 of a few sizes.
@lru_cache(maxsize=256)
def _fillings(format: PackedFormat, out_features: int, in_features: int) -> Mapping[str, Filling]:
    return format.fillings(out_features, in_features)


@lru_cache(maxsize=256)
def _units(format: PackedFormat, out_features: int, in_features: int) -> tuple[int, int]:
    """See `LinearMethod.units`."""
    fillings = _fillings(format, out_features, in_features).values()
    axes = [axis for filling in fillings for axis in filling.tensor.axes if axis is not None]

    def unit(dimension: int, size: int) -> int:
        return lcm(*(axis.size for axis in axes if axis.dimension == dimension and axis.size < size))

    values = 2 if format.layout(out_features, in_features).scheme in HALF_BYTES else 1  # in a byte
    return unit(ROWS, out_features), lcm(unit(COLUMNS, in_features), values)


class QuantizedWeight(PackedMatrix):
    """Modules of one layout, filled as their format says."""

    def __init__(
        self, format: PackedFormat, layout: Layout, parts: Mapping[str, int], dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(layout.empty(sum(parts.values()), device), parts, dtype)
        self._format = format
        self._layout = layout

    def slots(self) -> seam.NamedSlots:
        for module, part in self.module_weights():
            for suffix, filling in _fillings(self._format, part.out_features, self._layout.in_features).items():
                if filling.part is not None:
                    yield f"{module}.{suffix}", self._slot(filling, filling.part, part)

    def _slot(self, filling: Filling, part: str, rows: PackedWeight) -> seam.WeightSlot:
        view: Tensor = getattr(rows, part)
        if view.dtype is torch.float8_e4m3fn:
            view = view.view(torch.uint8)
        return seam.WeightSlot(view, filling.tensor.shape, filling.convert, partial(self._randomize, part, view))

    def _randomize(self, part: str, view: Tensor, generator: torch.Generator) -> None:
        """Fill with values of variance 1 / in_features; see `loader.fill_with_random_weights`."""
        scheme = self._layout.scheme
        in_features = self._layout.in_features
        if part == "scales":
            scale = in_features**-0.5 / _DEVIATION[scheme]
            view.fill_(127 + round(log2(scale)) if scheme == "mxfp4" else scale)
        elif part == "zeros":
            view.fill_(8 if scheme == "int4" else 0)
        elif scheme == "fp8":
            values = torch.empty(view.shape, device=view.device).uniform_(-448, 448, generator=generator)
            view.copy_(values.to(torch.float8_e4m3fn).view(torch.uint8))
        else:
            low, high = (0, 256) if scheme in HALF_BYTES else (-128, 128)
            view.random_(low, high, generator=generator)


@dataclass(frozen=True, slots=True)
class PackedMethod:
    """A `LinearMethod` that stores the included modules in one format, and the others as plain numbers."""

    name: str
    format: PackedFormat
    modules: Modules

    def tensors(self, module: str, out_features: int, in_features: int) -> seam.NamedTensors:
        if not self.modules.include(module):
            yield from seam.dense_tensors(module, out_features, in_features)
            return
        for suffix, filling in _fillings(self.format, out_features, in_features).items():
            yield f"{module}.{suffix}", filling.tensor

    def units(self, module: str, out_features: int, in_features: int) -> tuple[int, int]:
        """See `LinearMethod.units`. An entry for all rows or all columns does not limit how ranks divide them."""
        if not self.modules.include(module):
            return 1, 1
        return _units(self.format, out_features, in_features)

    def weight_bytes(self, module: str, out_features: int, in_features: int, itemsize: int) -> int:
        if not self.modules.include(module):
            return out_features * in_features * itemsize
        return self.format.layout(out_features, in_features).nbytes(out_features)

    def create(
        self, parts: Mapping[str, int], in_features: int, dtype: torch.dtype, device: torch.device
    ) -> seam.StoredWeight:
        def layout_of(module: str, size: int) -> Layout | None:
            return self.format.layout(size, in_features) if self.modules.include(module) else None

        def create(layout: Layout | None, own: dict[str, int]) -> seam.StoredWeight:
            if layout is None:
                return DenseWeight(own, in_features, dtype, device)
            return QuantizedWeight(self.format, layout, own, dtype, device)

        return stack_by_form(parts, layout_of, create, dtype)


# ---- integers in the words of a checkpoint


def unpacked_last(packed: Tensor, bits: int) -> Tensor:
    """int32 [rows, words] -> uint8 [rows, values]: the values of a word from its low bits to its high ones."""
    values = packed.contiguous().view(torch.uint8)
    return unpack_int4(values) if bits == 4 else values


def in_scheme(values: Tensor, bits: int) -> Tensor:
    """Unsigned data or zeros, uint8, as those of scheme int4, or of int8, which is signed: minus 128."""
    return values if bits == 4 else (values ^ 128).view(torch.int8)


def exact_scales(scales: Tensor, dtype: str) -> Tensor:
    """The scales in another dtype. Raises ModelError if that would round one of them."""
    converted = scales.to(getattr(torch, dtype))
    if not torch.equal(converted.double(), scales.double()) and bool(scales.isfinite().all()):
        raise ModelError(f"a scale of {scales.dtype} does not fit into {dtype}; convert the scales in the checkpoint.")
    return converted


def check_multiple(what: str, value: int, factor: int) -> None:
    """Raise ModelError unless the size is a multiple of the values in an int32."""
    if value % factor:
        raise ModelError(f"{what}={value} must be a multiple of {factor} in this format.")
