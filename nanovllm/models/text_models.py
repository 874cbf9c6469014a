"""Checkpoints of models for text and images, of which the text model is used: without images it computes the same."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from nanovllm.data.json_fields import OBJECT, checked_fields
from nanovllm.errors import ModelError, quoted

# The architecture of the whole model, and that of its text model.
TEXT_MODELS: Mapping[str, str] = MappingProxyType({"Gemma3ForConditionalGeneration": "Gemma3ForCausalLM"})
# Fields that the whole model has and the text model reads.
_SHARED = ("dtype", "torch_dtype", "eos_token_id", "tie_word_embeddings")
# Prefixes of tensors, of newer and older checkpoints: those of the text model with its own, and the others.
_TEXT = {"model.language_model.": "model.", "language_model.model.": "model.", "language_model.lm_head.": "lm_head."}
_IMAGES = ("model.vision_tower.", "model.multi_modal_projector.", "vision_tower.", "multi_modal_projector.")


def text_fields(where: str, fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of config.json as the text model would have them; those of a model for text as they are.

    Raises ModelError if a model for text and images does not say what its text model is, or is quantized.
    """
    named = fields.get("architectures")
    names = named if isinstance(named, list) else ()  # whatever else is there is refused later
    whole = next((name for name in TEXT_MODELS if name in names), None)
    if whole is None:
        return fields
    text = checked_fields(where, fields, {"text_config": OBJECT}).get("text_config")
    if text is None:
        raise ModelError(f"{where}: text_config is missing, which a {whole} needs.")
    quantization = fields.get("quantization_config") or text.get("quantization_config")
    if quantization is not None:
        raise ModelError(
            f"{where}: quantization_config={quoted(quantization)}: a {whole} is supported in plain numbers only; use "
            f"one without it, or a quantized {TEXT_MODELS[whole]}."
        )
    shared = {name: fields[name] for name in _SHARED if fields.get(name) is not None}
    return {**text, **shared, "architectures": [TEXT_MODELS[whole]]}


def text_name(name: str) -> str | None:
    """The text model's name of a tensor of the whole model; None if only images need it."""
    prefix = next((prefix for prefix in _TEXT if name.startswith(prefix)), None)
    if prefix is not None:
        return _TEXT[prefix] + name.removeprefix(prefix)
    return None if name.startswith(_IMAGES) else name
