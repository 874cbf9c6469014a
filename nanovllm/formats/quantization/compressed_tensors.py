"""Checkpoints of compressed-tensors (LLM Compressor) in the formats pack-quantized and float-quantized.

pack-quantized: weight[o, i] = (q[o, i] - zero[o, g]) * weight_scale[o, g] with g = i // group_size, 4 or 8 bits.
weight_packed holds q + 2^(bits - 1), packed along the inputs; weight_zero_point likewise, packed along the outputs.
float-quantized: as `fp8`, with weight_scale. Source: compressed-tensors, compressors/pack_quantized/helpers.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from nanovllm.data.json_fields import FLAG, OBJECT, TEXT, Field, list_of, only
from nanovllm.errors import ModelError, quoted
from nanovllm.formats.quantization import packed_method as packing
from nanovllm.formats.quantization.config_fields import GROUP_SIZE, NAMES, WHERE, Modules, read_fields
from nanovllm.formats.quantization.fp8 import BLOCK, Fp8
from nanovllm.formats.quantization.packed_method import Filling, Layout, PackedFormat, PackedMethod
from nanovllm.layers.linear_method import COLUMNS, ROWS, Axis, CheckpointTensor

_FORMATS = ("pack-quantized", "float-quantized")
_RULES = MappingProxyType(
    {
        "format": TEXT,
        "config_groups": Field(
            "an object with one group, for all quantized layers",
            lambda value: isinstance(value, dict) and [type(group) for group in value.values()] == [dict],
        ),
        "ignore": NAMES,
        "kv_cache_scheme": only({}),
        "quantization_status": only("compressed", "frozen"),
        "sparsity_config": Field(
            "an object of format dense: sparse weights are not supported",
            lambda value: isinstance(value, dict) and value.get("format", "dense") == "dense",
        ),
        "transform_config": only({}),
    }
)
_GROUP_RULES = MappingProxyType(
    {
        "targets": list_of(TEXT, 1 << 12),
        "weights": OBJECT,
        "input_activations": OBJECT,
        "output_activations": only({}),
        "format": only(*_FORMATS),
    }
)
_ANY_WEIGHT_RULES = {"actorder": only(False, "weight", "static"), "dynamic": only(False)}
_WEIGHT_RULES: Mapping[str, Mapping[str, Field]] = MappingProxyType(
    {
        "pack-quantized": {
            **_ANY_WEIGHT_RULES,
            "num_bits": only(4, 8),
            "type": only("int"),
            "symmetric": FLAG,
            "strategy": only("group", "channel"),
            "group_size": GROUP_SIZE,
        },
        "float-quantized": {
            **_ANY_WEIGHT_RULES,
            "num_bits": only(8),
            "type": only("float"),
            "symmetric": only(True),
            "strategy": only("tensor", "channel", "block"),
            "block_structure": only([BLOCK, BLOCK]),
        },
    }
)
# What the library takes where a config says nothing.
_WEIGHT_DEFAULTS: Mapping[str, Any] = MappingProxyType({"num_bits": 8, "type": "int", "strategy": "tensor"})


@dataclass(frozen=True, slots=True)
class PackQuantized:
    """The format pack-quantized. scales_dtype: in memory, the checkpoint's own."""

    bits: int
    group_size: int
    symmetric: bool
    scales_dtype: str

    def layout(self, out_features: int, in_features: int) -> Layout:
        return packing.integer_layout(
            in_features, self.bits, self.group_size, self.scales_dtype, zeros=not self.symmetric
        )

    def fillings(self, out_features: int, in_features: int) -> Mapping[str, Filling]:
        values = 32 // self.bits
        packing.check_multiple("in_features", in_features, values)
        layout = self.layout(out_features, in_features)
        groups = layout.scale_columns
        group = Axis(COLUMNS, layout.group_size)
        data_axes = (Axis(ROWS), Axis(COLUMNS, values))
        data = CheckpointTensor((out_features, in_features // values), ("I32",), axes=data_axes)
        scales = CheckpointTensor((out_features, groups), ("BF16", "F16", "F32"), axes=(Axis(ROWS), group))
        check = partial(_check_shape, expected=[out_features, in_features])
        fillings = {
            "weight_packed": Filling(data, "data", self._data),
            "weight_scale": Filling(scales, "scales", lambda scales: packing.exact_scales(scales, self.scales_dtype)),
            "weight_shape": Filling(CheckpointTensor((2,), ("I64", "I32"), required=False, check=check)),
        }
        if not self.symmetric:
            packing.check_multiple("out_features", out_features, values)
            zeros_axes = (Axis(ROWS, values), group)
            packed = CheckpointTensor((out_features // values, groups), ("I32",), axes=zeros_axes)
            fillings["weight_zero_point"] = Filling(packed, "zeros", self._zeros)
        return fillings

    def _data(self, packed: Tensor) -> Tensor:
        data = packed.contiguous().view(torch.uint8)  # 4 bits: the even input in the low half, as in `PackedWeight`
        return packing.in_scheme(data, self.bits)

    def _zeros(self, packed: Tensor) -> Tensor:
        return packing.in_scheme(packing.unpacked_last(packed.T, self.bits).T, self.bits)


def _check_shape(shape: Tensor, expected: list[int]) -> None:
    if shape.tolist() != expected:
        raise ModelError(f"it says {shape.tolist()}, but the config gives {expected}.")


def read_compressed_tensors(config: Mapping[str, Any], dtype: str) -> PackedMethod:
    """The method of a `quantization_config` of compressed-tensors. Raises ModelError for what is not supported."""
    fields = read_fields({"config_groups": {}, **config}, _RULES)
    ((name, group),) = fields["config_groups"].items()
    where = f"{WHERE}: config_groups[{quoted(name)}]"
    scheme = read_fields(group, _GROUP_RULES, where)
    stored_as = scheme.get("format", fields.get("format"))
    if stored_as not in _FORMATS:
        raise ModelError(f"{WHERE}: format={quoted(stored_as)} is not supported; supported: {', '.join(_FORMATS)}.")
    inputs = scheme.get("input_activations")
    if inputs is not None and (stored_as == "pack-quantized" or not _is_dynamic_fp8(inputs)):
        raise ModelError(
            f"{where}: input_activations={quoted(inputs)} are not supported; supported: none, or dynamic ones of type "
            "float with 8 bits and format float-quantized."
        )
    given = {key: value for key, value in scheme.get("weights", {}).items() if value is not None}
    weights = read_fields({**_WEIGHT_DEFAULTS, **given}, _WEIGHT_RULES[stored_as], f"{where}.weights")
    format = _format(f"{where}.weights", stored_as, weights, dtype, fp8_inputs=inputs is not None)
    targets = tuple(scheme.get("targets", ("Linear",)))
    modules = Modules(tuple(fields.get("ignore", ())), targets, as_parts=False, head=True)
    return PackedMethod("compressed-tensors", format, modules)


def _is_dynamic_fp8(inputs: Mapping[str, Any]) -> bool:
    return inputs.get("dynamic") is True and inputs.get("type") == "float" and inputs.get("num_bits", 8) == 8


def _format(where: str, stored_as: str, weights: Mapping[str, Any], dtype: str, fp8_inputs: bool) -> PackedFormat:
    strategy = weights["strategy"]
    if stored_as == "float-quantized":
        if strategy == "block" and "block_structure" not in weights:
            raise ModelError(f"{where}: strategy='block' needs a block_structure.")
        return Fp8("weight_scale", strategy == "block", fp8_inputs)
    group_size = weights.get("group_size", -1)
    if (strategy == "group") != (group_size != -1):
        raise ModelError(f"{where}: strategy={strategy!r} contradicts group_size={group_size}.")
    return PackQuantized(weights["num_bits"], group_size, weights.get("symmetric", True), dtype)
