"""AWQ checkpoints (AutoAWQ, GPTQModel) in the layout "gemm", 4 bits.

weight[o, i] = (qweight[i, o] - qzeros[g, o]) * scales[g, o] with g = i // group_size. Both pack outputs; the eight
values of an int32 belong, from the low bits up, to outputs 0, 2, 4, 6, 1, 3, 5, 7 of eight. Source: AutoAWQ,
modules/linear/gemm.py and utils/packing_utils.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import Tensor

from nanovllm.data.json_fields import Field, only
from nanovllm.formats.quantization import packed_method as packing
from nanovllm.formats.quantization.config_fields import INTEGER_FIELDS, NAMES, Modules, read_fields
from nanovllm.formats.quantization.gptq import DYNAMIC, skipped_modules
from nanovllm.formats.quantization.packed_method import Filling, Layout, PackedMethod
from nanovllm.layers.linear_method import COLUMNS, ROWS, Axis, CheckpointTensor
from nanovllm.ops.packed_weights import pack_int4

_RULES: Mapping[str, Field] = MappingProxyType(
    {
        **INTEGER_FIELDS,
        "bits": only(4),
        "zero_point": only(True),
        "method": only("awq"),
        **dict.fromkeys(("version", "format", "checkpoint_format"), only("gemm", "GEMM")),
        **dict.fromkeys(("desc_act", "lm_head"), only(False)),
        "dynamic": DYNAMIC,
        "modules_to_not_convert": NAMES,
        "modules_in_block_to_quantize": only([]),
    }
)
_VALUES = 8  # in an int32
_POSITIONS = [0, 4, 1, 5, 2, 6, 3, 7]  # of outputs 0 to 7 in an int32


@dataclass(frozen=True, slots=True)
class Awq:
    """The format."""

    group_size: int

    def layout(self, out_features: int, in_features: int) -> Layout:
        return packing.integer_layout(in_features, 4, self.group_size, "float16", zeros=True)

    def fillings(self, out_features: int, in_features: int) -> Mapping[str, Filling]:
        packing.check_multiple("out_features", out_features, _VALUES)
        packing.check_multiple("in_features", in_features, 2)
        layout = self.layout(out_features, in_features)
        groups = layout.scale_columns
        group = Axis(COLUMNS, layout.group_size)
        words = out_features // _VALUES
        word = Axis(ROWS, _VALUES)
        data = CheckpointTensor((in_features, words), ("I32",), axes=(Axis(COLUMNS), word))
        scales = CheckpointTensor((groups, out_features), ("F16", "BF16", "F32"), axes=(group, Axis(ROWS)))
        return {
            "qweight": Filling(data, "data", lambda qweight: pack_int4(_outputs(qweight).contiguous())),
            "qzeros": Filling(CheckpointTensor((groups, words), ("I32",), axes=(group, word)), "zeros", _outputs),
            "scales": Filling(scales, "scales", lambda scales: packing.exact_scales(scales, "float16").T),
        }


def _outputs(packed: Tensor) -> Tensor:
    """int32 [rows, out / 8] -> uint8 [out, rows]."""
    return packing.unpacked_last(packed, 4).unflatten(-1, (-1, _VALUES))[..., _POSITIONS].flatten(-2).T


def read_awq(config: Mapping[str, Any], dtype: str) -> PackedMethod:
    """The method of an AWQ `quantization_config`. Raises ModelError for what is not supported."""
    fields = read_fields(config, _RULES)
    ignored = (*fields.get("modules_to_not_convert", ()), *skipped_modules(fields.get("dynamic", {})))
    return PackedMethod("awq", Awq(fields.get("group_size", 128)), Modules(ignored))
