"""Random models for images and text, whose text models the engine computes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from checkpoints import make_checkpoint
from transformers import PreTrainedModel

_ROPE = {"rope_type": "default", "rope_theta": 300.0, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
_TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
_PIXTRAL = {**_TOWER, "model_type": "pixtral", "image_size": 28, "patch_size": 14}
_BLOCKS = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}
_UNIFIED = {"patch_size": 4, "pooling_kernel_size": 1, "mm_embed_dim": 32, "mm_posemb_size": 16}
_GEMMA4 = {"vocab_size_per_layer_input": 199}
# Of each architecture the family of its text model, options of `make_checkpoint`, and fields of the whole config.
WHOLE: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "Gemma3ForConditionalGeneration": (
        "gemma3",
        {"sliding_window": 20},
        {
            "vision_config": {**_TOWER, "model_type": "siglip_vision_model", "image_size": 28, "patch_size": 14},
            "mm_tokens_per_image": 4,
        },
    ),
    "Gemma4ForConditionalGeneration": (
        "gemma4",
        _GEMMA4,
        {
            "vision_config": {**_TOWER, "num_key_value_heads": 2, "head_dim": 16, "position_embedding_size": 64},
            "audio_config": None,
        },
    ),
    "Gemma4UnifiedForConditionalGeneration": ("gemma4", {}, {"vision_config": _UNIFIED, "audio_config": None}),
    "Mistral3ForConditionalGeneration": ("mistral", {}, {"vision_config": _PIXTRAL}),
    "Mistral3ForConditionalGeneration ministral3": (
        "ministral3",
        {},
        {"vision_config": _PIXTRAL},
    ),
    "Qwen3VLForConditionalGeneration": (
        "qwen3",
        {},
        {"vision_config": {**_BLOCKS, "deepstack_visual_indexes": [0]}},
    ),
    "Qwen3_5ForConditionalGeneration": ("qwen3_5", {}, {"vision_config": _BLOCKS}),
    "Qwen3_5MoeForConditionalGeneration": ("qwen3_5_moe", {}, {"vision_config": _BLOCKS}),
}
_NOT_OF_PARTS = ("architectures", "model_type", "transformers_version", "dtype")


def make_whole(path: Path, which: str) -> PreTrainedModel:
    """Write a random checkpoint of an entry of `WHOLE` to `path` and return its model, the same in every call."""
    family, options, others = WHOLE[which]
    text = make_checkpoint(path / "text", family, **options)
    fields = json.loads((path / "text" / "config.json").read_text())
    kind = fields["model_type"]
    own = {name: value for name, value in fields.items() if name not in _NOT_OF_PARTS}
    others = {**others, "tie_word_embeddings": False}
    if family == "qwen3":
        own["rope_parameters"] = _ROPE
    if which.startswith("Gemma4Unified"):
        own = {name: value for name, value in own.items() if not name.endswith("_per_layer_input")}
    architecture: Any = getattr(transformers, which.split()[0])
    if which.startswith("Mistral3"):
        own["model_type"] = kind
    config = architecture.config_class(text_config={**own, "pad_token_id": 0}, **others)
    torch.manual_seed(0)
    model = architecture(config).eval()
    model.model.language_model.load_state_dict(text.model.state_dict())
    model.lm_head.weight.data = text.lm_head.weight.data
    model.save_pretrained(path)
    return model
