"""Filling a decoder: from safetensors, straight into its merged parameters, or with random weights."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from nanovllm.errors import ConfigError, ModelError
from nanovllm.memory_checks import check_fits
from nanovllm.models.checkpoint import StoredTensor, list_tensors, open_file, some_of
from nanovllm.models.decoder import Decoder
from nanovllm.models.dummy import fill_with_random_weights
from nanovllm.models.spec import DecoderSpec
from nanovllm.models.tensor_shapes import EMBEDDING, LM_HEAD, tensor_shapes
from nanovllm.ops.cpu_linear import use_huge_pages

LOAD_FORMATS = ("auto", "safetensors", "dummy")
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
    free_bytes: int | None = None,
) -> Decoder:
    """A decoder with its weights: "auto" and "safetensors" read `model_dir`, "dummy" draws them from `seed`.

    Strict: every tensor of the network must be in the checkpoint in its shape, and nothing else may be. All headers are
    checked, and the weights held against `free_bytes` of the device where that is given, before anything is allocated;
    then one tensor at a time goes from the file to its place. Raises ModelError with the names of what is wrong,
    ConfigError on an unknown load_format and for weights that do not fit.
    """
    if load_format not in LOAD_FORMATS:
        raise ConfigError(f"load_format must be one of {', '.join(LOAD_FORMATS)}, not {load_format!r}.")
    directory = Path(model_dir)
    stored = {} if load_format == "dummy" else list_tensors(directory)
    names = {} if load_format == "dummy" else _stored_names(directory, spec, stored)
    if free_bytes is not None:
        where, remedy = "the device has", "free memory, or take a smaller model or dtype"
        check_fits(f"model={str(model_dir)!r}: its weights take", weight_bytes(spec, dtype), free_bytes, where, remedy)
    decoder = Decoder(spec, dtype, device)
    for _, slot in decoder.slots():
        use_huge_pages(slot.view)
    if load_format == "dummy":
        fill_with_random_weights(decoder, seed)
        return decoder
    for name, slot in decoder.slots():
        # Opened anew for each tensor, or the mapped pages would pile up to a second copy of the weights.
        with open_file(stored[names[name]].file) as tensors:
            slot.write(tensors.get_tensor(names[name]))
    _check_tied(directory, spec, stored, decoder)
    return decoder


def weight_bytes(spec: DecoderSpec, dtype: torch.dtype) -> int:
    """Bytes of all weights on the device."""
    return spec.num_weights * dtype.itemsize


def _stored_names(directory: Path, spec: DecoderSpec, stored: dict[str, StoredTensor]) -> dict[str, str]:
    """The network's tensors, each with its name in the file. Raises ModelError unless checkpoint and network match."""
    shapes = dict(tensor_shapes(spec))
    names = {name: name for name in shapes}
    if spec.tie_word_embeddings and EMBEDDING not in stored and LM_HEAD in stored:
        names[EMBEDDING] = LM_HEAD  # tools that drop duplicates by alphabet keep the other name of the one tensor
    missing = [name for name in names.values() if name not in stored]
    if missing:
        raise ModelError(f"{directory} lacks tensors of a {spec.architecture} ({some_of(missing)}).")
    expected = {names[name]: shape for name, shape in shapes.items()}
    unexpected = [name for name in stored if name not in expected and not _harmless(name, spec)]
    if unexpected:
        raise ModelError(f"{directory} holds tensors that a {spec.architecture} does not have ({some_of(unexpected)}).")
    _check_headers(directory, stored, expected)
    return names


def _harmless(name: str, spec: DecoderSpec) -> bool:
    """Whether a tensor may be there without being used: old buffers, the second name of a tied embedding."""
    return bool(BUFFERS.fullmatch(name)) or (spec.tie_word_embeddings and name == LM_HEAD)


def _check_headers(directory: Path, stored: dict[str, StoredTensor], expected: dict[str, tuple[int, ...]]) -> None:
    misshapen = [
        f"{name} expected {list(shape)}, found {list(stored[name].shape)}"
        for name, shape in expected.items()
        if stored[name].shape != shape
    ]
    if misshapen:
        raise ModelError(f"{directory} holds tensors of shapes its config does not give ({some_of(misshapen)}).")
    unreadable = [f"{name} {stored[name].dtype}" for name in expected if stored[name].dtype not in READABLE]
    if unreadable:
        raise ModelError(
            f"{directory} holds tensors in formats that are not read ({some_of(unreadable)}); "
            f"read are {', '.join(READABLE)}."
        )


def _check_tied(directory: Path, spec: DecoderSpec, stored: dict[str, StoredTensor], decoder: Decoder) -> None:
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
