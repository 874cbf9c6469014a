"""A small SmolLM2 as GGUF: Llama's network with 4-bit weights, a byte-level tokenizer and a chat template."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

LAYERS = 2
HIDDEN = 64
INTERMEDIATE = 96
HEADS = 4
KV_HEADS = 2
POSITIONS = 256
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
    from gguf_files import write_gguf  # imports the package gguf, which need not be there

    torch.manual_seed(0)
    model = LlamaForCausalLM(_config()).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight + 0.1 * torch.randn_like(weight) if weight.dim() == 1 else 5 * weight)
    changes = {"general.architecture": architecture, "llama.vocab_size": VOCAB}
    changes |= {"llama.rope.dimension_count": HIDDEN // HEADS, "tokenizer.ggml.add_space_prefix": False}
    changes |= {"tokenizer.ggml.unknown_token_id": 0, "tokenizer.ggml.padding_token_id": 2}
    kinds = {"token_embd.weight": "Q8_0"}
    write_gguf(path, model, lambda name: kinds.get(name, "Q4_1"), pre=pre, changes=changes)
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


def same_weights(stored: dict[str, Tensor], model: LlamaForCausalLM) -> bool:
    """Whether the stored tensors are those of `model`, to the bit; the head is tied and so not stored."""
    expected = {name: value for name, value in model.state_dict().items() if name != "lm_head.weight"}
    return stored.keys() == expected.keys() and all(torch.equal(stored[name], expected[name]) for name in expected)
