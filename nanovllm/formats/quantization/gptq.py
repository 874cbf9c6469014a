"""GPTQ checkpoints (AutoGPTQ, GPTQModel), 4 and 8 bits.

weight[o, i] = scales[g, o] * (qweight[i, o] - zeros[g, o]) with g = i // group_size. qweight packs inputs, qzeros
outputs, the first in the lowest bits. The first version of the format stores zeros minus 1, modulo 2^bits. Source:
AutoGPTQ, qlinear_cuda_old.py; GPTQModel, nn_modules/qlinear/torch.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from nanovllm.data.json_fields import FLAG, Field, only
from nanovllm.errors import ModelError
from nanovllm.formats.quantization import packed_method as packing
from nanovllm.formats.quantization.config_fields import INTEGER_FIELDS, WHERE, Modules, read_fields
from nanovllm.formats.quantization.packed_method import Filling, Layout, PackedMethod
from nanovllm.layers.linear_method import COLUMNS, ROWS, Axis, CheckpointTensor

_ZERO_OFFSETS = MappingProxyType({"gptq": 1, "gptq_v2": 0})  # what the versions of the format add to stored zeros
_SKIPPED = "-:"  # begins a pattern of modules that stay plain
# Patterns of modules, and how they differ from the others.
DYNAMIC = Field(
    "an object that says of no pattern more than that its modules are quantized or not",
    lambda value: isinstance(value, dict) and all(said in ({}, True) for said in value.values()),
)
_RULES: Mapping[str, Field] = MappingProxyType(
    {
        **INTEGER_FIELDS,
        "bits": only(4, 8),
        **dict.fromkeys(("desc_act", "sym", "lm_head"), FLAG),
        "method": only("gptq"),
        **dict.fromkeys(("checkpoint_format", "format"), only(*_ZERO_OFFSETS)),
        "dynamic": DYNAMIC,
        "modules_in_block_to_quantize": only([], {}),
        "is_marlin_format": only(False),
    }
)


@dataclass(frozen=True, slots=True)
class Gptq:
    """The format."""

    bits: int
    group_size: int
    symmetric: bool
    zero_offset: int  # added to the stored zeros: 1 in the first version of the format, 0 in the second

    def layout(self, out_features: int, in_features: int) -> Layout:
        return packing.integer_layout(in_features, self.bits, self.group_size, "float16", zeros=not self.symmetric)

    def fillings(self, out_features: int, in_features: int) -> Mapping[str, Filling]:
        values = 32 // self.bits  # in an int32
        packing.check_multiple("out_features", out_features, values)
        packing.check_multiple("in_features", in_features, values)
        layout = self.layout(out_features, in_features)
        groups = layout.scale_columns
        ints = ("I32",)
        words = Axis(COLUMNS, values)
        group = Axis(COLUMNS, layout.group_size)
        data = CheckpointTensor((in_features // values, out_features), ints, axes=(words, Axis(ROWS)))
        zeros = CheckpointTensor((groups, out_features // values), ints, axes=(group, Axis(ROWS, values)))
        scales = CheckpointTensor((groups, out_features), ("F16", "BF16", "F32"), axes=(group, Axis(ROWS)))

        def check_order(g_idx: Tensor) -> None:
            if not torch.equal(g_idx.long(), torch.arange(in_features) // layout.group_size):
                raise ModelError("the groups are ordered by activation (desc_act); quantize without act-order.")

        checked_zeros = Filling(zeros._replace(check=self._check_zeros))
        filled_zeros = checked_zeros if self.symmetric else Filling(zeros, "zeros", self._zeros)
        return {
            "qweight": Filling(data, "data", self._data),
            "qzeros": filled_zeros,
            "scales": Filling(scales, "scales", lambda scales: packing.exact_scales(scales, "float16").T),
            "g_idx": Filling(CheckpointTensor((in_features,), ("I32", "I64"), required=False, check=check_order)),
        }

    def _data(self, qweight: Tensor) -> Tensor:
        # A byte holds two inputs of 4 bits, the even one in the low half, as in `PackedWeight`.
        words, out_features = qweight.shape
        values = qweight.contiguous().view(torch.uint8).view(words, out_features, 4)
        data = values.transpose(0, 1).reshape(out_features, 4 * words)
        return packing.in_scheme(data, self.bits)

    def _zeros(self, qzeros: Tensor) -> Tensor:
        return packing.in_scheme(self._unsigned_zeros(qzeros), self.bits)

    def _check_zeros(self, qzeros: Tensor) -> None:
        middle = 1 << (self.bits - 1)
        if bool((self._unsigned_zeros(qzeros) != middle).any()):
            raise ModelError(f"sym=true, but a zero point differs from {middle}; set sym to false in the config.")

    def _unsigned_zeros(self, qzeros: Tensor) -> Tensor:
        stored = packing.unpacked_last(qzeros, self.bits).T
        return stored + self.zero_offset & (1 << self.bits) - 1


def read_gptq(config: Mapping[str, Any], dtype: str) -> PackedMethod:
    """The method of a GPTQ `quantization_config`. Raises ModelError for what is not supported."""
    fields = read_fields(config, _RULES, needed=("bits", "group_size"))
    if fields.get("desc_act") and fields["group_size"] != -1:
        raise ModelError(
            f"{WHERE}: desc_act=True, groups ordered by activation, is not supported; supported: desc_act=False, or "
            "group_size=-1."
        )
    zero_offset = _ZERO_OFFSETS[fields.get("checkpoint_format", fields.get("format", "gptq"))]
    format = Gptq(fields["bits"], fields["group_size"], fields.get("sym", True), zero_offset)
    ignored = skipped_modules(fields.get("dynamic", {}))
    return PackedMethod("gptq", format, Modules(ignored, as_parts=False, head=fields.get("lm_head", False)))


def skipped_modules(dynamic: Mapping[str, Any]) -> tuple[str, ...]:
    """The patterns for `Modules` of what `dynamic` leaves as plain numbers."""
    return tuple(f"re:{name.removeprefix(_SKIPPED)}" for name in dynamic if name.startswith(_SKIPPED))
