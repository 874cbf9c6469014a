"""From a GGUF file's metadata to the fields of a config.json, which are then checked like those of any config.json.

The names of llama.cpp's metadata: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np

from nanovllm.data.json_fields import TEXT, integer
from nanovllm.errors import MOST_QUOTED, ModelError, one_line, quoted
from nanovllm.formats.config_fields import NETWORK_FIELDS, ROPE_FIELDS
from nanovllm.formats.gguf.architectures import architecture_of
from nanovllm.formats.gguf.header import GgufHeader
from nanovllm.formats.gguf.tokenizer import end_token_ids

SIZES = {  # the key without the architecture, and the field of config.json
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "context_length": "max_position_embeddings",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
MLP_SIZE = "feed_forward_length"
EXPERT_SIZE = "expert_feed_forward_length"
ROTATED = "rope.dimension_count"
HEAD_KEYS = ("attention.head_count_kv", "attention.key_length", "attention.value_length", ROTATED)
ROPE_KEYS = {  # of two that mean the same, the later one counts
    "rope.scale_linear": "factor",
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}
UNSET_AT_ZERO = ("factor", "original_max_position_embeddings")  # 0 is as good as no key
ATTENTION_FACTORS = ("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor")  # the older name and the newer one
OTHER_KEYS = ("rope.freq_base", "rope.scaling.type", *ATTENTION_FACTORS)
WITHOUT_EFFECT = ("vocab_size", "rope.scaling.finetuned")
# Values with which a key that an architecture does not read is off.
OFF_VALUES: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        **dict.fromkeys(("expert_count", "expert_used_count", "expert_shared_count"), (0,)),
        **dict.fromkeys(("expert_feed_forward_length", "expert_shared_feed_forward_length"), (0,)),
        **dict.fromkeys(("experts_per_group", "leading_dense_block_count"), (0,)),
        **dict.fromkeys(("interleave_moe_layer_step", "moe_every_n_layers"), (0,)),
        **dict.fromkeys(("expert_group_count", "expert_group_used_count"), (0, 1)),
        "expert_weights_norm": (True,),
        "expert_weights_scale": (0, 1),
        "expert_gating_func": (0, 1),  # not said, softmax
        "nextn_predict_layers": (0,),
        "pooling_type": (0,),  # none: the file is for text, not for embeddings
        **dict.fromkeys(("attention.sliding_window", "attention.shared_kv_layers"), (0,)),
        **dict.fromkeys(("attention.q_lora_rank", "attention.kv_lora_rank"), (0,)),
        **dict.fromkeys(("attention.key_length_mla", "attention.value_length_mla"), (0,)),
        **dict.fromkeys(("attention.scale", "attention.output_scale"), (0,)),
        **dict.fromkeys(("attention.temperature_length", "attention.temperature_scale"), (0,)),
        **dict.fromkeys(("attention.max_alibi_bias", "attention.clamp_kqv"), (0,)),
        **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "router_logit_softcapping"), (0,)),
        **dict.fromkeys(("embedding_length_per_layer_input", "embedding_length_out"), (0,)),
        "attention.causal": (True,),
        "use_parallel_residual": (False,),
        **dict.fromkeys(("logit_scale", "embedding_scale", "residual_scale"), (0, 1)),
        "rope.scaling.yarn_ext_factor": (1,),
    }
)
SAMPLING = {  # of generation_config.json
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}
EMBEDDING = "token_embd.weight"
HEAD = "output.weight"
ROPE_FACTORS = "rope_freqs.weight"
DTYPES = {"F32": "float32", "F16": "float16"}  # of all other types: bfloat16


def config_fields(header: GgufHeader) -> dict[str, Any]:
    """The fields of config.json. Raises ModelError for an architecture or a feature that is not supported."""
    name, architecture = architecture_of(header)
    _refuse_unread(header, name, architecture.keys)
    whole = header
    header = replace(header, metadata={**header.metadata, **architecture.sizes(header)})
    tensors = header.tensors
    if EMBEDDING not in tensors:
        raise ModelError(f"{header.path} lacks the tensor {EMBEDDING}.")
    only_experts = {f"{name}.{EXPERT_SIZE}", f"{name}.{MLP_SIZE}"} & header.metadata.keys() == {f"{name}.{EXPERT_SIZE}"}
    sizes = {key: field for key, field in SIZES.items() if not (only_experts and key == MLP_SIZE)}
    fields = {field: header.need(f"{name}.{key}", NETWORK_FIELDS[field]) for key, field in sizes.items()}
    fields |= {
        "architectures": [architecture.name],
        "model_type": architecture.model_type,
        "vocab_size": tensors[EMBEDDING].shape[0],
        "tie_word_embeddings": HEAD not in tensors,
        "hidden_act": "silu",
        "dtype": _dtype(header),
        **_heads(header, name, fields, architecture.rotates_part),
        **_rope(header, name, fields["max_position_embeddings"]),
        **{field: f"blk.0.{tensor}" in tensors for field, tensor in architecture.biases.items()},
    }
    rotated = header.get(f"{name}.{ROTATED}", integer(1)) if architecture.rotates_part else None
    if rotated is not None:
        fields["rope_parameters"]["partial_rotary_factor"] = rotated / fields["head_dim"]
    architecture.adjust(whole, fields)
    if ends := end_token_ids(header):
        fields["eos_token_id"] = ends
    return fields


def generation_fields(header: GgufHeader) -> dict[str, Any]:
    """The fields of generation_config.json: how the file recommends to sample. Most files recommend nothing."""
    return {field: header.metadata[key] for key, field in SAMPLING.items() if key in header.metadata}


def rope_factors(header: GgufHeader) -> tuple[float, ...]:
    """What each RoPE frequency is divided by, as Llama 3.1 scales them; empty if the file says nothing."""
    tensor = header.tensors.get(ROPE_FACTORS)
    if tensor is None:
        return ()
    if tensor.type.name != "F32" or len(tensor.shape) != 1:
        raise ModelError(
            f"{header.path}: {ROPE_FACTORS} has shape {list(tensor.shape)} of {tensor.type.name}, not F32."
        )
    with tensor.file.open("rb") as file:
        file.seek(tensor.offset)
        values = np.frombuffer(file.read(tensor.num_bytes), "<f4")
    if len(values) != tensor.shape[0] or not (np.isfinite(values) & (values > 0)).all():
        raise ModelError(f"{header.path}: {ROPE_FACTORS} at byte {tensor.offset} must hold numbers above 0.")
    return tuple(map(float, values))


# ---- helpers


def _refuse_unread(header: GgufHeader, name: str, own_keys: Collection[str]) -> None:
    """Raise ModelError for a value of the network that is not read, since it may change what the model computes."""
    read = {*SIZES, *HEAD_KEYS, *ROPE_KEYS, *OTHER_KEYS, *WITHOUT_EFFECT, *own_keys}
    for key, value in header.metadata.items():
        short = key.removeprefix(f"{name}.")
        if short == key or short in read:
            continue
        values = value.tolist() if isinstance(value, np.ndarray) else [value]  # of a list, one for each layer
        if short not in OFF_VALUES or not all(layer_value in OFF_VALUES[short] for layer_value in values):
            shown = f"{one_line(key, MOST_QUOTED)}={quoted(value)}"
            raise ModelError(f"{header.path}: {shown} may change what the model computes, and it is not supported.")


def _heads(header: GgufHeader, name: str, fields: Mapping[str, Any], rotates_part: bool) -> dict[str, int]:
    """The number of KV heads, and the size of a head."""
    num_heads = int(fields["num_attention_heads"])
    num_kv_heads, key_size, value_size, rotated = (header.get(f"{name}.{key}", integer(1)) for key in HEAD_KEYS)
    default = fields["hidden_size"] // num_heads
    head_dim = key_size or default
    sizes = dict(zip(HEAD_KEYS[1:], (head_dim, value_size or default, rotated or head_dim), strict=True))
    for key, size in sizes.items():
        if size != head_dim and not (rotates_part and key == ROTATED):
            raise ModelError(
                f"{header.path}: {name}.{key}={size}: heads of {head_dim} numbers have another size than this; keys, "
                "values and the part that RoPE turns must be equal."
            )
    return {"num_key_value_heads": num_kv_heads or num_heads, "head_dim": head_dim}


def _rope(header: GgufHeader, name: str, positions: int) -> dict[str, Any]:
    theta = header.get(f"{name}.rope.freq_base", ROPE_FIELDS["rope_theta"])
    rope: dict[str, Any] = {"rope_theta": 10_000.0 if theta is None else theta}
    for key, field in ROPE_KEYS.items():
        is_off = field in UNSET_AT_ZERO and header.metadata.get(f"{name}.{key}") == 0
        value = None if is_off else header.get(f"{name}.{key}", ROPE_FIELDS[field])
        if value is not None:
            rope[field] = value
    kind = header.get(f"{name}.rope.scaling.type", TEXT)
    if kind is None:
        kind = "linear"
    if kind not in ("none", "linear", "yarn"):
        raise ModelError(
            f"{header.path}: {name}.rope.scaling.type={quoted(kind)} is not supported; supported: none, linear, yarn."
        )
    if kind == "none" or (kind == "linear" and rope.get("factor", 1) == 1):
        kind = "default"
        rope = {"rope_theta": rope["rope_theta"]}
    if kind != "default" and ROPE_FACTORS in header.tensors:
        raise ModelError(f"{header.path}: {ROPE_FACTORS} beside rope.scaling.type={quoted(kind)} is not supported.")
    given = [header.get(f"{name}.{key}", ROPE_FIELDS["attention_factor"]) for key in ATTENTION_FACTORS]
    factor = next((value for value in given if value is not None), 1)
    if kind == "yarn":
        rope.setdefault("original_max_position_embeddings", positions)
        if factor != 1 and rope.get("factor"):  # llama.cpp multiplies the paper's factor by this
            rope["attention_factor"] = factor * (0.1 * math.log(max(rope["factor"], 1)) + 1)
    elif factor != 1:
        raise ModelError(f"{header.path}: {name}.{ATTENTION_FACTORS[0]}={factor} is supported with yarn alone.")
    return {"rope_parameters": {"rope_type": kind, **rope}}


def _dtype(header: GgufHeader) -> str:
    """What the network computes in by default: the type of most matrices; bfloat16 if they are quantized."""
    matrices = [tensor for tensor in header.tensors.values() if len(tensor.shape) > 1]
    counts = Counter(tensor.type.name for tensor in matrices)
    return DTYPES.get(counts.most_common(1)[0][0] if counts else "F32", "bfloat16")
