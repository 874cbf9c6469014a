"""A small SmolLM2 as GGUF: Llama's network with 4-bit weights, a byte-level tokenizer and a chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizer_files import byte_symbols
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

LAYERS, HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, POSITIONS = 2, 64, 96, 4, 2, 256
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = (" ", " "), ("t", "h"), (" ", "a")
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
VOCAB = len(SPECIAL) + 256 + len(MERGES)


def write_tiny_gguf(path: Path, *, architecture: str = "llama", pre: str = "smollm") -> LlamaForCausalLM:
    """Write the file; returns the network that its rounded weights are, in float32."""
    import gguf
    from gguf.quants import dequantize, quantize

    torch.manual_seed(0)
    model = LlamaForCausalLM(_config()).eval()
    writer = gguf.GGUFWriter(path, architecture)
    _add_facts(writer)
    _add_tokenizer(writer, pre)
    weights = model.state_dict()
    for name, stored in _stored_names().items():
        weight = weights[name]
        if weight.dim() == 1:
            weight += 0.1 * torch.randn_like(weight)
            writer.add_tensor(stored, weight.numpy())
            continue
        kind = gguf.GGMLQuantizationType.Q8_0 if stored == "token_embd.weight" else gguf.GGMLQuantizationType.Q4_1
        packed = quantize((5 * weight).numpy(), kind)
        weight.copy_(torch.from_numpy(dequantize(packed, kind)))
        writer.add_tensor(stored, _reorder(packed, stored), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=POSITIONS,
        rms_norm_eps=1e-5,
        rope_theta=100_000.0,
        tie_word_embeddings=True,
    )


def _stored_names() -> dict[str, str]:
    layers = {
        f"model.layers.{i}.{name}.weight": f"blk.{i}.{stored}.weight"
        for i in range(LAYERS)
        for name, stored in NAMES.items()
    }
    return {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight", **layers}


def _reorder(packed: Any, stored: str) -> Any:
    """GGUF has the two halves of a rotary pair in rows side by side, Hugging Face half a head apart."""
    heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(stored.split(".")[-2])
    if heads is None:
        return packed
    rows = packed.reshape(heads, 2, len(packed) // heads // 2, -1)
    return np.ascontiguousarray(rows.swapaxes(1, 2)).reshape(packed.shape)


def _add_facts(writer: Any) -> None:
    writer.add_context_length(POSITIONS)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_block_count(LAYERS)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(100_000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(VOCAB)


def _add_tokenizer(writer: Any, pre: str) -> None:
    import gguf

    symbols = byte_symbols()
    pairs = [tuple("".join(symbols[byte] for byte in part.encode()) for part in pair) for pair in MERGES]
    tokens = [*SPECIAL, *(symbols[byte] for byte in range(256)), *("".join(pair) for pair in pairs)]
    kinds = [gguf.TokenType.CONTROL if token in SPECIAL else gguf.TokenType.NORMAL for token in tokens]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in pairs])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_space_prefix(False)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)


def same_weights(stored: dict[str, Tensor], model: LlamaForCausalLM) -> bool:
    """Whether the stored tensors are those of `model`, to the bit; the head is tied and so not stored."""
    expected = {name: value for name, value in model.state_dict().items() if name != "lm_head.weight"}
    return stored.keys() == expected.keys() and all(torch.equal(stored[name], expected[name]) for name in expected)
