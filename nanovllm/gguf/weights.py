"""Matrices of GGUF types in memory: the file's own bytes, for modules that share an input and may differ in type."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.gguf.header import TensorType
from nanovllm.layers.linear import linear
from nanovllm.layers.linear_method import NamedSlots, WeightSlot
from nanovllm.ops.cpu_kernels import WeightPart
from nanovllm.ops.packed_weights import PackedWeight, dequantize, gguf_weight, kernel_weight, packed_linear

# For random weights. Of each type the bytes of a block that hold fp16 numbers, and their values as a multiple of
# 1 / sqrt(columns) if all other bytes are random, so that the weights have mean 0 and variance 1 / columns.
RANDOM_SCALES: Mapping[str, Mapping[int, float]] = MappingProxyType(
    {
        "Q4_0": {0: 1 / 4.6},
        "Q4_1": {0: 1 / 4.6, 2: -7.5 / 4.6},
        "Q8_0": {0: 1 / 74},
        "Q4_K": {0: 1 / 250, 2: 7.5 / 250},
        "Q5_K": {0: 1 / 500, 2: 15.5 / 500},
        "Q6_K": {208: 1 / 1370},
    }
)


class GgufWeight:
    """A matrix [sum of part sizes, in_features]. Neighbouring parts of one type are one packed weight."""

    dense = None

    def __init__(
        self,
        parts: Mapping[str, int],
        types: Sequence[TensorType | None],
        in_features: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """types: of each part, None for numbers of `dtype`."""
        self._dtype = dtype
        self._groups: list[tuple[dict[str, int], TensorType | None, PackedWeight | Tensor]] = []
        for kind, modules in groupby(zip(parts, types, strict=True), key=lambda part: part[1]):
            sizes = {module: parts[module] for module, _ in modules}
            self._groups.append((sizes, kind, _empty(sum(sizes.values()), kind, in_features, dtype, device)))

    def apply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """See `StoredWeight.apply`. On the CPU the bits of a row do not depend on the other rows."""
        biases = iter([None] * len(self._groups) if bias is None else bias.split(self._sizes()))
        products = [_product(x, weight, next(biases)) for _, _, weight in self._groups]
        return products[0] if len(products) == 1 else torch.cat(products, dim=-1)

    def rows(self, indices: Tensor) -> Tensor:
        ((_, _, weight),) = self._groups  # a table of embeddings is one module
        if isinstance(weight, Tensor):
            return F.embedding(indices, weight)
        return dequantize(weight.rows(indices)).to(self._dtype)

    def slots(self) -> NamedSlots:
        for sizes, kind, weight in self._groups:
            data = weight if isinstance(weight, Tensor) else weight.in_rows().data
            for module, view in zip(sizes, data.split(list(sizes.values())), strict=True):
                shape = (sizes[module], weight.shape[1])
                randomize = None if kind is None else _randomizer(view, kind, shape[1])
                yield f"{module}.weight", WeightSlot(view, shape, randomize=randomize)

    def finish_loading(self) -> None:
        """Rearrange the bytes for the CPU's kernel, where they lie: the weights are never in memory twice."""
        self._groups = [
            (sizes, kind, weight if isinstance(weight, Tensor) else weight.in_panels(in_place=True))
            for sizes, kind, weight in self._groups
        ]

    def kernel_parts(self) -> Sequence[WeightPart] | None:
        weights = [weight for _, _, weight in self._groups]
        if any(isinstance(weight, PackedWeight) and weight.panel_outputs is None for weight in weights):
            return None
        return [weight if isinstance(weight, Tensor) else kernel_weight(weight) for weight in weights]

    def use_torch_products(self) -> None:
        """torch has no products with these types."""

    def _sizes(self) -> list[int]:
        return [sum(sizes.values()) for sizes, _, _ in self._groups]


def _empty(
    rows: int, kind: TensorType | None, in_features: int, dtype: torch.dtype, device: torch.device
) -> PackedWeight | Tensor:
    if kind is None:
        return torch.empty(rows, in_features, dtype=dtype, device=device)
    row_bytes = in_features // kind.block_size * kind.block_bytes
    return gguf_weight(kind.name.lower(), torch.empty(rows, row_bytes, dtype=torch.uint8, device=device))


def _product(x: Tensor, weight: PackedWeight | Tensor, bias: Tensor | None) -> Tensor:
    return linear(x, weight, bias) if isinstance(weight, Tensor) else packed_linear(x, weight, bias)


def _randomizer(view: Tensor, kind: TensorType, columns: int) -> Callable[[torch.Generator], None]:
    """What fills the bytes of a packed matrix at random."""

    def randomize(generator: torch.Generator) -> None:
        view.random_(0, 256, generator=generator)
        blocks = view.unflatten(-1, (-1, kind.block_bytes))
        for start, value in RANDOM_SCALES[kind.name].items():
            number = torch.tensor([value * columns**-0.5], dtype=torch.float16, device=view.device)
            blocks[..., start : start + 2] = number.view(torch.uint8)

    return randomize
