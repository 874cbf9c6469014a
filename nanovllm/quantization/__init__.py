"""Quantized checkpoints: from the config's `quantization_config` to the method that stores the matrices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nanovllm.errors import ModelError, quoted
from nanovllm.layers.linear_method import LinearMethod


def read_quantization(config: Mapping[str, Any]) -> LinearMethod:
    """See `models.hf_config.Quantizations`."""
    raise ModelError(
        f"quantization_config={quoted(config)}: quantized weights are not supported; use a checkpoint in float32, "
        "float16, bfloat16."
    )
