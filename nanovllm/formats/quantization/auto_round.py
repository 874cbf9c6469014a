"""Checkpoints of AutoRound in its own form: the tensors of GPTQ or AWQ, and a config that names the quantized blocks.

`packing_format`, or `backend` in older configs, says which tensors they are. Source: auto-round, export of the format
auto_round, and inference/convert_model.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from nanovllm.data.json_fields import FLAG, OBJECT, TEXT, Field, integer, list_of, only
from nanovllm.errors import ModelError, quoted
from nanovllm.formats.quantization.awq import Awq
from nanovllm.formats.quantization.config_fields import INTEGER_FIELDS, NAMES, WHERE, Modules, read_fields
from nanovllm.formats.quantization.gptq import Gptq
from nanovllm.formats.quantization.packed_method import PackedFormat, PackedMethod

# What is added to the zeros that the packings of GPTQ's tensors store.
_ZERO_OFFSETS = MappingProxyType(
    {
        **dict.fromkeys(("auto_round:auto_gptq", "auto_round:gptq", "auto_round:gptq:exllamav2"), 1),
        **dict.fromkeys(("auto_round:gptqmodel", "auto_round", "auto_round:exllamav2"), 0),
    }
)
_AWQ = ("auto_round:auto_awq", "auto_round:awq")
_PACKING = "auto_round:auto_gptq"  # of a config that names none
_PLAIN = 16  # bits from which a module is not quantized
_BLOCKS = TEXT | NAMES | list_of(NAMES, 1 << 12)
# What all quantized modules must have in common.
_SCHEME: Mapping[str, Field] = MappingProxyType({**INTEGER_FIELDS, "bits": only(4, 8), "sym": FLAG})
_ACTIVATIONS = {"act_bits": integer(_PLAIN, 32)}  # inputs of 16 bits and more are not quantized
_RULES: Mapping[str, Field] = MappingProxyType(
    {
        **_SCHEME,
        **_ACTIVATIONS,
        **dict.fromkeys(("packing_format", "backend"), TEXT),
        **dict.fromkeys(("block_name_to_quantize", "to_quant_block_names"), _BLOCKS),
        "extra_config": OBJECT,
        "rotation_config": only({}),
        **dict.fromkeys(("desc_act", "lm_head"), only(False)),
    }
)
_NAME = re.compile(r"[\w.-]+")  # others are regular expressions, which match anywhere


def read_auto_round(config: Mapping[str, Any], dtype: str) -> PackedMethod:
    """The method of an AutoRound `quantization_config`. Raises ModelError for what is not supported."""
    fields = read_fields(config, _RULES, needed=("bits", "group_size"))
    ignored, quantized = _own_modules(fields)
    blocks = fields.get("block_name_to_quantize") or fields.get("to_quant_block_names") or "model.layers"
    targets = (*(f"re:{re.escape(name)}" for name in _names(blocks)), *quantized)
    return PackedMethod("auto-round", _format(fields), Modules(ignored, targets, head=True))


def _format(fields: Mapping[str, Any]) -> PackedFormat:
    backend = fields.get("backend", "")
    # Newer configs name in `backend` what multiplies, which has no effect here.
    packing = fields.get("packing_format", backend if backend.startswith("auto_round") else _PACKING)
    bits = fields["bits"]
    group_size = fields["group_size"]
    symmetric = fields.get("sym", True)
    if packing in _AWQ:
        if bits != 4:
            raise ModelError(f"{WHERE}: bits={bits}: must be 4 in the packing {quoted(packing)}.")
        return Awq(group_size)
    if packing not in _ZERO_OFFSETS:
        raise ModelError(
            f"{WHERE}: the packing {quoted(packing)} is not supported; supported: {', '.join((*_ZERO_OFFSETS, *_AWQ))}."
        )
    return Gptq(bits, group_size, symmetric, _ZERO_OFFSETS[packing])


def _own_modules(fields: Mapping[str, Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The patterns for `Modules` of what `extra_config` leaves plain, and of what it quantizes.

    Raises ModelError if it quantizes modules in another form than the rest.
    """
    common = {"sym": True, "data_type": "int", "pack_dtype": "int32", **fields}
    ignored = list[str]()
    quantized = list[str]()
    for name, own in fields.get("extra_config", {}).items():
        where = f"{WHERE}: extra_config[{quoted(name)}]"
        if not isinstance(own, dict):
            raise ModelError(f"{where}={quoted(own)}: must be an object.")
        bits = own.get("bits", common["bits"])
        if isinstance(bits, int) and bits >= _PLAIN:
            ignored.append(_pattern(name))
            continue
        for key, value in read_fields(own, {**_SCHEME, **_ACTIVATIONS}, where).items():
            if key in _SCHEME and value != common[key]:
                raise ModelError(
                    f"{where}: {key}={quoted(value)}, but {key}={quoted(common[key])} of the other modules; all "
                    "quantized modules must have the same form, so quantize them alike or leave some in 16 bits."
                )
        quantized.append(_pattern(name))
    return tuple(ignored), tuple(quantized)


def _pattern(name: str) -> str:
    if _NAME.fullmatch(name):
        return name
    return f"re:{name}" if name.startswith(("^", ".*")) else f"re:.*{name}"


def _names(blocks: str | list[Any]) -> Iterator[str]:
    """What the names of quantized modules begin with, from a text, a list, or a list of lists."""
    if isinstance(blocks, str):
        yield from filter(None, (name.strip() for name in blocks.split(",")))
    else:
        for block in blocks:
            yield from _names(block)
