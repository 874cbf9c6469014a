"""The names of a checkpoint's tensors in Hugging Face format, and the same tensors' names in GGUF."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType

from nanovllm.errors import ModelError
from nanovllm.formats.config_fields import EXPERT_COUNT
from nanovllm.formats.gguf.architectures import Architecture, architecture_of
from nanovllm.formats.gguf.header import GgufHeader, GgufTensor

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


def named_tensors(header: GgufHeader) -> Iterator[tuple[str, GgufTensor]]:
    """The tensors of a file under their names in Hugging Face format; those without one keep the name that they have.

    A tensor with the matrices of all experts of a layer gives one of each. Raises ModelError if it has another shape.
    """
    key, architecture = architecture_of(header)
    num_experts = header.get(f"{key}.expert_count", EXPERT_COUNT) or 0
    for tensor in header.tensors.values():
        match = LAYER.fullmatch(tensor.name)
        if match is None or match[2] not in architecture.experts:
            yield hugging_face_name(tensor.name, architecture), tensor
            continue
        name = f"model.layers.{match[1]}.{architecture.experts[match[2]]}.{match[3]}"
        for number, matrix in enumerate(_experts(tensor, num_experts)):
            yield name.format(number), matrix


def hugging_face_name(name: str, architecture: Architecture) -> str:
    """The tensor's name in Hugging Face format; the same name if no supported network has it."""
    if match := LAYER.fullmatch(name):
        module = architecture.modules.get(match[2]) or LAYER_MODULES.get(match[2])
        return name if module is None else f"model.layers.{match[1]}.{module}.{match[3]}"
    if (match := OTHER.fullmatch(name)) and match[1] in MODULES:
        return f"{MODULES[match[1]]}.{match[2]}"
    return name


def _experts(tensor: GgufTensor, num_experts: int) -> Iterator[GgufTensor]:
    """The matrix of each expert, of a tensor [experts, out, in]."""
    if len(tensor.shape) != 3 or tensor.shape[0] != num_experts:
        raise ModelError(
            f"{tensor.file}: tensor {tensor.name} has shape {list(tensor.shape)}; it should have a matrix for each of "
            f"{num_experts} experts."
        )
    single = replace(tensor, shape=tensor.shape[1:])
    for number in range(num_experts):
        yield replace(single, offset=tensor.offset + number * single.num_bytes)
