"""Gemma 3: two rotary embeddings, norms after attention and MLP, norm weights around 0, a scaled embedding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import LOCAL_ROPE, ROPES, edit_config, make_checkpoint
from engines import greedy, greedy_reference, logits_by_request, offloaded, random_prompt, token_ids
from safetensors.torch import load_file, save_file
from test_models import assert_same_logits
from transformers import Gemma3Config, Gemma3ForConditionalGeneration, Gemma3TextConfig, SiglipVisionConfig

from nanovllm import LLM
from nanovllm.data.network import RopeSpec
from nanovllm.models.hf_config import load_network_config

VOCAB = 199
BLOCK = 16
RESIDENT = {"kvcache_block_size": BLOCK, "num_gpu_blocks": 80}
OPTIONS: tuple[dict[str, Any], ...] = (
    {"sliding_window": 20, "layers": 4, "rope": ROPES["linear"]},
    {"sliding_window": 7, "tie": True, "kv_heads": 1, "head_dim": 32, "layer_types": ["full_attention"] * 2},
    {"sliding_window": 130, "attention_bias": True, "layer_types": ["sliding_attention"] * 2, "rms_norm_eps": 1e-3},
)


@pytest.mark.parametrize("options", OPTIONS, ids=range(len(OPTIONS)))
def test_logits_equal_transformers(options: dict[str, Any], tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, "gemma3", **options)
    assert_same_logits(model, tmp_path)


def test_tokens_are_those_of_transformers(tmp_path: Path) -> None:
    """Beside `test_generate.py`: in chunks, from the prefix cache, and layer by layer with CPU attention."""
    model = make_checkpoint(tmp_path, "gemma3", **OPTIONS[0])
    prompt = random_prompt(3 * BLOCK + 5, VOCAB, seed=4)
    expected = [greedy_reference(model, prompt, 12)]
    for arguments in ({**RESIDENT, "max_num_batched_tokens": 29}, offloaded(BLOCK, max_num_batched_tokens=29)):
        with LLM(tmp_path, dtype="float32", **arguments) as llm:
            assert token_ids(llm, prompt, greedy(12)) == token_ids(llm, prompt, greedy(12)) == expected


def test_older_configs_mean_the_same(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "gemma3", rope={"rope_type": "linear", "rope_theta": 5e5, "factor": 4.0})
    network = load_network_config(tmp_path).network
    assert network.ropes == (RopeSpec(theta=300.0), RopeSpec("linear", 5e5, 4.0, original_max_position=64))
    assert (network.max_model_len, network.yarn_positions) == (256, None)
    edit_config(
        tmp_path,
        rope_parameters=...,
        rope_theta=5e5,
        rope_local_base_freq=LOCAL_ROPE["rope_theta"],
        rope_scaling={"rope_type": "linear", "factor": 4.0},
    )
    assert load_network_config(tmp_path).network == network
    edit_config(tmp_path, rope_theta=..., rope_local_base_freq=..., layer_types=..., sliding_window_pattern=2)
    defaults = load_network_config(tmp_path).network
    assert [rope.theta for rope in defaults.ropes] == [1e4, 1e6]
    assert defaults.kv_windows == network.kv_windows == (256, None)


# ---- the text model of one for images too


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """A model for text and images as Transformers writes it; `tmp_path / "text"` is its text model alone."""
    make_checkpoint(tmp_path / "text", "gemma3", sliding_window=20, tie=True)
    text = Gemma3TextConfig.from_pretrained(tmp_path / "text")
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes = {"image_size": 28, "patch_size": 14}
    images = SiglipVisionConfig(**vision, **sizes)
    config = Gemma3Config(text_config=text, vision_config=images, mm_tokens_per_image=4)
    model = Gemma3ForConditionalGeneration(config)
    state = load_file(tmp_path / "text" / "model.safetensors")
    language = {name.removeprefix("model."): tensor for name, tensor in state.items()}
    model.model.language_model.load_state_dict(language)
    model.save_pretrained(tmp_path / "whole")
    return tmp_path / "whole"


@pytest.mark.parametrize("older", [False, True])
def test_text_is_continued_as_by_the_text_model(whole: Path, older: bool, tmp_path: Path) -> None:
    stored = load_file(whole / "model.safetensors")
    if not older:  # Transformers writes the names of the first checkpoints
        renames = {"language_model.model.": "model.language_model.", "vision": "model.vision", "multi": "model.multi"}
        for old, new in renames.items():
            stored = {name.replace(old, new, 1) if name.startswith(old) else name: t for name, t in stored.items()}
        save_file(stored, whole / "model.safetensors", {"format": "pt"})
    prefix = "" if older else "model."
    assert {f"{prefix}vision_tower", f"{prefix}multi_modal_projector"} <= {
        name[: len(prefix)] + name[len(prefix) :].split(".")[0] for name in stored
    }
    assert load_network_config(whole).network == load_network_config(tmp_path / "text").network
    prompt = random_prompt(50, VOCAB, seed=1)
    found = []
    for path in (whole, tmp_path / "text"):
        with LLM(path, dtype="float32", **RESIDENT) as llm:
            found.append(logits_by_request(llm, [prompt], 5))
    assert all(torch.equal(row, found[1][key]) for key, row in found[0].items())
