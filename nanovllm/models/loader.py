"""Filling a decoder: from safetensors, straight into its merged parameters, or with random weights."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from nanovllm.errors import ConfigError, ModelError
from nanovllm.layers.weights import WeightSlot
from nanovllm.models.checkpoint import StoredTensor, list_tensors, open_file, some_of
from nanovllm.models.decoder import Decoder
from nanovllm.models.dummy import fill_with_random_weights
from nanovllm.models.spec import DecoderSpec

LOAD_FORMATS = ("auto", "safetensors", "dummy")
EMBEDDING, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"
READABLE = ("F64", "F32", "F16", "BF16")
# Transformers saved these buffers until 4.3x; the config says the same, and it is what is computed from here.
BUFFERS = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)")


def load_model(
    model_dir: str | Path,
    spec: DecoderSpec,
    dtype: torch.dtype,
    device: torch.device,
    load_format: str = "auto",
    seed: int = 0,
) -> Decoder:
    """A decoder with its weights: "auto" and "safetensors" read `model_dir`, "dummy" draws them from `seed`.

    Strict: every tensor of the network must be in the checkpoint in its shape, and nothing else may be. All
    headers are checked before any data is read; then one tensor at a time goes from the file to its place.
    Raises ModelError with the names of what is wrong, ConfigError on an unknown load_format.
    """
    if load_format not in LOAD_FORMATS:
        raise ConfigError(f"load_format must be one of {', '.join(LOAD_FORMATS)}, not {load_format!r}.")
    if load_format == "dummy":
        decoder = Decoder(spec, dtype, device)
        fill_with_random_weights(decoder, seed)
        return decoder
    directory = Path(model_dir)
    stored = list_tensors(directory)
    decoder = Decoder(spec, dtype, device)
    for name, slot in _plan(directory, spec, stored, dict(decoder.slots())).items():
        # Opened anew for each tensor, or the mapped pages would pile up to a second copy of the weights.
        with open_file(stored[name].file) as tensors:
            slot.write(tensors.get_tensor(name))
    _check_tied(directory, spec, stored, decoder)
    return decoder


def _plan(
    directory: Path, spec: DecoderSpec, stored: dict[str, StoredTensor], slots: dict[str, WeightSlot]
) -> dict[str, WeightSlot]:
    """Where each stored tensor goes. Raises ModelError unless checkpoint and network match."""
    if spec.tie_word_embeddings and EMBEDDING not in stored and LM_HEAD in stored:
        # Tools that drop duplicates by alphabet keep the other name of the one tensor.
        slots = {LM_HEAD if name == EMBEDDING else name: slot for name, slot in slots.items()}
    missing = [name for name in slots if name not in stored]
    if missing:
        raise ModelError(f"{directory} lacks tensors of a {spec.architecture} ({some_of(missing)}).")
    unexpected = [name for name in stored if name not in slots and not _harmless(name, spec)]
    if unexpected:
        raise ModelError(
            f"{directory} holds tensors that a {spec.architecture} does not have ({some_of(unexpected)})."
        )
    _check_headers(directory, stored, slots)
    return slots


def _harmless(name: str, spec: DecoderSpec) -> bool:
    """Whether a tensor may be there without being used: old buffers, the second name of a tied embedding."""
    return bool(BUFFERS.fullmatch(name)) or (spec.tie_word_embeddings and name == LM_HEAD)


def _check_headers(directory: Path, stored: dict[str, StoredTensor], slots: dict[str, WeightSlot]) -> None:
    misshapen = [
        f"{name} expected {list(slot.shape)}, found {list(stored[name].shape)}"
        for name, slot in slots.items()
        if stored[name].shape != slot.shape
    ]
    if misshapen:
        raise ModelError(
            f"{directory} holds tensors of shapes its config does not give ({some_of(misshapen)})."
        )
    unreadable = [f"{name} {stored[name].dtype}" for name in slots if stored[name].dtype not in READABLE]
    if unreadable:
        raise ModelError(
            f"{directory} holds tensors in formats that are not read ({some_of(unreadable)}); "
            f"read are {', '.join(READABLE)}."
        )


def _check_tied(
    directory: Path, spec: DecoderSpec, stored: dict[str, StoredTensor], decoder: Decoder
) -> None:
    """A tied checkpoint may hold the output projection too, but then it must equal the embedding."""
    if not (spec.tie_word_embeddings and EMBEDDING in stored and LM_HEAD in stored):
        return
    with open_file(stored[LM_HEAD].file) as tensors:
        head = tensors.get_tensor(LM_HEAD)
        same = head.shape == decoder.embedding.shape and torch.equal(
            head.to(decoder.embedding.dtype), decoder.embedding.cpu()
        )
    if not same:
        raise ModelError(
            f"{directory}: {LM_HEAD} differs from {EMBEDDING}, but the config says that they are tied; "
            "set tie_word_embeddings to false in config.json."
        )
