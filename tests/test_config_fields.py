"""Which fields of config.json a family reads, which have no effect, and that all others are refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoints import FAMILIES as TINY
from checkpoints import edit_config, make_checkpoint, refusal
from engines import greedy, token_ids
from tokenizer_files import write_byte_level

from nanovllm import LLM
from nanovllm.errors import ConfigError
from nanovllm.formats.config_fields import FIELDS_WITHOUT_EFFECT, NETWORK_FIELDS, OFF_VALUES, READ_BY_ALL
from nanovllm.models.families import FAMILIES
from nanovllm.models.hf_config import ModelConfig, load_decoder_spec, read_decoder_spec

SMALL = {"kvcache_block_size": 16, "num_gpu_blocks": 40}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}

# Fields of config.json as public checkpoints have them, with small sizes.
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "bfloat16", "transformers_version": "4.43.0"}
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 199,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "use_cache": True,
    "tie_word_embeddings": False,
}
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **SIZES, **TOKENS, "pretraining_tp": 1}
LLAMA_3 = {**LLAMA, "attention_bias": False, "attention_dropout": 0.0, "mlp_bias": False, "rope_theta": 500000.0}
MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", **SIZES, **TOKENS, "rope_theta": 1e6}
QWEN = {**SIZES, **TOKENS, "attention_dropout": 0.0, "rope_theta": 1e6, "use_sliding_window": False}
QWEN_2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", **QWEN, "max_window_layers": 21}
QWEN_3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", **QWEN, "max_window_layers": 28}
LLAMA_3_ROPE = {
    "factor": 32.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 64,
    "rope_type": "llama3",
}
GEMMA_3 = {  # tied, and 5 of 6 layers with a window, without saying so
    **{name: value for name, value in {**SIZES, **TOKENS}.items() if name not in ("hidden_act", "tie_word_embeddings")},
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "cache_implementation": "hybrid",
    "eos_token_id": [1, 106],
    "final_logit_softcapping": None,
    "head_dim": 32,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 32,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 64,
}
GLM_4 = {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    **SIZES,
    **TOKENS,
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": [5, 6, 7],
    "first_k_dense_replace": 1,
    "head_dim": 32,
    "moe_intermediate_size": 48,
    "n_group": 1,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 8,
    "num_nextn_predict_layers": 1,
    "pad_token_id": 5,
    "partial_rotary_factor": 0.5,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "routed_scaling_factor": 1.0,
    "topk_group": 1,
    "use_qk_norm": False,
}
MINIMAX_M2 = {  # without a dtype
    "architectures": ["MiniMaxM2ForCausalLM"],
    "model_type": "minimax_m2",
    **SIZES,
    "attn_type_list": [1, 1],
    "auto_map": {"AutoConfig": "configuration_minimax_m2.MiniMaxM2Config"},
    "head_dim": 32,
    "mtp_transformer_layers": 1,
    "num_experts_per_tok": 8,
    "num_local_experts": 16,
    "num_mtp_modules": 3,
    "qk_norm_type": "per_layer",
    "rope_theta": 5000000,
    "rotary_dim": 16,
    "scoring_func": "sigmoid",
    "shared_intermediate_size": 0,
    "use_mtp": True,
    "use_qk_norm": True,
    "use_routing_bias": True,
}
OLMO_3 = {
    "architectures": ["Olmo3ForCausalLM"],
    "model_type": "olmo3",
    **SIZES,
    **TOKENS,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_scaling": {
        "attention_factor": 1.2079441541679836,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 8.0,
        "original_max_position_embeddings": 32,
        "rope_type": "yarn",
    },
    "rope_theta": 500000,
    "sliding_window": 64,
}
LINEAR = {
    "attn_output_gate": True,
    "full_attention_interval": 4,
    "head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 16,
}
MROPE = {"mrope_interleaved": True, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.25}
QWEN_3_5 = {
    **{name: value for name, value in {**SIZES, **TOKENS}.items() if name != "torch_dtype"},
    **LINEAR,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "dtype": "bfloat16",
    "layer_types": ["linear_attention", "full_attention"],
    "mamba_ssm_dtype": "float32",
    "mlp_only_layers": [],
    "model_type": "qwen3_5_text",
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "rope_parameters": {**MROPE, "rope_theta": 10000000, "rope_type": "default"},
}
QWEN_3_6 = {
    **{name: value for name, value in QWEN_3_5.items() if name != "mlp_only_layers"},
    "output_gate_type": "swish",
    "partial_rotary_factor": 0.25,
}
QWEN_3_CODER = {
    **QWEN,
    "architectures": ["Qwen3MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "head_dim": 32,
    "max_window_layers": 28,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "output_router_logits": False,
    "qkv_bias": False,
    "router_aux_loss_coef": 0.0,
    "shared_expert_intermediate_size": 0,
    "sliding_window": None,
    "use_qk_norm": True,
}
QWEN_3_NEXT = {
    **QWEN,
    **{name: value for name, value in LINEAR.items() if name != "attn_output_gate"},
    "architectures": ["Qwen3NextForCausalLM"],
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "model_type": "qwen3_next",
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "output_router_logits": False,
    "partial_rotary_factor": 0.25,
    "rope_scaling": None,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 32,
}
PUBLIC: dict[str, dict[str, Any]] = {
    "Llama 2": {**LLAMA, "_name_or_path": "x", "pad_token_id": 0, "rope_scaling": None, "max_length": 4096},
    "Llama 3.2": {**LLAMA_3, "head_dim": 16, "rope_scaling": LLAMA_3_ROPE, "eos_token_id": [5, 6, 7]},
    "SmolLM2": {
        **LLAMA_3,
        "is_llama_config": True,
        "rope_interleaved": False,
        "rope_scaling": None,
        "pad_token_id": 2,
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}},
    },
    "Mistral v0.1": {**MISTRAL, "sliding_window": 64},
    "Qwen2.5": {**QWEN_2, "sliding_window": 131072, "use_mrope": False},
    "GLM-4.5-Air": GLM_4,
    "MiniMax-M2": {**MINIMAX_M2, "model_type": "minimax", "bos_token_id": None, "eos_token_id": None},
    "MiniMax-M2.5": MINIMAX_M2,
    "Olmo 3": OLMO_3,
    "Gemma 3 1B": {**GEMMA_3, "sliding_window_pattern": 6},
    "Qwen3-Coder": QWEN_3_CODER,
    "Qwen3-Next": QWEN_3_NEXT,
    "Qwen3.5, the text model": {**QWEN_3_5, "architectures": ["Qwen3_5ForCausalLM"]},
    "Qwen3.5": {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "image_token_id": 197,
        "model_type": "qwen3_5",
        "text_config": QWEN_3_5,
        "tie_word_embeddings": False,
        "transformers_version": "4.57.0.dev0",
        "video_token_id": 198,
        "vision_config": {"deepstack_visual_indexes": [], "depth": 27, "model_type": "qwen3_5"},
        "vision_end_token_id": 196,
        "vision_start_token_id": 195,
    },
    "Qwen3.6": {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "language_model_only": False,
        "model_type": "qwen3_5",
        "text_config": QWEN_3_6,
        "tie_word_embeddings": False,
    },
    "Qwen3": {**QWEN_3, "attention_bias": False, "head_dim": 32, "rope_scaling": None, "sliding_window": None},
}


def write_config(path: Path, config: dict[str, Any]) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_configs_of_public_checkpoints_are_read(tmp_path: Path) -> None:
    for name, config in PUBLIC.items():
        spec = load_decoder_spec(write_config(tmp_path, config))
        assert (spec.num_layers, spec.vocab_size, spec.dtype) == (2, 199, "bfloat16"), name


@pytest.mark.parametrize("family", TINY)
def test_what_transformers_itself_writes_is_read(family: str, tmp_path: Path) -> None:
    config_class, model_class, _ = TINY[family]
    sizes = {"head_dim": 128} if family == "glm4_moe" else {}  # the default sizes have no whole one
    config_class(architectures=[model_class.__name__], **sizes).save_pretrained(tmp_path)
    everything = {**config_class(**sizes).to_dict(), "architectures": [model_class.__name__], "dtype": "float16"}
    assert load_decoder_spec(tmp_path).num_layers == config_class().num_hidden_layers
    assert load_decoder_spec(write_config(tmp_path, everything)).dtype == "float16"


WITH_EFFECT = [
    ("LlamaForCausalLM", {"embedding_multiplier": 12.0}),
    ("LlamaForCausalLM", {"no_rope_layers": [1, 0]}),
    ("LlamaForCausalLM", {"a_field_of_tomorrow": 1}),
    ("MistralForCausalLM", {"attention_bias": True}),
    ("Qwen2ForCausalLM", {"dual_chunk_attention_config": {"chunk_size": 262144}}),
    ("Qwen3ForCausalLM", {"mlp_bias": True}),
    ("Gemma3ForCausalLM", {"attn_logit_softcapping": 50.0}),
]
ONLY = [
    ("Qwen3-Coder", {"use_qk_norm": False}),
    ("Qwen3.5, the text model", {"output_gate_type": "sigmoid"}),
]


def test_a_field_that_the_family_does_not_read_is_refused_by_name(tmp_path: Path) -> None:
    for architecture, field in WITH_EFFECT:
        config = next(config for config in PUBLIC.values() if config["architectures"] == [architecture])
        ((name, value),) = field.items()
        write_config(tmp_path, {**config, **field})
        message = refusal(lambda: load_decoder_spec(tmp_path))
        assert f"{name!r}: {value!r}" in message and architecture in message and "\n" not in message
        assert f"hf_overrides={{{name!r}: None}}" in message
        spec = load_decoder_spec(tmp_path, {name: None})
        assert spec == load_decoder_spec(write_config(tmp_path, config))


def test_another_value_of_a_field_that_describes_the_family_is_refused(tmp_path: Path) -> None:
    for name, changes in ONLY:
        write_config(tmp_path, {**PUBLIC[name], **changes})
        ((field, value),) = changes.items()
        assert f"{field}={value!r}: must be" in refusal(lambda: load_decoder_spec(tmp_path))


def test_the_lists_name_each_field_once() -> None:
    for family in FAMILIES.values():
        typed = NETWORK_FIELDS.keys() | family.own_fields.keys() | READ_BY_ALL
        assert family.defaults.keys() <= typed, "every field that is read has a type and a range"
        assert not FIELDS_WITHOUT_EFFECT & (family.own_fields.keys() | READ_BY_ALL | family.defaults.keys())
    assert not FIELDS_WITHOUT_EFFECT & OFF_VALUES.keys()


# ---- hf_overrides and generation_config


def test_overrides_replace_fields_and_extend_the_context(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3")
    assert load_decoder_spec(tmp_path).max_model_len == 256
    spec = load_decoder_spec(tmp_path, {"rope_parameters": {"rope_theta": 1e6, **YARN}})
    assert (spec.max_model_len, spec.rope.kind, spec.rope.theta) == (1024, "yarn", 1e6)
    assert load_decoder_spec(tmp_path, {"rms_norm_eps": 1e-3}).rms_norm_eps == 1e-3
    assert read_decoder_spec(tmp_path / "config.json", {"rms_norm_eps": 1e-3}).rms_norm_eps == 1e-3
    assert ModelConfig(tmp_path, {"eos_token_id": [3, 4]}).eos_token_ids() == (3, 4)


def test_generation_config_says_where_the_defaults_come_from(tmp_path: Path) -> None:
    model, other = tmp_path / "model", write_config(tmp_path / "other", {})
    make_checkpoint(model, vocab=300, eos_token_id=9)
    write_byte_level(model)
    edit_config(model, "generation_config.json", temperature=0.6, top_k=20)
    (other / "generation_config.json").write_text(json.dumps({"temperature": 0.1, "eos_token_id": 7}))
    own, none, others = (ModelConfig(model, {}, source) for source in ("auto", "vllm", str(other)))
    assert own.sampling_defaults() == {"temperature": 0.6, "top_k": 20}
    assert none.sampling_defaults() == {}
    assert others.sampling_defaults() == {"temperature": 0.1}
    assert own.sampling_defaults({"top_k": 5, "max_new_tokens": 4})["top_k"] == 5
    assert none.eos_token_ids() == (9,) and others.eos_token_ids() == (9, 7)
    for overrides, says in (({"top_p": 2}, "top_p=2"), ({"topk": 5}, "did you mean 'top_k'")):
        assert says in refusal(lambda given=overrides: own.sampling_defaults(given), ConfigError)
    arguments = {"generation_config": str(other), "override_generation_config": {"max_new_tokens": 3}}
    with LLM(model, **arguments, **SMALL) as llm:
        params = llm.get_default_sampling_params()
        assert (params.temperature, params.top_k, params.max_tokens) == (0.1, 0, 3)


def test_another_tokenizer_or_none(tmp_path: Path) -> None:
    model, other = tmp_path / "model", tmp_path / "other"
    make_checkpoint(model, vocab=300)
    other.mkdir()
    assert "holds no tokenizer files" in refusal(lambda: LLM(model, tokenizer=str(other), **SMALL), ConfigError)
    write_byte_level(other)
    with LLM(model, tokenizer=other, **SMALL) as llm:
        expected = token_ids(llm, "text", greedy(4))
        ids = llm.get_tokenizer().encode("text")
    write_byte_level(model)
    with LLM(model, skip_tokenizer_init=True, **SMALL) as llm:
        (output,) = llm.generate(ids, greedy(4), use_tqdm=False)
        assert [output.outputs[0].token_ids] == expected and output.outputs[0].text == ""
        with pytest.raises(ValueError, match="skip_tokenizer_init"):
            llm.generate("text", use_tqdm=False)
