"""What the metadata of a Gemma 4 say besides those of other architectures: its layers differ in their sizes."""

from __future__ import annotations

from typing import Any

from nanovllm.data.json_fields import FLAG, integer, number
from nanovllm.errors import ModelError, quoted
from nanovllm.formats.config_fields import EXPERT_COUNT, MAX_HEAD_DIM, MAX_LAYERS, ROPE_FIELDS
from nanovllm.formats.gguf.header import GgufHeader

KEYS = (
    *("expert_count", "expert_used_count", "expert_feed_forward_length"),
    *("attention.sliding_window", "attention.sliding_window_pattern", "attention.shared_kv_layers"),
    *("attention.key_length_swa", "attention.value_length_swa", "rope.dimension_count_swa", "rope.freq_base_swa"),
    *("embedding_length_per_layer_input", "final_logit_softcapping"),
)
# Of all layers with a window, where a key without the suffix is of those with full attention.
_OF_WINDOWS = ("attention.key_length", "attention.value_length", "rope.dimension_count")
_LOGIT_CAP = 30.0  # llama.cpp's, where the file names none


def sizes_of_windows(header: GgufHeader) -> dict[str, Any]:
    """The metadata with the sizes of the layers that have a window and keys and values of their own."""
    sizes = {f"gemma4.{key}": header.need(f"gemma4.{key}_swa", integer(1, MAX_HEAD_DIM)) for key in _OF_WINDOWS}
    windows = _windows(header)
    for key in ("attention.head_count_kv", "feed_forward_length"):
        of_layers = header.each(f"gemma4.{key}", len(windows), integer(1))
        sizes[f"gemma4.{key}"] = of_layers[windows.index(True) if True in windows else 0]
    return sizes


def complete(header: GgufHeader, fields: dict[str, Any]) -> None:
    """Complete the fields of config.json, which so far have the sizes of layers with a window."""
    windows = _windows(header)
    full_head_dim = header.need("gemma4.attention.key_length", integer(1, MAX_HEAD_DIM))
    if windows[-1]:
        raise ModelError(f"{header.path}: gemma4.attention.sliding_window_pattern: the last layer must have no window.")
    kv_heads = header.each("gemma4.attention.head_count_kv", len(windows), integer(1))
    full = [index for index, has_window in enumerate(windows) if not has_window]
    for key in ("attention.value_length", "rope.dimension_count"):
        if header.need(f"gemma4.{key}", integer(1)) != full_head_dim:
            given = header.metadata[f"gemma4.{key}"]
            raise ModelError(f"{header.path}: gemma4.{key}={given} must be the size of a head, {full_head_dim}.")
    rope = fields["rope_parameters"]
    if rope["rope_type"] != "default":
        raise ModelError(f"{header.path}: gemma4.rope.scaling.type={quoted(rope['rope_type'])} is not supported.")
    local_theta = header.need("gemma4.rope.freq_base_swa", ROPE_FIELDS["rope_theta"])
    cap = header.get("gemma4.final_logit_softcapping", number(0))
    del fields["hidden_act"]
    fields |= {
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": ["sliding_attention" if has_window else "full_attention" for has_window in windows],
        "sliding_window": header.need("gemma4.attention.sliding_window", integer(1)),
        "per_layer_config": {
            str(index): {"head_dim": full_head_dim, "num_key_value_heads": kv_heads[index]} for index in full
        },
        "attention_k_eq_v": f"blk.{full[0]}.attn_v.weight" not in header.tensors,
        "final_logit_softcapping": _LOGIT_CAP if cap is None else cap or None,
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "rope_theta": rope["rope_theta"]},
            "sliding_attention": {"rope_type": "default", "rope_theta": local_theta},
        },
        **_shared_layers(header, len(windows)),
        **_own_inputs(header),
        **_experts(header),
    }


def rotated_pairs(factors: tuple[float, ...], head_dim: int) -> int:
    """How many pairs of a head RoPE turns in layers with full attention; large factors make the other angles 0."""
    rotated = factors.count(1.0)
    if len(factors) != head_dim // 2 or any(factor < 1e30 for factor in factors[rotated:]):
        raise ModelError(
            f"rope_freqs.weight must hold a factor for each of {head_dim // 2} pairs of a head, 1 for "
            f"the first ones and 1e30 for those that do not rotate, but it has {len(factors)}, {rotated} of them 1."
        )
    return rotated


def _windows(header: GgufHeader) -> list[bool]:
    """Whether each layer has a window."""
    count = header.need("gemma4.block_count", integer(1, MAX_LAYERS))
    return header.each("gemma4.attention.sliding_window_pattern", count, FLAG)


def _shared_layers(header: GgufHeader, count: int) -> dict[str, Any]:
    """The last layers, which have no keys and values of their own, and whose MLP may be twice as wide."""
    shared = header.get("gemma4.attention.shared_kv_layers", integer(0, count)) or 0
    widths = header.each("gemma4.feed_forward_length", count, integer(1))
    owners = set(widths[: count - shared])
    others = set(widths[count - shared :])
    is_double = bool(shared) and bool(owners) and others == {2 * max(owners)}
    if len(owners) != 1 or not (is_double or others <= owners):
        raise ModelError(
            f"{header.path}: gemma4.feed_forward_length={quoted(widths)}: layers must have one MLP size, or the last "
            f"{shared} layers twice that of the others."
        )
    return {"num_kv_shared_layers": shared, "use_double_wide_mlp": is_double}


def _own_inputs(header: GgufHeader) -> dict[str, Any]:
    size = header.get("gemma4.embedding_length_per_layer_input", integer(0)) or 0
    table = header.tensors.get("per_layer_token_embd.weight")
    fields = {"hidden_size_per_layer_input": size}
    if size and table is not None:
        fields["vocab_size_per_layer_input"] = table.shape[0]
    return fields


def _experts(header: GgufHeader) -> dict[str, Any]:
    count = header.get("gemma4.expert_count", EXPERT_COUNT)
    if not count:
        return {"enable_moe_block": False}
    return {
        "enable_moe_block": True,
        "num_experts": count,
        "top_k_experts": header.need("gemma4.expert_used_count", integer(1)),
        "moe_intermediate_size": header.need("gemma4.expert_feed_forward_length", integer(1)),
    }
