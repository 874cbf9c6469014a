"""Converts a checkpoint in Hugging Face format to GGUF. Arguments: checkpoint, file, and the type of the matrices.

Runs in llama.cpp's environment and needs numpy and gguf. The type of the checkpoint rounds nothing. Vectors become F32,
in which llama.cpp computes norms and biases. Only Qwen2, Qwen3, and Qwen3.5 where each value head has a key head of its
own: their rows have llama.cpp's order, while those of other families would have to be permuted.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.gguf_types import TYPES, quantize

ARCHITECTURES = {"qwen2": "qwen2", "qwen3": "qwen3", "qwen3_5_text": "qwen35"}  # by the config's model_type
NORMAL_TOKEN = 1
NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
RECURRENT_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.out_proj": "ssm_out",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
}


def gguf_name(name: str, architecture: str) -> str:
    """llama.cpp's name of the tensor `name`. Raises ValueError if there is none."""
    names = LAYER_NAMES | (RECURRENT_NAMES if architecture == "qwen35" else {})
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+?)(\.weight|\.bias|)", name)
    if match and match[2] in names:
        return f"blk.{match[1]}.{names[match[2]]}{match[3]}"
    if name not in NAMES:
        raise ValueError(f"tensor {name!r} has no name in GGUF")
    return NAMES[name]


def converted(name: str, values: Any, architecture: str) -> Any:
    """What llama.cpp's conversion makes of the fp32 values of a tensor that is no matrix."""
    import numpy as np

    if name.endswith("A_log"):
        return -np.exp(values)
    if architecture == "qwen35" and name.endswith("norm.weight") and ".linear_attn." not in name:
        return values + np.float32(1)  # the checkpoint has what is added to 1
    return values.reshape(len(values), -1) if values.ndim == 3 else values  # the weights of a convolution


def tensors(path: Path) -> Iterator[tuple[str, str, Any]]:
    """(name, type, values) of each tensor in a safetensors file: a header in JSON, then the bytes. BF16 as uint16."""
    import numpy as np

    with path.open("rb") as file:
        header_len = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(header_len))
    data = np.memmap(path, np.uint8, "r", offset=8 + header_len)
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in ("BF16", "F32"):
            raise ValueError(f"tensor {name!r} is {entry['dtype']}; only BF16 and F32 are written to GGUF")
        begin, end = entry["data_offsets"]
        kind = np.uint16 if entry["dtype"] == "BF16" else np.float32
        yield name, entry["dtype"], data[begin:end].view(kind).reshape(entry["shape"])


def widened(values: Any) -> Any:
    """fp32 of BF16 as uint16, or of fp32."""
    import numpy as np

    return values if values.dtype == np.float32 else (values.astype(np.uint32) << 16).view(np.float32)


def add_config(writer: Any, config: dict[str, Any]) -> None:
    """The network's sizes."""
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    rope = config.get("rope_parameters") or config
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if config["model_type"] == "qwen3_5_text":
        writer.add_rope_dimension_count(int(head_dim * rope["partial_rotary_factor"]))
        add_recurrent_config(writer, config)


def add_recurrent_config(writer: Any, config: dict[str, Any]) -> None:
    """The sizes of layers with the gated delta rule, and which they are. Raises ValueError for shared key heads."""
    heads = config["linear_num_value_heads"]
    key_heads = config["linear_num_key_heads"]
    if heads != key_heads:
        raise ValueError(f"linear_num_value_heads {heads} is not linear_num_key_heads {key_heads}: no GGUF is written")
    writer.add_rope_dimension_sections([11, 11, 10, 0])  # of images; text has the same position in all of them
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(key_heads)
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_inner_size(heads * config["linear_value_head_dim"])
    writer.add_uint32("qwen35.full_attention_interval", config["full_attention_interval"])


def add_vocabulary(writer: Any, tokenizer: dict[str, Any]) -> None:
    """The tokenizer's tokens. Prompts are token ids, so no merges are needed to read text."""
    vocab = tokenizer["model"]["vocab"]
    names = sorted(vocab, key=vocab.__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(names)
    writer.add_token_types([NORMAL_TOKEN] * len(names))
    writer.add_token_merges(["a b"])  # never applied; the list must not be empty
    writer.add_eos_token_id(0)


def write(checkpoint: Path, target: Path, kind: str) -> None:
    """Convert `checkpoint`, its matrices to the type `kind`. `target` only appears when it is complete."""
    import gguf
    import numpy as np

    config = json.loads((checkpoint / "config.json").read_text())
    architecture = ARCHITECTURES.get(config["model_type"])
    if architecture is None:
        raise ValueError(f"model_type {config['model_type']!r}: GGUF is written for {', '.join(ARCHITECTURES)} only")
    partial = target.with_suffix(".partial")
    writer = gguf.GGUFWriter(partial, architecture)
    add_config(writer, config)
    add_vocabulary(writer, json.loads((checkpoint / "tokenizer.json").read_text()))
    for name, stored, values in tensors(checkpoint / "model.safetensors"):
        own = gguf_name(name, architecture)
        if values.ndim != 2:
            writer.add_tensor(own, converted(name, widened(values), architecture))
            continue
        packed = values if kind == stored else quantize(widened(values), kind)
        writer.add_tensor(own, packed.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType[kind])
    finish(writer)
    partial.replace(target)


def finish(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    if sys.argv[3] not in TYPES:
        sys.exit(f"type {sys.argv[3]!r} is none of {', '.join(TYPES)}")
    write(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
