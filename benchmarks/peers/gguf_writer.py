"""Converts a checkpoint in Hugging Face format to GGUF. Arguments: checkpoint, file, and the type of the matrices.

Runs in llama.cpp's environment and needs numpy and gguf. BF16 rounds nothing. Vectors become F32, in which llama.cpp
computes norms and biases. Only Qwen2 and Qwen3: their rotary halves have llama.cpp's order, while the rows of other
families would have to be permuted.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.gguf_types import TYPES, quantize

ARCHITECTURES = ("qwen2", "qwen3")
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


def gguf_name(name: str) -> str:
    """llama.cpp's name of the tensor `name`. Raises ValueError if there is none."""
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)", name)
    if match and match[2] in LAYER_NAMES:
        return f"blk.{match[1]}.{LAYER_NAMES[match[2]]}.{match[3]}"
    if name not in NAMES:
        raise ValueError(f"tensor {name!r} has no name in GGUF")
    return NAMES[name]


def tensors(path: Path) -> Iterator[tuple[str, list[int], Any]]:
    """(name, shape, BF16 values as uint16) of each tensor in a safetensors file: a header in JSON, then the bytes."""
    import numpy as np

    with path.open("rb") as file:
        header_len = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(header_len))
    data = np.memmap(path, np.uint8, "r", offset=8 + header_len)
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] != "BF16":
            raise ValueError(f"tensor {name!r} is {entry['dtype']}; only BF16 is written to GGUF")
        begin, end = entry["data_offsets"]
        yield name, entry["shape"], data[begin:end].view(np.uint16).reshape(entry["shape"])


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
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])


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


def write(checkpoint: Path, target: Path, kind: str = "BF16") -> None:
    """Convert `checkpoint`, its matrices to the type `kind`. `target` only appears when it is complete."""
    import gguf
    import numpy as np

    config = json.loads((checkpoint / "config.json").read_text())
    if config["model_type"] not in ARCHITECTURES:
        raise ValueError(f"model_type {config['model_type']!r}: GGUF is written for {' and '.join(ARCHITECTURES)} only")
    partial = target.with_suffix(".partial")
    writer = gguf.GGUFWriter(partial, config["model_type"])
    add_config(writer, config)
    add_vocabulary(writer, json.loads((checkpoint / "tokenizer.json").read_text()))
    for name, shape, values in tensors(checkpoint / "model.safetensors"):
        if len(shape) == 1:
            writer.add_tensor(gguf_name(name), (values.astype(np.uint32) << 16).view(np.float32))
            continue
        packed = values.view(np.uint8)
        if kind != "BF16":
            packed = quantize((values.astype(np.uint32) << 16).view(np.float32), kind).view(np.uint8)
        writer.add_tensor(gguf_name(name), packed, raw_dtype=gguf.GGMLQuantizationType[kind])
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
