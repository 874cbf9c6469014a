"""Quantized checkpoints: from the config's `quantization_config` to the method that stores the matrices.

Matrices stay quantized in memory. Their values are those of the format's own formula, in fp32. Activations are
quantized to fp8 where the checkpoint says so and a GPU multiplies fp8, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from nanovllm.data.json_fields import TEXT, checked_fields
from nanovllm.errors import ModelError, quoted
from nanovllm.formats.quantization.auto_round import read_auto_round
from nanovllm.formats.quantization.awq import read_awq
from nanovllm.formats.quantization.compressed_tensors import read_compressed_tensors
from nanovllm.formats.quantization.config_fields import WHERE
from nanovllm.formats.quantization.fp8 import read_fp8
from nanovllm.formats.quantization.gptq import read_gptq
from nanovllm.formats.quantization.mxfp4 import read_mxfp4
from nanovllm.layers.linear_method import LinearMethod

METHODS = MappingProxyType(
    {
        "gptq": read_gptq,
        "awq": read_awq,
        **dict.fromkeys(("auto-round", "intel/auto-round"), read_auto_round),
        "compressed-tensors": read_compressed_tensors,
        "fp8": read_fp8,
        "mxfp4": read_mxfp4,
    }
)


def read_quantization(
    config: Mapping[str, Any], dtype: str, prefixes: tuple[tuple[str, str], ...] = ()
) -> LinearMethod:
    """The method of a `quantization_config` in a checkpoint of `dtype`. Raises ModelError for other formats.

    prefixes: see `Modules`.
    """
    name: str | None = checked_fields(WHERE, config, {"quant_method": TEXT}).get("quant_method")
    if name is None or name not in METHODS:
        given = f"it has no quant_method ({quoted(config)})" if name is None else f"quant_method={quoted(name)}"
        raise ModelError(
            f"{WHERE}: {given}: not supported; supported are {', '.join(METHODS)}, and checkpoints in float32, "
            "float16, bfloat16."
        )
    method = METHODS[name](config, dtype)
    return replace(method, modules=replace(method.modules, prefixes=prefixes))
