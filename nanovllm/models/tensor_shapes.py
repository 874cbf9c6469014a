"""The tensors of a checkpoint and their shapes, in whole numbers: known before anything is allocated."""

from __future__ import annotations

from collections.abc import Iterator

from nanovllm.models.spec import DecoderSpec

EMBEDDING, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"

NamedShapes = Iterator[tuple[str, tuple[int, ...]]]


def tensor_shapes(spec: DecoderSpec) -> NamedShapes:
    """Every tensor by name, as `Decoder.slots` places them; the output projection only where it is not tied."""
    yield EMBEDDING, (spec.vocab_size, spec.hidden_size)
    if not spec.tie_word_embeddings:
        yield LM_HEAD, (spec.vocab_size, spec.hidden_size)
    for index in range(spec.num_layers):
        yield from _layer_shapes(spec, f"model.layers.{index}.")
    yield "model.norm.weight", (spec.hidden_size,)


def _layer_shapes(spec: DecoderSpec, prefix: str) -> NamedShapes:
    hidden, inner = spec.hidden_size, spec.intermediate_size
    yield f"{prefix}input_layernorm.weight", (hidden,)
    yield f"{prefix}post_attention_layernorm.weight", (hidden,)
    for name, rows, columns, bias in (
        ("self_attn.q_proj", spec.q_size, hidden, spec.qkv_bias),
        ("self_attn.k_proj", spec.kv_size, hidden, spec.qkv_bias),
        ("self_attn.v_proj", spec.kv_size, hidden, spec.qkv_bias),
        ("self_attn.o_proj", hidden, spec.q_size, spec.o_bias),
        ("mlp.gate_proj", inner, hidden, spec.mlp_bias),
        ("mlp.up_proj", inner, hidden, spec.mlp_bias),
        ("mlp.down_proj", hidden, inner, spec.mlp_bias),
    ):
        yield f"{prefix}{name}.weight", (rows, columns)
        if bias:
            yield f"{prefix}{name}.bias", (rows,)
    if spec.qk_norm:
        yield f"{prefix}self_attn.q_norm.weight", (spec.head_dim,)
        yield f"{prefix}self_attn.k_norm.weight", (spec.head_dim,)
