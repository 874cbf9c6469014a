"""How llama.cpp's conversion stores layers with the gated delta rule: names, orders and values, for tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch


class Recurrent(NamedTuple):
    """A tensor of a file: that of Transformers, and the places there of the file's rows and columns."""

    name: str
    weight: torch.Tensor
    rows: Any
    columns: Any
    is_matrix: bool = True
    change: Callable[[torch.Tensor], torch.Tensor] = lambda numbers: numbers


def recurrent_facts(config: Any) -> dict[str, Any]:
    """The metadata of the layers."""
    heads = config.linear_num_value_heads
    return {
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": heads,
        "ssm.inner_size": heads * config.linear_value_head_dim,
        "full_attention_interval": config.layer_types.index("full_attention") + 1,
        "rope.dimension_count": int(config.head_dim * config.rope_parameters.get("partial_rotary_factor", 0.25)),
        "rope.dimension_sections": [11, 11, 10, 0],
    }


def recurrent_tensors(name: str, weight: torch.Tensor, config: Any) -> Iterator[Recurrent]:
    """The tensors that a parameter of Transformers becomes."""
    keys = config.linear_num_key_heads
    heads = config.linear_num_value_heads
    key_dim = config.linear_key_head_dim
    value_dim = config.linear_value_head_dim
    repeats = heads // keys
    is_next = config.model_type == "qwen3_next"
    prefix = f"blk.{name.split('.')[2]}."
    own = name.partition(".linear_attn.")[2].removesuffix(".weight")
    all_rows = np.arange(len(weight))
    columns = np.arange(weight.shape[-1])

    def tiled(width: int, start: int = 0) -> Any:
        """From one key head after another to one repeat after another."""
        places = np.arange(heads * width).reshape(keys, repeats, width)
        return start + (places if is_next else places.swapaxes(0, 1)).reshape(-1)

    key_rows = 2 * keys * key_dim
    with_keys = np.concatenate((np.arange(key_rows), tiled(value_dim, key_rows)))
    if own == "in_proj_qkvz":  # of each key head q, k, v and z
        of_heads = np.split(all_rows.reshape(keys, -1), np.cumsum([key_dim, key_dim, repeats * value_dim]), axis=1)
        q, k, v, z = (of_head.reshape(-1) for of_head in of_heads)
        yield Recurrent(f"{prefix}attn_qkv.weight", weight, np.concatenate((q, k, v)), columns)
        yield Recurrent(f"{prefix}attn_gate.weight", weight, z, columns)
        return
    matrices = {
        "in_proj_qkv": ("attn_qkv", with_keys, columns),
        "in_proj_z": ("attn_gate", tiled(value_dim), columns),
        "in_proj_b": ("ssm_beta", tiled(1), columns),
        "in_proj_a": ("ssm_alpha", tiled(1), columns),
        "in_proj_ba": ("ssm_ba", all_rows, columns),
        "out_proj": ("ssm_out", all_rows, tiled(value_dim)),
    }
    if own in matrices:
        module, rows, columns = matrices[own]
        yield Recurrent(f"{prefix}{module}.weight", weight, rows, columns)
        return
    module, rows, change = {
        "A_log": ("ssm_a", tiled(1), lambda numbers: -numbers.exp()),
        "dt_bias": ("ssm_dt.bias", tiled(1), lambda numbers: numbers),
        "conv1d": ("ssm_conv1d.weight", with_keys, lambda numbers: numbers.squeeze(1)),
        "norm": ("ssm_norm.weight", all_rows, lambda numbers: numbers),
    }[own]
    yield Recurrent(f"{prefix}{module}", weight, rows, columns, False, change)
