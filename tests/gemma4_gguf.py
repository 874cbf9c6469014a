"""How llama.cpp's conversion stores a Gemma 4: metadata and names, for tests."""

from __future__ import annotations

from typing import Any

import torch

NAMES = {
    "pre_feedforward_layernorm": "ffn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
    "router.proj": "ffn_gate_inp",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
}
OTHER_NAMES = {
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
}
# Names within a layer that end otherwise than in the file.
TENSORS = {
    "layer_scalar": "layer_output_scale.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
}


def facts(config: Any) -> dict[str, Any]:
    """The metadata of the network in which it differs from others."""
    windows = [kind == "sliding_attention" for kind in config.layer_types]
    of_full = config.per_layer_config[windows.index(False)]
    full_dim = of_full.head_dim
    full_heads = of_full.num_key_value_heads
    heads = [config.num_key_value_heads if has_window else full_heads for has_window in windows]
    owners = len(windows) - config.num_kv_shared_layers
    size = config.intermediate_size
    wide = 1 + config.use_double_wide_mlp
    return {
        "attention.head_count_kv": heads if len(set(heads)) > 1 else heads[0],
        "feed_forward_length": [size] * owners + [wide * size] * (len(windows) - owners) if wide > 1 else size,
        "attention.sliding_window_pattern": windows,
        "attention.sliding_window": config.sliding_window,
        "attention.shared_kv_layers": config.num_kv_shared_layers,
        "embedding_length_per_layer_input": config.hidden_size_per_layer_input,
        "final_logit_softcapping": config.final_logit_softcapping or 0.0,
        "attention.key_length": full_dim,
        "attention.key_length_swa": config.head_dim,
        "attention.value_length_swa": config.head_dim,
        "rope.dimension_count": full_dim,
        "rope.dimension_count_swa": config.head_dim,
        "rope.freq_base_swa": float(config.rope_parameters["sliding_attention"]["rope_theta"]),
        "expert_count": config.num_experts,
        "expert_used_count": config.top_k_experts,
        "expert_feed_forward_length": config.moe_intermediate_size,
    }


def rope_factors(config: Any) -> list[float]:
    pairs = config.per_layer_config[config.layer_types.index("full_attention")].head_dim // 2
    rotated = int(pairs * config.rope_parameters["full_attention"]["partial_rotary_factor"])
    return [1.0] * rotated + [1e30] * (pairs - rotated)


def tensor(name: str, weight: torch.Tensor) -> tuple[str, torch.Tensor] | None:
    """The name in the file of one that only a Gemma 4 has; None for others."""
    module = name.rpartition(".")[0]
    if module in OTHER_NAMES:
        return f"{OTHER_NAMES[module]}.weight", weight
    _, _, index, own = name.split(".", 3) if name.startswith("model.layers.") else ("", "", "", "")
    if own in TENSORS:
        return f"blk.{index}.{TENSORS[own]}", weight
    own = own.rpartition(".")[0]
    return (f"blk.{index}.{NAMES[own]}.weight", weight) if own in NAMES else None
