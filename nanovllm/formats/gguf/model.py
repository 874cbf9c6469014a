"""A GGUF file as a network: its config, and how its matrices stay packed in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from nanovllm.formats.gguf.config import config_fields, generation_fields, rope_factors
from nanovllm.formats.gguf.header import TENSOR_TYPES, GgufHeader, TensorType, read_header
from nanovllm.formats.gguf.names import hugging_face_name
from nanovllm.formats.gguf.weights import GgufWeight
from nanovllm.layers.linear import DenseWeight
from nanovllm.layers.linear_method import CheckpointTensor, NamedTensors, StoredWeight, dense_tensors
from nanovllm.layers.packed_matrix import stack_by_form

BY_NAME = {kind.name: kind for kind in TENSOR_TYPES.values()}
PLAIN = ("F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class GgufMethod:
    """How the matrices of a GGUF file are stored: each in its own type. types: by module, of those that are packed."""

    types: Mapping[str, str]

    @property
    def name(self) -> str:
        return "gguf"

    def tensors(self, module: str, out_features: int, in_features: int) -> NamedTensors:
        """See `LinearMethod.tensors`. The shape is that of the matrix, not that of its bytes."""
        if module not in self.types:
            yield from dense_tensors(module, out_features, in_features)
            return
        yield f"{module}.weight", CheckpointTensor((out_features, in_features), (self.types[module],))

    def units(self, module: str, out_features: int, in_features: int) -> tuple[int, int]:
        kind = self._type(module)
        return 1, 1 if kind is None else kind.block_size

    def weight_bytes(self, module: str, out_features: int, in_features: int, itemsize: int) -> int:
        kind = self._type(module)
        if kind is None:
            return out_features * in_features * itemsize
        return out_features * -(-in_features // kind.block_size) * kind.block_bytes

    def create(
        self, parts: Mapping[str, int], in_features: int, dtype: torch.dtype, device: torch.device
    ) -> StoredWeight:
        def create(kind: TensorType | None, own: dict[str, int]) -> StoredWeight:
            if kind is None:
                return DenseWeight(own, in_features, dtype, device)
            return GgufWeight(kind, own, in_features, dtype, device)

        return stack_by_form(parts, lambda module, _: self._type(module), create, dtype)

    def _type(self, module: str) -> TensorType | None:
        """The type of a packed matrix; None if it is stored as plain numbers."""
        return BY_NAME[self.types[module]] if module in self.types else None


class GgufConfig(NamedTuple):
    """What a file says about the network.

    fields: as in config.json; generation: as in generation_config.json; rope_factors: what each RoPE frequency is
    divided by, or none; method: how the matrices are stored, None if all are plain numbers.
    """

    fields: dict[str, Any]
    generation: Mapping[str, Any]
    rope_factors: tuple[float, ...]
    method: GgufMethod | None


def read_config(path: Path) -> GgufConfig:
    """The network of a file. Raises ModelError for a file that is damaged or not supported."""
    header = read_header(path)
    fields = config_fields(header)  # first: of another architecture, the tensors' types do not matter
    header.check_types()
    types = packed_types(header)
    method = GgufMethod(types) if types else None
    return GgufConfig(fields, generation_fields(header), rope_factors(header), method)


def packed_types(header: GgufHeader) -> dict[str, str]:
    """The type of each packed matrix, by its module's name in Hugging Face format."""
    return {
        hugging_face_name(name).removesuffix(".weight"): tensor.type.name
        for name, tensor in header.tensors.items()
        if tensor.type.name not in PLAIN
    }
