"""Which fields of Transformers' config classes a family reads, which have no effect, and which values are refused."""

from __future__ import annotations

import dataclasses
import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoints import FAMILIES as TINY
from checkpoints import edit_config, make_checkpoint, refusal
from engines import greedy, token_ids
from tokenizer_files import write_byte_level
from transformers import CONFIG_MAPPING

from nanovllm import LLM
from nanovllm.errors import ConfigError, ModelError
from nanovllm.layers.causal_lm import CausalLM
from nanovllm.models.hf_config import ModelConfig, load_network_config, read_network_config
from nanovllm.models.network_config import NetworkConfig
from nanovllm.models.registry import ARCHITECTURES

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
    "olmo2": {"rope_scaling": None, "rope_theta": 500000},
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
        config = load_network_config(write_config(tmp_path, default_config(family, **fields)))
        assert config.dtype == ("bfloat16" if family == "minimax_m2" else "float16"), family
        assert any(rope.theta in (1e6, 5e6, 1e7, 5e5) for rope in config.network.ropes), family
    whole = {**WHOLE, "text_config": default_config("qwen3_5", **PUBLIC["qwen3_5"])}
    text = load_network_config(write_config(tmp_path, whole["text_config"]))
    assert load_network_config(write_config(tmp_path, whole)).network == text.network


@pytest.mark.parametrize("family", TINY)
def test_what_transformers_itself_writes_is_read(family: str, tmp_path: Path) -> None:
    everything = default_config(family)
    assert load_network_config(write_config(tmp_path, everything)).dtype == "float16"
    TINY[family].config(architectures=everything["architectures"], **SIZES.get(family, {})).save_pretrained(tmp_path)
    config = load_network_config(tmp_path)
    assert config.network.num_layers == everything["num_hidden_layers"]
    assert b"transformers.models" not in pickle.dumps(config), "ranks do not import Transformers' classes"


# Fields of Transformers' config classes that change no logits of a causal model: tokens, training, how it is run.
WITHOUT_EFFECT = {
    *("bos_token_id", "pad_token_id", "eos_token_id", "use_cache", "pretraining_tp", "initializer_range"),
    *("attention_dropout", "residual_dropout", "resid_pdrop", "embd_pdrop"),
    *("output_router_logits", "router_aux_loss_coef", "router_jitter_noise"),
    # of all models: what is returned, how a checkpoint is stored, classification
    *("architectures", "chunk_size_feed_forward", "dtype", "id2label", "is_encoder_decoder", "label2id"),
    *("output_hidden_states", "problem_type", "return_dict", "transformers_version"),
    # what Transformers makes other fields of, which are read: windows by layer
    *("use_sliding_window", "max_window_layers", "original_max_position_embeddings"),
}


# "minimax" is a type of published configs, whose class in Transformers is that of an earlier model.
TYPES = [(model, name) for model in ARCHITECTURES.values() for name in model.model_types if name != "minimax"]
SMALL_SIZES = {"num_key_value_heads": 2, "num_experts_per_tok": 2, "top_k_experts": 2, "enable_moe_block": True}
SMALL_SIZES |= {"num_experts": 8, "moe_intermediate_size": 64, "mlp_only_layers": [0]}  # a layer of each kind


@pytest.mark.parametrize(("model", "model_type"), TYPES, ids=[name for _, name in TYPES])
def test_every_field_of_a_config_class_is_read_or_without_effect(
    model: type[CausalLM], model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A field that a new version of Transformers adds is neither until somebody has looked at it."""
    config_class = CONFIG_MAPPING[model_type]
    names = {field.name for field in dataclasses.fields(config_class)}
    sizes = {name: value for name, value in SMALL_SIZES.items() if name in names}
    config = config_class(**sizes, **SIZES.get(model.model_types[0], {}))
    config.allow_global_per_layer_attribute_access = True
    read: set[str] = set()
    get = config_class.__getattribute__

    def recording(self: Any, name: str) -> Any:
        read.add(config_class.attribute_map.get(name, name))
        return get(self, name)

    monkeypatch.setattr(config_class, "__getattribute__", recording)
    NetworkConfig(model.__name__, config, "float32").on_meta()
    assert {config_class.attribute_map.get(name, name) for name in names} - WITHOUT_EFFECT <= read


def test_values_that_are_not_computed_are_refused_by_name(tmp_path: Path) -> None:
    for architecture, model in ARCHITECTURES.items():
        tested = next(name for name, tiny in TINY.items() if tiny.model.__name__ == architecture)
        for field in model.computed:
            value = {"hidden_act": "gelu_pytorch_tanh", "use_bidirectional_attention": "all"}.get(field, 50.0)
            value = True if (tested, field) == ("gemma3", "use_bidirectional_attention") else value
            write_config(tmp_path, default_config(tested, **{field: value}))
            message = refusal(lambda: load_network_config(tmp_path))
            assert f"{field}={value!r}" in message and architecture in message and "\n" not in message


def test_fields_of_other_tools_change_nothing(tmp_path: Path) -> None:
    """As in Transformers; names of its attributes and methods too, which a file must not replace."""
    config = default_config("llama")
    plain = load_network_config(write_config(tmp_path, config)).network
    others = {
        "a_field_of_tomorrow": 1,
        "sliding_window": 4,  # of other families
        "hidden_activation": "gelu",
        "num_labels": 10**12,
        "output_attentions": True,
        "attribute_map": {"vocab_size": "__class__"},
        "get_text_config": 5,
        "_heterogeneity_spec": {},
        "auto_map": {"AutoConfig": "configuration.Config"},
    }
    assert load_network_config(write_config(tmp_path, {**config, **others})).network == plain


def test_code_of_a_model_directory_is_never_run(tmp_path: Path) -> None:
    auto_map = {"AutoConfig": "configuration.Config", "AutoModelForCausalLM": "modeling.Model"}
    write_config(tmp_path, default_config("minimax_m2", auto_map=auto_map))
    for name in ("configuration", "modeling"):
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit({name!r})")
    assert load_network_config(tmp_path).architecture == "MiniMaxM2ForCausalLM"


# ---- hf_overrides and generation_config


def test_overrides_replace_fields_and_extend_the_context(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3")
    assert load_network_config(tmp_path).network.max_model_len == 256
    network = load_network_config(tmp_path, {"rope_parameters": {"rope_theta": 1e6, **YARN}}).network
    (rope,) = network.ropes
    assert (network.max_model_len, rope.kind, rope.theta) == (1024, "yarn", 1e6)
    assert load_network_config(tmp_path, {"rms_norm_eps": 1e-3}).on_meta().norm.eps == 1e-3
    assert read_network_config(tmp_path / "config.json", {"rms_norm_eps": 1e-3}).on_meta().norm.eps == 1e-3
    assert ModelConfig(tmp_path, {"eos_token_id": [3, 4]}).eos_token_ids() == (3, 4)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ({"max_positions": 64}, "unknown field 'max_positions'"),
        ({"rms_norm_epsilon": 1e-3}, "did you mean 'rms_norm_eps'?"),
        ({"trust_remote_code": True}, "a qwen3 has none of that name, see Transformers' Qwen3Config"),
        ({"text_config": {"rms_norm_eps": 1e-3}}, "unknown field 'text_config'"),
    ],
)
def test_an_override_that_nothing_reads_is_refused(tmp_path: Path, overrides: dict[str, Any], says: str) -> None:
    make_checkpoint(tmp_path, "qwen3")
    assert says in refusal(lambda: load_network_config(tmp_path, overrides), ModelError)


def test_overrides_of_a_larger_model_are_of_its_text_model(tmp_path: Path) -> None:
    text = default_config("mistral") | {"model_type": "mistral"}
    whole = {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", "text_config": text}
    write_config(tmp_path, whole)
    for overrides in ({"rms_norm_eps": 1e-3}, {"text_config": {"rms_norm_eps": 1e-3}}):
        assert load_network_config(tmp_path, overrides).on_meta().norm.eps == 1e-3
    for overrides in ({"text_config": {"rms_norm": 1e-3}}, {"text_config": 3}, {"vision": 3}):
        refusal(lambda given=overrides: load_network_config(tmp_path, given), ModelError)


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_a_theta_of_the_older_form_replaces_that_of_the_newer_one(tmp_path: Path, family: str) -> None:
    make_checkpoint(tmp_path, family)
    fields = json.loads((tmp_path / "config.json").read_text())
    network = load_network_config(tmp_path).network
    changed = load_network_config(tmp_path, {"rope_theta": 123.0}).network
    thetas = {rope.theta: rope for rope in network.ropes}
    replaced = thetas[10_000.0]  # of all layers, or of those with full attention
    ropes = tuple(replace(rope, theta=123.0) if rope == replaced else rope for rope in network.ropes)
    assert "rope_parameters" in fields and changed == replace(network, ropes=ropes)


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
