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

from nanovllm.data.json_fields import FLAG, OBJECT, TEXT, Field, integer, list_of
from nanovllm.errors import ModelError, quoted
from nanovllm.formats.quantization.config_fields import (
    GROUP_SIZE,
    NAMES,
    WHERE,
    Modules,
    checked_group_size,
    read_fields,
    refuse_unless,
)
from nanovllm.formats.quantization.fp8 import BLOCK, Fp8
from nanovllm.formats.quantization.packed_method import Filling, Layout, PackedFormat, PackedMethod, integer_layout
from nanovllm.formats.quantization.unpacking import check_multiple, exact_scales, signed, unpacked_last, zeros_of
from nanovllm.layers.linear_method import COLUMNS, ROWS, Axis, CheckpointTensor

_FORMATS = ("pack-quantized", "float-quantized")
_RULES = MappingProxyType(
    {
        "quant_method": TEXT,
        "format": TEXT,
        "config_groups": OBJECT,
        "ignore": NAMES,
        "kv_cache_scheme": OBJECT,
        "quantization_status": TEXT,
        "sparsity_config": OBJECT,
        "transform_config": OBJECT,
    }
)
_WITHOUT_EFFECT = frozenset({"global_compression_ratio", "version"})
_GROUP_RULES = MappingProxyType(
    {
        "targets": list_of(TEXT, 1 << 12),
        "weights": OBJECT,
        "input_activations": OBJECT,
        "output_activations": OBJECT,
        "format": TEXT,
    }
)
_WEIGHT_RULES: Mapping[str, Field] = MappingProxyType(
    {
        "num_bits": integer(1, 64),
        "type": TEXT,
        "symmetric": FLAG,
        "strategy": TEXT,
        "group_size": GROUP_SIZE,
        "block_structure": list_of(integer(1), 2) | TEXT,
        "actorder": TEXT | FLAG,
        "dynamic": FLAG,
    }
)
_WEIGHT_WITHOUT_EFFECT = frozenset({"observer", "observer_kwargs", "scale_dtype", "zp_dtype"})


@dataclass(frozen=True, slots=True)
class PackQuantized:
    """The format pack-quantized. scales_dtype: in memory, the checkpoint's own."""

    bits: int
    group_size: int
    symmetric: bool
    scales_dtype: str

    def layout(self, out_features: int, in_features: int) -> Layout:
        return integer_layout(in_features, self.bits, self.group_size, self.scales_dtype, zeros=not self.symmetric)

    def fillings(self, out_features: int, in_features: int) -> Mapping[str, Filling]:
        values = 32 // self.bits
        check_multiple("in_features", in_features, values)
        layout = self.layout(out_features, in_features)
        groups, group = layout.scale_columns, Axis(COLUMNS, layout.group_size)
        data_axes = (Axis(ROWS), Axis(COLUMNS, values))
        data = CheckpointTensor((out_features, in_features // values), ("I32",), axes=data_axes)
        scales = CheckpointTensor((out_features, groups), ("BF16", "F16", "F32"), axes=(Axis(ROWS), group))
        check = partial(_check_shape, expected=[out_features, in_features])
        fillings = {
            "weight_packed": Filling(data, "data", self._data),
            "weight_scale": Filling(scales, "scales", lambda scales: exact_scales(scales, self.scales_dtype)),
            "weight_shape": Filling(CheckpointTensor((2,), ("I64", "I32"), required=False, check=check)),
        }
        if not self.symmetric:
            check_multiple("out_features", out_features, values)
            zeros_axes = (Axis(ROWS, values), group)
            packed = CheckpointTensor((out_features // values, groups), ("I32",), axes=zeros_axes)
            fillings["weight_zero_point"] = Filling(packed, "zeros", self._zeros)
        return fillings

    def _data(self, packed: Tensor) -> Tensor:
        data = packed.contiguous().view(torch.uint8)  # 4 bits: the even input in the low half, as in `PackedWeight`
        return data if self.bits == 4 else signed(data)

    def _zeros(self, packed: Tensor) -> Tensor:
        return zeros_of(unpacked_last(packed.T, self.bits).T, self.bits)


def _check_shape(shape: Tensor, expected: list[int]) -> None:
    if shape.tolist() != expected:
        raise ModelError(f"it says {shape.tolist()}, but the config gives {expected}.")


def read_compressed_tensors(config: Mapping[str, Any], dtype: str) -> PackedMethod:
    """The method of a `quantization_config` of compressed-tensors. Raises ModelError for what is not supported."""
    fields = read_fields(config, _RULES, _WITHOUT_EFFECT)
    refuse_unless(fields, "quantization_status", "compressed", "frozen")
    for name in ("transform_config", "kv_cache_scheme"):
        refuse_unless(fields, name, {})
    if fields.get("sparsity_config", {}).get("format", "dense") != "dense":
        raise ModelError(
            f"{WHERE}: sparsity_config={quoted(fields['sparsity_config'])}: sparse weights are not supported."
        )
    groups = fields.get("config_groups", {})
    if len(groups) != 1:
        raise ModelError(
            f"{WHERE}: config_groups has {len(groups)} groups ({quoted(sorted(map(str, groups)))}); supported is one, "
            "for all quantized layers."
        )
    (name, group), *_ = groups.items()
    where = f"{WHERE}: config_groups[{quoted(name)}]"
    if not isinstance(group, dict):
        raise ModelError(f"{where}={quoted(group)}: must be an object.")
    scheme = read_fields(group, _GROUP_RULES, (), where)
    stored_as = scheme.get("format", fields.get("format"))
    if stored_as not in _FORMATS:
        raise ModelError(f"{WHERE}: format={quoted(stored_as)} is not supported; supported: {', '.join(_FORMATS)}.")
    _check_activations(where, scheme, stored_as)
    targets = tuple(scheme.get("targets", ("Linear",)))
    modules = Modules(tuple(fields.get("ignore", ())), targets, as_parts=False, head=True)
    weights = read_fields(scheme.get("weights", {}), _WEIGHT_RULES, _WEIGHT_WITHOUT_EFFECT, f"{where}.weights")
    format = _format(f"{where}.weights", stored_as, weights, dtype, fp8_inputs="input_activations" in scheme)
    return PackedMethod("compressed-tensors", format, modules)


def _check_activations(where: str, scheme: Mapping[str, Any], stored_as: str) -> None:
    """Raise ModelError for activations that the format does not leave in the network's dtype or scale as they come."""
    if "output_activations" in scheme:
        raise ModelError(f"{where}: output_activations, quantized outputs, are not supported.")
    inputs = scheme.get("input_activations")
    if inputs is None:
        return
    is_fp8 = inputs.get("type") == "float" and inputs.get("num_bits", 8) == 8
    if stored_as == "pack-quantized" or inputs.get("dynamic") is not True or not is_fp8:
        raise ModelError(
            f"{where}: input_activations={quoted(inputs)} are not supported; supported: none, or dynamic ones of type "
            "float with 8 bits and format float-quantized."
        )


def _format(where: str, stored_as: str, weights: Mapping[str, Any], dtype: str, fp8_inputs: bool) -> PackedFormat:
    refuse_unless(weights, "dynamic", False, where=where)
    refuse_unless(weights, "actorder", False, "weight", "static", where=where)
    strategy, group_size = weights.get("strategy"), weights.get("group_size", -1)
    if stored_as == "float-quantized":
        refuse_unless({"num_bits": 8, **weights}, "num_bits", 8, where=where)
        refuse_unless({"type": "int", **weights}, "type", "float", where=where)
        refuse_unless(weights, "symmetric", True, where=where)
        refuse_unless({"strategy": "tensor", **weights}, "strategy", "tensor", "channel", "block", where=where)
        if strategy == "block":
            refuse_unless({"block_structure": None, **weights}, "block_structure", [BLOCK, BLOCK], where=where)
        return Fp8("weight_scale", strategy == "block", fp8_inputs)
    refuse_unless({"num_bits": 8, **weights}, "num_bits", 4, 8, where=where)
    refuse_unless(weights, "type", "int", where=where)
    refuse_unless({"strategy": "tensor", **weights}, "strategy", "group", "channel", where=where)
    if (strategy == "group") != (group_size != -1):
        raise ModelError(f"{where}: strategy={strategy!r} contradicts group_size={group_size}.")
    bits, symmetric = weights.get("num_bits", 8), weights.get("symmetric", True)
    return PackQuantized(bits, checked_group_size(group_size), symmetric, dtype)
