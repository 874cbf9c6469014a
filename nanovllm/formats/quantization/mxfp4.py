"""MXFP4 checkpoints: experts in 4 bits, as gpt-oss has them; all else is in plain numbers.

weight[o, i] = fp4(blocks[o, i // 32, i % 32 // 2]) * 2^(scales[o, i // 32] - 127): a byte of a block holds two numbers
of float4_e2m1fn, the even input in the low half. Source: OCP, "Microscaling Formats (MX) Specification" (2023), and
Transformers, integrations/mxfp4.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from nanovllm.errors import ModelError
from nanovllm.formats.quantization import packed_method as packing
from nanovllm.formats.quantization.config_fields import NAMES, Modules, read_fields
from nanovllm.formats.quantization.packed_method import Filling, Layout, PackedMethod
from nanovllm.layers.linear_method import COLUMNS, ROWS, Axis, CheckpointTensor
from nanovllm.ops.packed_weights import MXFP4_GROUP

_NAN = 255  # of a scale
_PLAIN_NAME = re.compile(r"[\w.-]+")


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """The format."""

    def layout(self, out_features: int, in_features: int) -> Layout:
        return Layout("mxfp4", in_features, MXFP4_GROUP, "uint8")

    def fillings(self, out_features: int, in_features: int) -> Mapping[str, Filling]:
        packing.check_multiple("in_features", in_features, MXFP4_GROUP)
        groups = in_features // MXFP4_GROUP
        axes = (Axis(ROWS), Axis(COLUMNS, MXFP4_GROUP))
        blocks = CheckpointTensor((out_features, groups, MXFP4_GROUP // 2), ("U8",), axes=axes)
        scales = CheckpointTensor((out_features, groups), ("U8",), axes=axes)
        return {
            "blocks": Filling(blocks, "data", lambda blocks: blocks.flatten(1)),
            "scales": Filling(scales, "scales", _scales),
        }


def _scales(scales: Tensor) -> Tensor:
    if bool((scales == _NAN).any()):
        raise ModelError("a scale is NaN: get the checkpoint anew.")
    return scales


def read_mxfp4(config: Mapping[str, Any], dtype: str) -> PackedMethod:
    """The method of an MXFP4 `quantization_config`. Raises ModelError for what is not supported.

    It applies to experts only, as in Transformers, of which modules_to_not_convert may name some.
    """
    names = read_fields(config, {"modules_to_not_convert": NAMES}).get("modules_to_not_convert", ())
    ignored = tuple(name if _PLAIN_NAME.fullmatch(name) else rf"re:{name}(\.|$)" for name in names)
    return PackedMethod("mxfp4", Mxfp4(), Modules(ignored, targets=(r"re:.*\.experts\.",)))
