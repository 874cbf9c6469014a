"""The names of a checkpoint's tensors in Hugging Face format, and the same tensors' names in GGUF."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

MODULES: Mapping[str, str] = MappingProxyType(
    {
        "token_embd": "model.embed_tokens",
        "output": "lm_head",
        "output_norm": "model.norm",
    }
)
LAYER_MODULES: Mapping[str, str] = MappingProxyType(
    {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
)
LAYER = re.compile(r"blk\.(0|[1-9]\d{0,3})\.(\w+)\.(weight|bias)")
OTHER = re.compile(r"(\w+)\.(weight|bias)")


def hugging_face_name(name: str) -> str:
    """The tensor's name in Hugging Face format; the same name if no supported network has it."""
    if (match := LAYER.fullmatch(name)) and match[2] in LAYER_MODULES:
        return f"model.layers.{match[1]}.{LAYER_MODULES[match[2]]}.{match[3]}"
    if (match := OTHER.fullmatch(name)) and match[1] in MODULES:
        return f"{MODULES[match[1]]}.{match[2]}"
    return name
