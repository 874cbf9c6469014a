"""Olmo 3, GLM-4.5, MiniMax-M2, Mistral Small 3 and Qwen3-VL, beside the tests of all families; and refused configs."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import FAMILIES, LOCAL_ROPE, ROPES, edit_config, make_checkpoint, refusal
from fast import fast_only
from safetensors.torch import load_file, save_file
from test_gemma4 import MODELS as GEMMA_4
from test_models import assert_same_logits, load, random_prompts, reference, run
from transformers import (
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    PixtralVisionConfig,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLTextConfig,
)

from nanovllm.data.network import RopeSpec
from nanovllm.models.hf_config import load_network_config

FOUR_LAYERS: dict[str, Any] = {"hidden": 224, "intermediate": 512, "head_dim": 64, "layers": 4}
CHOSEN_EXPERTS: dict[str, Any] = {"hidden": 256, "experts": 8, "experts_per_tok": 6}
ROUTED: dict[str, Any] = {"hidden": 224, "head_dim": 64, "layers": 4, "experts": 8}
# Family, its sizes, and how much more than Transformers it may err.
HALF: dict[str, tuple[str, dict[str, Any], float]] = {
    "qwen3": ("qwen3", FOUR_LAYERS, 1.05),
    "gemma3": ("gemma3", FOUR_LAYERS, 1.05),
    **{f"gemma4, {name}": ("gemma4", GEMMA_4[name], 1.05) for name in ("small", "large", "mixture")},
    **{name: (name, CHOSEN_EXPERTS, 1.05) for name in ("qwen3_moe", "mixtral")},  # which Transformers rounds each time
    **{name: (name, ROUTED, 1.3) for name in ("olmo3", "glm4_moe", "minimax_m2")},
}
IN_BF16 = [(name, "bfloat16") for name in HALF]
IN_FP16 = [(name, "float16") for name in ("qwen3", "gemma3", "olmo3", "glm4_moe", "minimax_m2")]


@pytest.mark.parametrize(("name", "dtype"), fast_only([*IN_BF16, *IN_FP16[:2]], [*IN_BF16, *IN_FP16]))
def test_half_precision_is_as_near_to_float32_as_transformers(name: str, dtype: str, tmp_path: Path) -> None:
    """Everything is rounded where Transformers rounds it. Rounded inputs of a router may choose other experts, so that
    single rows differ much: there the median counts."""
    family, sizes, factor = HALF[name]
    model = make_checkpoint(tmp_path, family, dtype=dtype, **sizes)
    prompts = random_prompts(199)
    theirs = torch.cat(reference(model, prompts))
    scale = getattr(model.model.embed_tokens, "embed_scale", None)
    model.float()
    if family == "gemma3":  # Transformers multiplies by the rounded scale in 16 bits, which here is the model's
        model.model.embed_tokens.embed_scale = scale.to(getattr(torch, dtype)).float()
    exact = torch.cat(reference(model, prompts))
    own = load(tmp_path, getattr(torch, dtype))
    assert own.network.weight_bytes == sum(slot.view.nbytes for _, slot in own.slots())
    of_all = torch.median if "experts" in sizes else torch.mean
    assert of_all((torch.cat(run(own, prompts, (0.4,))) - exact).abs()) < factor * of_all((theirs - exact).abs())


def test_layers_for_multi_token_prediction_are_left(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = make_checkpoint(tmp_path, "glm4_moe", attention_bias=True)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for name in [name for name in tensors if name.startswith("model.layers.1.")]:
        tensors[name.replace(".1.", ".2.", 1)] = tensors[name].clone()
    save_file({**tensors, "model.layers.2.enorm.weight": torch.ones(64)}, file)
    with caplog.at_level(logging.WARNING):
        assert_same_logits(model, tmp_path)
    (line,) = [record.getMessage() for record in caplog.records if record.name.endswith("loader")]
    assert str(tmp_path) in line and "multi-token prediction" in line
    edit_config(tmp_path, num_nextn_predict_layers=0)
    assert "model.layers.2." in refusal(lambda: load(tmp_path))


@pytest.mark.parametrize("family", ["mistral", "ministral3"])
def test_the_text_model_of_mistral_small_and_ministral(family: str, tmp_path: Path) -> None:
    """Which does not say that its output projection is not tied."""
    make_checkpoint(tmp_path / "text", family)
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    images = PixtralVisionConfig(hidden_size=32, intermediate_size=48, **sizes)
    text = FAMILIES[family].config.from_pretrained(tmp_path / "text")
    config = Mistral3Config(vision_config=images, text_config=text, tie_word_embeddings=False)
    model = Mistral3ForConditionalGeneration(config)
    state = load_file(tmp_path / "text" / "model.safetensors")
    model.lm_head.weight.data = state.pop("lm_head.weight")
    model.model.language_model.load_state_dict({name.removeprefix("model."): each for name, each in state.items()})
    model.save_pretrained(tmp_path / "whole")
    edit_config(tmp_path / "whole", tie_word_embeddings=...)
    stored = load_file(tmp_path / "whole" / "model.safetensors")
    assert {"language_model", "vision_tower", "multi_modal_projector"} == {name.split(".")[0] for name in stored}
    assert load_network_config(tmp_path / "whole").network == load_network_config(tmp_path / "text").network
    own, other = (dict(load(tmp_path / name).slots()) for name in ("whole", "text"))
    assert own.keys() == other.keys() and all(torch.equal(own[name].view, other[name].view) for name in own)


def test_the_text_model_of_qwen3_vl(tmp_path: Path) -> None:
    """Its rotary embedding has parts for images, which are the same for text."""
    make_checkpoint(tmp_path, "qwen3")
    fields = json.loads((tmp_path / "config.json").read_text())
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    sizes = {name: fields[name] for name in (*names, "num_key_value_heads", "head_dim", "max_position_embeddings")}
    rope = {"rope_type": "default", "rope_theta": 300.0, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}
    config = Qwen3VLConfig(
        text_config={**sizes, "rope_parameters": rope}, vision_config={**vision, "deepstack_visual_indexes": [0]}
    )
    Qwen3VLForConditionalGeneration(config).save_pretrained(tmp_path)
    assert any(name.startswith("model.visual.") for name in load_file(tmp_path / "model.safetensors"))
    assert_same_logits(Qwen3VLForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.float32), tmp_path)
    edit_config(tmp_path, text_config={})
    network = load_network_config(tmp_path).network
    default = Qwen3VLTextConfig()
    assert (network.max_model_len, network.ropes[0].theta) == (default.max_position_embeddings, 500_000)


def test_older_configs_of_olmo_mean_the_same(tmp_path: Path) -> None:
    yarn = {**ROPES["yarn"], "rope_theta": 500_000.0, "attention_factor": 1.25}
    make_checkpoint(tmp_path, "olmo3", layers=8, rope=yarn, sliding_window=20)
    edit_config(tmp_path, rope_parameters={"full_attention": yarn, "sliding_attention": {"rope_type": "default"}})
    network = load_network_config(tmp_path).network
    full = RopeSpec("yarn", 5e5, 4.0, original_max_position=64, attention_factor=1.25)
    assert network.ropes == (RopeSpec(theta=5e5), full) and network.kv_windows == (20, 20, 20, None) * 2
    assert network.max_model_len == 256
    edit_config(tmp_path, rope_parameters=..., rope_theta=500_000, rope_scaling=yarn, layer_types=...)
    assert load_network_config(tmp_path).network == network


def test_rotated_features_are_given_in_several_ways(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "minimax_m2", head_dim=32)
    rotated = {"rope_parameters": ..., "rope_theta": 1e4}
    for changes, expected in (
        ({}, None),
        ({"rotary_dim": 12}, 12),
        ({"rotary_dim": 12, "partial_rotary_factor": 0.5}, 16),
        ({"rope_parameters": {"partial_rotary_factor": 0.25}}, 8),
    ):
        edit_config(tmp_path, **{**rotated, **changes})
        assert load_network_config(tmp_path).network.ropes[0].rotary_dim == expected
    make_checkpoint(tmp_path, "glm4_moe", head_dim=32)
    edit_config(tmp_path, **rotated)
    assert load_network_config(tmp_path).network.ropes[0].rotary_dim == 16


def test_a_shared_expert_is_always_read(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "glm4_moe", layers=3, experts=8)
    network = load_network_config(tmp_path).network
    expert = 3 * 64 * 48
    whole = network.layer_weight_bytes()
    assert 3 * (whole - network.layer_weight_bytes(1)) == pytest.approx(2 * 6 * expert * 4, abs=3)
    attention = 64 * 2 * (64 + 32)
    shared = 2 * expert
    dense = 3 * 64 * 96
    read = 3 * attention + dense + 2 * (8 * 64 + 8 + shared + 2 * expert)
    assert network.multiplied_weights == read


@pytest.mark.parametrize(
    ("family", "changes", "expected"),
    [
        ("glm4_moe", {"n_group": 2}, "n_group=2 must divide n_routed_experts=5 into groups of at least 2"),
        ("glm4_moe", {"n_routed_experts": 6, "n_group": 6}, "n_group=6 must divide n_routed_experts=6"),
        ("glm4_moe", {"topk_group": 2}, "topk_group=2 is above the number of groups, which is n_group=1"),
        (
            "glm4_moe",
            {"n_routed_experts": 6, "n_group": 3, "num_experts_per_tok": 3},
            "num_experts_per_tok=3 is above the number of experts in topk_group=1 of n_group=3",
        ),
        ("minimax_m2", {"num_local_experts": 0}, "a MiniMaxM2ForCausalLM needs at least 1 expert"),
        ("minimax_m2", {"rotary_dim": 3, "rope_parameters": None}, "rotates 3 of 16 features"),
        ("olmo3", {"rope_parameters": {"full_attention": LOCAL_ROPE, "other": LOCAL_ROPE}}, "'other'"),
        ("qwen3_moe", {"num_experts_per_tok": 6}, "num_experts_per_tok=6 is above the number of experts, which is 5"),
        ("qwen3_moe", {"mlp_only_layers": [-1]}, "mlp_only_layers"),
        ("mixtral", {"num_local_experts": 0}, "num_local_experts is 0"),
        ("gpt_oss", {"num_local_experts": 0}, "num_local_experts is 0"),
        ("gpt_oss", {"hidden_act": "gelu_pytorch_tanh"}, "hidden_act='gelu_pytorch_tanh'"),
        ("gpt_oss", {"swiglu_limit": 5.0}, "swiglu_limit=5.0"),
        ("gpt_oss", {"swiglu_alpha": 1.0}, "swiglu_alpha=1.0"),
        ("gpt_oss", {"intermediate_size": 80, "quantization_config": {"quant_method": "mxfp4"}}, "in_features=80"),
        ("gemma3", {"architectures": ["Gemma3ForConditionalGeneration"]}, "text_config is missing"),
        ("gemma3", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar=0"),
        ("gemma3", {"rope_parameters": ROPES["default"]}, "'rope_theta'"),
        ("gemma3", {"rope_parameters": {"full_attention": ROPES["yarn"]}}, "'yarn'"),
        ("gemma3", {"rope_parameters": {"sliding_attention": {"rope_theta": 0}}}, "rope_theta=0"),
        ("qwen3", {"per_layer_config": {"1": {"intermediate_size": 32}}}, "per_layer_config"),
        ("gemma3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
        ("gemma4", {"enable_moe_block": True}, "enable_moe_block=true needs num_experts above 0, but it is None"),
        (
            "gemma4",
            {"enable_moe_block": True, "num_experts": 3, "top_k_experts": 4, "moe_intermediate_size": 8},
            "top_k_experts=4 is above num_experts=3",
        ),
        ("gemma4", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention='all'"),
        ("gemma4", {"num_kv_shared_layers": 8}, "num_kv_shared_layers=8"),
        ("gemma4", {"num_kv_shared_layers": 7}, "num_kv_shared_layers=7"),
        ("gemma4", {"per_layer_config": {"0": {"head_dim": 8}}}, "per_layer_config"),
        ("gemma4", {"per_layer_config": {"2": {"head_dim": 8}}}, "per_layer_config"),
        ("gemma4", {"per_layer_config": {index: {"head_dim": 33} for index in "247"}}, "of 33"),
        ("gemma4", {"vocab_size_per_layer_input": 5}, "vocab_size_per_layer_input=5"),
        ("gemma4", {"final_logit_softcapping": 0}, "final_logit_softcapping=0"),
    ],
    ids=str,
)
def test_what_is_not_supported_is_refused_by_name(
    family: str, changes: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    make_checkpoint(tmp_path, family, **(GEMMA_4["small"] if family == "gemma4" else {}))
    edit_config(tmp_path, **changes)
    message = refusal(lambda: load_network_config(tmp_path))
    assert expected in message and str(tmp_path / "config.json") in message and "\n" not in message
