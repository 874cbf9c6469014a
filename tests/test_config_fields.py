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

# Of config.json of public checkpoints the fields that today's Transformers does not write, or writes in another form.
MROPE = {"mrope_interleaved": True, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.25}
LLAMA_3_ROPE = {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "rope_type": "llama3"}
PUBLIC: dict[str, dict[str, Any]] = {
    "llama": {  # Llama 2 and 3.2, SmolLM2
        "_name_or_path": "x",
        "is_llama_config": True,
        "max_length": 4096,
        "pretraining_tp": 1,
        "rope_interleaved": False,
        "rope_scaling": LLAMA_3_ROPE | {"original_max_position_embeddings": 64},
        "rope_theta": 500000.0,
        "torch_dtype": "bfloat16",
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}},
    },
    "qwen2": {"max_window_layers": 21, "rope_theta": 1e6, "sliding_window": 131072, "use_mrope": False},
    "qwen3": {"max_window_layers": 28, "rope_scaling": None, "rope_theta": 1e6, "sliding_window": None},
    "glm4_moe": {  # GLM-4.5-Air
        "head_dim": 128,
        "num_nextn_predict_layers": 1,
        "partial_rotary_factor": 0.5,
        "rope_scaling": None,
        "rope_theta": 1000000,
    },
    "minimax_m2": {
        "attn_type_list": [1, 1],
        "dtype": None,
        "auto_map": {"AutoConfig": "configuration_minimax_m2.MiniMaxM2Config"},
        "model_type": "minimax",
        "mtp_transformer_layers": 1,
        "num_mtp_modules": 3,
        "qk_norm_type": "per_layer",
        "rope_theta": 5000000,
        "rotary_dim": 64,
        "scoring_func": "sigmoid",
        "shared_intermediate_size": 0,
        "use_mtp": True,
        "use_qk_norm": True,
        "use_routing_bias": True,
    },
    "olmo3": {
        "rope_scaling": {**YARN, "attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0},
        "rope_theta": 500000,
    },
    "gemma3": {
        "cache_implementation": "hybrid",
        "rope_local_base_freq": 10000,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window_pattern": 6,
    },
    "qwen3_moe": {  # Qwen3-Coder
        "output_router_logits": False,
        "qkv_bias": False,
        "rope_theta": 1e6,
        "shared_expert_intermediate_size": 0,
        "use_qk_norm": True,
    },
    "qwen3_next": {
        "full_attention_interval": 4,
        "partial_rotary_factor": 0.25,
        "rope_scaling": None,
        "rope_theta": 10000000,
    },
    "qwen3_5": {  # and 3.6
        "attn_output_gate": True,
        "full_attention_interval": 4,
        "mamba_ssm_dtype": "float32",
        "mlp_only_layers": [],
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "output_gate_type": "swish",
        "partial_rotary_factor": 0.25,
        "rope_parameters": {**MROPE, "rope_theta": 10000000, "rope_type": "default"},
    },
}
WHOLE = {  # Qwen3.5, for text and images
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "image_token_id": 197,
    "language_model_only": False,
    "model_type": "qwen3_5",
    "tie_word_embeddings": False,
    "transformers_version": "4.57.0.dev0",
    "vision_config": {"deepstack_visual_indexes": [], "depth": 27, "model_type": "qwen3_5"},
    "vision_end_token_id": 196,
}


SIZES = {"glm4_moe": {"head_dim": 128}}  # the default ones have no whole size of a head


def write_config(path: Path, config: dict[str, Any]) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    return path


def default_config(family: str, **changes: Any) -> dict[str, Any]:
    """All fields of Transformers' default config of a family, with changes; the older form of RoPE replaces the new."""
    config_class, model_class, _ = TINY[family]
    config = config_class(architectures=[model_class.__name__], **SIZES.get(family, {})).to_dict() | {
        "dtype": "float16"
    }
    if "rope_theta" in changes:
        del config["rope_parameters"]
    return {**config, **changes}


def test_configs_of_public_checkpoints_are_read(tmp_path: Path) -> None:
    for family, fields in PUBLIC.items():
        spec = load_decoder_spec(write_config(tmp_path, default_config(family, **fields)))
        assert spec.dtype == ("bfloat16" if family == "minimax_m2" else "float16"), family
        assert spec.rope.theta in (1e6, 5e6, 1e7, 5e5), family
    whole = {**WHOLE, "text_config": default_config("qwen3_5", **PUBLIC["qwen3_5"])}
    text = load_decoder_spec(write_config(tmp_path, whole["text_config"]))
    assert load_decoder_spec(write_config(tmp_path, whole)) == text


@pytest.mark.parametrize("family", TINY)
def test_what_transformers_itself_writes_is_read(family: str, tmp_path: Path) -> None:
    everything = default_config(family)
    assert load_decoder_spec(write_config(tmp_path, everything)).dtype == "float16"
    TINY[family].config(architectures=everything["architectures"], **SIZES.get(family, {})).save_pretrained(tmp_path)
    assert load_decoder_spec(tmp_path).num_layers == everything["num_hidden_layers"]


WITH_EFFECT = [
    ("llama", {"embedding_multiplier": 12.0}),
    ("llama", {"no_rope_layers": [1, 0]}),
    ("llama", {"a_field_of_tomorrow": 1}),
    ("mistral", {"attention_bias": True}),
    ("qwen2", {"dual_chunk_attention_config": {"chunk_size": 262144}}),
    ("qwen3", {"mlp_bias": True}),
    ("gemma3", {"attn_logit_softcapping": 50.0}),
]
ONLY = [("qwen3_moe", {"use_qk_norm": False}), ("qwen3_5", {"output_gate_type": "sigmoid"})]


def test_a_field_that_the_family_does_not_read_is_refused_by_name(tmp_path: Path) -> None:
    for family, field in WITH_EFFECT:
        config = default_config(family)
        ((name, value),) = field.items()
        write_config(tmp_path, {**config, **field})
        message = refusal(lambda: load_decoder_spec(tmp_path))
        assert f"{name!r}: {value!r}" in message and config["architectures"][0] in message and "\n" not in message
        assert f"hf_overrides={{{name!r}: None}}" in message
        spec = load_decoder_spec(tmp_path, {name: None})
        assert spec == load_decoder_spec(write_config(tmp_path, config))


def test_another_value_of_a_field_that_describes_the_family_is_refused(tmp_path: Path) -> None:
    for family, changes in ONLY:
        write_config(tmp_path, default_config(family, **changes))
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
    model = tmp_path / "model"
    other = write_config(tmp_path / "other", {})
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
    model = tmp_path / "model"
    other = tmp_path / "other"
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
