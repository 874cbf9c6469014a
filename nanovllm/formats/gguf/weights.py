"""Matrices of GGUF types in memory: the file's own bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from nanovllm.formats.gguf.header import TensorType
from nanovllm.layers.linear_method import NamedSlots, WeightSlot
from nanovllm.layers.packed_matrix import PackedMatrix
from nanovllm.ops.packed_weights import gguf_weight

# For random weights. Of each type the bytes of a block that hold fp16 numbers, and their values as a multiple of
# 1 / sqrt(columns) if all other bytes are random, so that the weights have mean 0 and variance 1 / columns.
RANDOM_SCALES: Mapping[str, Mapping[int, float]] = MappingProxyType(
    {
        "Q4_0": {0: 1 / 4.6},
        "Q4_1": {0: 1 / 4.6, 2: -7.5 / 4.6},
        "Q5_0": {0: 1 / 9.2},
        "Q5_1": {0: 1 / 9.2, 2: -15.5 / 9.2},
        "Q8_0": {0: 1 / 74},
        "Q4_K": {0: 1 / 250, 2: 7.5 / 250},
        "Q5_K": {0: 1 / 500, 2: 15.5 / 500},
        "Q6_K": {208: 1 / 1370},
    }
)


class GgufWeight(PackedMatrix):
    """Matrices of one type, as their bytes lie in the file."""

    def __init__(
        self, kind: TensorType, parts: Mapping[str, int], in_features: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        row_bytes = in_features // kind.block_size * kind.block_bytes
        data = torch.empty(sum(parts.values()), row_bytes, dtype=torch.uint8, device=device)
        super().__init__(gguf_weight(kind.name.lower(), data), parts, dtype)
        self._kind = kind

    def slots(self) -> NamedSlots:
        for module, part in self.module_weights():
            randomize = _randomizer(part.data, self._kind, part.in_features)
            yield f"{module}.weight", WeightSlot(part.data, part.shape, randomize=randomize)


def _randomizer(view: Tensor, kind: TensorType, columns: int) -> Callable[[torch.Generator], None]:
    """What fills the bytes of a packed matrix at random."""

    def randomize(generator: torch.Generator) -> None:
        view.random_(0, 256, generator=generator)
        blocks = view.unflatten(-1, (-1, kind.block_bytes))
        for start, value in RANDOM_SCALES[kind.name].items():
            number = torch.tensor([value * columns**-0.5], dtype=torch.float16, device=view.device)
            blocks[..., start : start + 2] = number.view(torch.uint8)

    return randomize
