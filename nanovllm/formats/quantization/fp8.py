"""FP8 checkpoints: weights in float8_e4m3fn with fp32 scales per tensor, per output, or per block of 128 x 128.

weight[o, i] = float(weight[o, i]) * scale[o // 128, i // 128], as in the FP8 checkpoints of Qwen3 and DeepSeek-V3,
where the scale is called weight_scale_inv; without blocks weight_scale[o] or one weight_scale. Source: DeepSeek-V3,
inference/kernel.py, weight_dequant.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from nanovllm.data.json_fields import Field, only
from nanovllm.errors import ModelError
from nanovllm.formats.quantization.config_fields import NAMES, Modules, read_fields
from nanovllm.formats.quantization.packed_method import Filling, Layout, PackedMethod
from nanovllm.layers.linear_method import COLUMNS, ROWS, Axis, CheckpointTensor

BLOCK = 128
_FLOATS = ("F32", "BF16", "F16")
_RULES: Mapping[str, Field] = MappingProxyType(
    {
        "activation_scheme": only("dynamic"),
        "fmt": only("e4m3", "float8_e4m3fn"),
        "scale_fmt": only("float"),
        "weight_block_size": only([BLOCK, BLOCK]),
        **dict.fromkeys(("modules_to_not_convert", "ignored_layers"), NAMES),
        "modules_to_convert": only([]),
        **dict.fromkeys(("weight_per_tensor", "act_per_tensor"), only(False)),
        "is_checkpoint_fp8_serialized": only(True),
    }
)


@dataclass(frozen=True, slots=True)
class Fp8:
    """The format."""

    scale: str  # the name of the scales in the checkpoint
    in_blocks: bool
    fp8_inputs: bool = False  # the checkpoint asks for inputs in fp8

    def layout(self, out_features: int, in_features: int) -> Layout:
        group_size = min(BLOCK, in_features) if self.in_blocks else in_features
        return Layout("fp8", in_features, group_size, "float32", fp8_inputs=self.fp8_inputs)

    def fillings(self, out_features: int, in_features: int) -> Mapping[str, Filling]:
        weight = CheckpointTensor((out_features, in_features), ("F8_E4M3",))
        if self.in_blocks:
            blocks = (-(-out_features // BLOCK), -(-in_features // BLOCK))
            scale = Filling(
                CheckpointTensor(blocks, _FLOATS, axes=(Axis(ROWS, BLOCK), Axis(COLUMNS, BLOCK))),
                "scales",
                lambda scales: scales.repeat_interleave(BLOCK, dim=0)[:out_features],
            )
        else:
            shapes = CheckpointTensor((out_features, 1), _FLOATS, other_shapes=((out_features,), (1,), (1, 1), ()))
            scale = Filling(shapes, "scales", lambda scales: scales.reshape(-1, 1).expand(out_features, 1))
        return {"weight": Filling(weight, "data", _data), self.scale: scale}


def _data(weight: Tensor) -> Tensor:
    """The bytes of the weight. Raises ModelError if it holds NaN; float8_e4m3fn has no infinity."""
    data = weight.contiguous().view(torch.uint8)
    if bool(((data & 127) == 127).any()):
        raise ModelError("the weight holds NaN: get the checkpoint anew.")
    return data


def read_fp8(config: Mapping[str, Any], dtype: str) -> PackedMethod:
    """The method of an fp8 `quantization_config`. Raises ModelError for what is not supported."""
    fields = read_fields(config, _RULES)
    in_blocks = "weight_block_size" in fields
    ignored = (*fields.get("modules_to_not_convert", ()), *fields.get("ignored_layers", ()))
    format = Fp8("weight_scale_inv" if in_blocks else "weight_scale", in_blocks, "activation_scheme" in fields)
    return PackedMethod("fp8", format, Modules(ignored))
