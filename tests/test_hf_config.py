"""Reading configs: what each family makes of one, and what is refused with its name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from checkpoints import FAMILIES as TESTED
from checkpoints import (
    MINISTRAL3_ROPE,
    ROPES,
    checkpoint_fixture,
    edit_config,
    make_checkpoint,
    refusal,
    write_old_style_rope,
)
from tokenizer_files import write_byte_level

from nanovllm import LLM
from nanovllm.data.network import KVLayer, RopeSpec
from nanovllm.formats.config_fields import MAX_LAYERS
from nanovllm.models.hf_config import ModelConfig, load_network_config
from nanovllm.models.registry import ARCHITECTURES as REGISTERED

ARCHITECTURES = [tested.model.__name__ for tested in TESTED.values()]


original = checkpoint_fixture("qwen3")


@pytest.fixture
def single(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "single"))


def rope_of(path: Path) -> RopeSpec:
    (rope,) = load_network_config(path).network.ropes
    return rope


def test_the_registry_holds_the_families_and_cannot_be_changed() -> None:
    assert set(REGISTERED) == set(ARCHITECTURES), "tests write all families"
    with pytest.raises(TypeError):
        REGISTERED["Other"] = REGISTERED[ARCHITECTURES[0]]  # type: ignore[index]


def test_a_network_says_what_the_config_says(tmp_path: Path) -> None:
    sizes = {"layers": 3, "heads": 6, "kv_heads": 3, "head_dim": 32, "vocab": 77}
    make_checkpoint(tmp_path, "qwen3", sliding_window=5, dtype="bfloat16", **sizes)
    config = load_network_config(str(tmp_path))
    network = config.network
    assert config.architecture == network.architecture == "Qwen3ForCausalLM"
    assert network.layers == (KVLayer(3, 32, None, 3), KVLayer(3, 32, 5, 3), KVLayer(3, 32, 5, 3))
    assert (network.num_heads, network.vocab_size, network.max_model_len) == (6, 77, 256)
    assert network.modules["model.layers.2.self_attn.q_proj"].whole == (192, 64)
    assert network.modules["model.layers.2.self_attn.k_proj"].whole == (96, 64)
    assert config.dtype == network.dtype == "bfloat16"
    model = config.on_meta()
    assert not model.is_tied
    attention = [name.removeprefix("model.layers.0.self_attn.") for name, _ in model.layers[0].mixer.tensors()]
    assert attention == [*(f"{part}_proj.weight" for part in "qkvo"), "q_norm.weight", "k_norm.weight"]


@pytest.mark.parametrize("key", ["rope_type", "type"])
@pytest.mark.parametrize("kind", ROPES)
def test_old_and_new_rope_configs_give_equal_networks(tmp_path: Path, kind: str, key: str) -> None:
    make_checkpoint(tmp_path, "llama", rope=ROPES[kind])
    new = load_network_config(tmp_path).network
    write_old_style_rope(tmp_path, key)
    assert "rope_parameters" not in json.loads((tmp_path / "config.json").read_text())
    assert load_network_config(tmp_path).network == new
    (rope,) = new.ropes
    assert rope.kind == kind and rope.theta == ROPES[kind]["rope_theta"]


def test_old_dtype_key_and_missing_dtype(single: Path) -> None:
    edit_config(single, dtype=..., torch_dtype="float16")
    assert load_network_config(single).dtype == "float16"
    edit_config(single, torch_dtype=...)
    assert load_network_config(single).dtype == "float32"


@pytest.mark.parametrize(
    ("rope", "longest"),
    [
        (ROPES["default"], 256),
        (ROPES["linear"], 640),  # 256 * 2.5
        (ROPES["dynamic"], 768),  # 256 * 3
        (ROPES["llama3"], 256),
        (ROPES["yarn"], 256),  # 64 * 4
        ({**ROPES["yarn"], "original_max_position_embeddings": 100}, 400),
        ({**ROPES["yarn"], "original_max_position_embeddings": 10}, 256),
    ],
)
def test_max_model_len(single: Path, rope: dict[str, Any], longest: int) -> None:
    edit_config(single, rope_parameters=rope)
    assert load_network_config(single).network.max_model_len == longest


def test_every_eos_id_counts(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    for in_config, in_generation, expected in (
        (5, [7, 5, 9], (5, 7, 9)),
        ([3, 4], 4, (3, 4)),
        (None, [8], (8,)),
        (None, None, ()),
        (..., [8, 9], (8, 9)),
        (..., None, ()),
        (..., ..., (2,)),  # neither names one: Llama's default
    ):
        edit_config(tmp_path, eos_token_id=in_config)
        edit_config(tmp_path, "generation_config.json", eos_token_id=in_generation)
        assert ModelConfig(tmp_path).eos_token_ids() == expected
    (tmp_path / "generation_config.json").unlink()
    edit_config(tmp_path, eos_token_id=6)
    assert ModelConfig(tmp_path).eos_token_ids() == (6,)


def test_the_scale_of_queries_is_read_of_the_family_that_has_it(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "mistral", "mistral", rope=MINISTRAL3_ROPE)  # Transformers does not read it either
    assert rope_of(tmp_path / "mistral").query_beta == 0
    path = tmp_path / "ministral3"
    make_checkpoint(path, "ministral3")
    assert rope_of(path).query_beta == MINISTRAL3_ROPE["llama_4_scaling_beta"]
    edit_config(path, rope_parameters=ROPES["yarn"])
    assert "llama_4_scaling_beta is missing" in refusal(lambda: load_network_config(path))
    edit_config(path, rope_parameters=...)
    assert rope_of(path) == RopeSpec("yarn", 1e6, 16.0, 16384, query_beta=0.1)


def test_another_text_model_of_a_known_architecture_is_refused_by_its_type(single: Path) -> None:
    """The architecture of Mistral Small 3 has text models of several types."""
    text = json.loads((single / "config.json").read_text()) | {"model_type": "ministral4"}
    whole = {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", "text_config": text}
    (single / "config.json").write_text(json.dumps(whole))
    message = refusal(lambda: load_network_config(single))
    assert f"{single / 'config.json'}: text_config: model_type 'ministral4' is not supported" in message
    assert "'mistral'" in message and "contradicts" not in message


def test_a_network_needs_a_layer_with_attention(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3_5")
    types = json.loads((tmp_path / "config.json").read_text())["layer_types"]
    edit_config(tmp_path, layer_types=["linear_attention"] * len(types))
    assert "names no layer with attention" in refusal(lambda: load_network_config(tmp_path).network)


WRONG_SIZES = (0, -1, 1.5, "x", [1], {}, True, MAX_LAYERS + 1, 10**30)


def test_unsupported_configs_are_refused_by_name(single: Path) -> None:
    config = (single / "config.json").read_bytes()
    for changes, words in (
        ({"architectures": ["GemmaForCausalLM"]}, ["GemmaForCausalLM", *ARCHITECTURES]),
        ({"architectures": []}, ["no architecture", *ARCHITECTURES]),
        ({"architectures": ...}, ["no architecture", *ARCHITECTURES]),
        ({"model_type": "llama"}, ["Qwen3ForCausalLM", "'qwen3'", "'llama'"]),
        ({"hidden_act": "gelu"}, ["'gelu'", "silu"]),
        ({"rope_parameters": {"rope_type": "su", "rope_theta": 1e4}}, ["'su'", "yarn"]),
        ({"quantization_config": {"quant_method": "hqq"}}, ["hqq", "gptq", "bfloat16"]),
        ({"dtype": "float64"}, ["float64", "bfloat16"]),
        ({"num_key_value_heads": 3}, ["num_attention_heads=4", "num_key_value_heads=3"]),
        ({"head_dim": 15}, ["15"]),
        ({"layer_types": ["full_attention"]}, ["layer"]),
        ({"layer_types": ["full_attention", "sliding_attention"]}, ["sliding_window"]),
        ({"layer_types": ["full_attention", "chunked_attention"]}, ["chunked_attention", "sliding_attention"]),
        *(({"num_hidden_layers": value}, [f"num_hidden_layers={value!r}: must be"]) for value in WRONG_SIZES),
        ({"rms_norm_eps": "x"}, ["rms_norm_eps='x': must be"]),
        ({"attention_bias": "x"}, ["attention_bias", "'x'"]),  # Transformers' own check
        ({"rope_parameters": {"rope_type": "yarn"}}, ["yarn", "factor"]),
        ({"tie_word_embeddings": "no"}, ["tie_word_embeddings='no': must be"]),
        ({"rope_parameters": "x"}, ["rope_parameters='x': must be"]),
    ):
        edit_config(single, **changes)
        message = refusal(lambda: load_network_config(single))
        assert [word for word in (str(single / "config.json"), *words) if word not in message] == []
        assert "\n" not in message
        (single / "config.json").write_bytes(config)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "chat_template.jinja"])
def test_huge_files_are_not_read(name: str, single: Path) -> None:
    write_byte_level(single)
    with (single / name).open("wb") as file:
        file.truncate(1 << 40)
    message = refusal(lambda: LLM(single))
    assert str(single / name) in message and str(1 << 40) in message and "\n" not in message
