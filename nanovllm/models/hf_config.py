"""Reading a Hugging Face model directory's config: which network it is, and where its sequences end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING

from nanovllm.errors import ModelError
from nanovllm.models.family import Family, decoder_spec
from nanovllm.models.registry import FAMILIES
from nanovllm.models.spec import DTYPE_NAMES, DecoderSpec

# What generation_config.json may recommend, and the sampling parameter that it is.
SAMPLING_DEFAULTS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}

def load_decoder_spec(model_dir: str | Path) -> DecoderSpec:
    """The network that `model_dir`/config.json describes.

    Only the local directory is read; a name on a hub is refused. Raises ModelError on a missing directory or
    file, broken JSON, and everything that is not supported, with what is.
    """
    return _spec(_config_path(Path(model_dir)))


def read_decoder_spec(config: str | Path) -> DecoderSpec:
    """The network that a model directory, or a config file by itself, describes. Raises ModelError as above."""
    return _spec(Path(config)) if Path(config).is_file() else load_decoder_spec(config)


def load_eos_token_ids(model_dir: str | Path) -> tuple[int, ...]:
    """Every end-of-sequence id of config.json and generation_config.json, in that order, each once.

    Where neither file has the key, the family's own default holds (Llama and Mistral: 2).
    """
    directory = Path(model_dir)
    raw = _read_json(_config_path(directory))
    generation = directory / "generation_config.json"
    sources = [raw, _read_json(generation)] if generation.is_file() else [raw]
    if not any("eos_token_id" in source for source in sources):
        sources = [{"eos_token_id": _hf_config(raw, _family(raw)).eos_token_id}]
    ids = [token for source in sources for token in _token_ids(source.get("eos_token_id"))]
    return tuple(dict.fromkeys(ids))


def load_sampling_defaults(model_dir: str | Path) -> dict[str, Any]:
    """What generation_config.json recommends, under the names of SamplingParams; as vLLM, whatever its do_sample."""
    path = Path(model_dir) / "generation_config.json"
    raw = _read_json(path) if path.is_file() else {}
    return {name: raw[key] for key, name in SAMPLING_DEFAULTS.items() if raw.get(key) is not None}


def _spec(path: Path) -> DecoderSpec:
    raw = _read_json(path)
    try:
        family = _family(raw)
        return decoder_spec(family, _hf_config(raw, family))
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from None


def _config_path(directory: Path) -> Path:
    if not directory.is_dir():
        raise ModelError(
            f"Model directory {str(directory)!r} does not exist; give the path of a local directory in "
            "Hugging Face format (nothing is downloaded)."
        )
    path = directory / "config.json"
    if not path.is_file():
        raise ModelError(f"{path} does not exist; a model directory must hold a config.json.")
    return path


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}.") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} must hold a JSON object, but it holds a {type(content).__name__}.")
    return content


def _family(raw: dict[str, Any]) -> Family:
    named = raw.get("architectures") or []
    family = next((FAMILIES[name] for name in named if name in FAMILIES), None)
    if family is None:
        found = f"Architecture {', '.join(map(str, named))} is not supported" if named else "It names no architecture"
        raise ModelError(f"{found}; supported: {', '.join(FAMILIES)}.")
    if raw.get("model_type", family.model_type) != family.model_type:
        raise ModelError(
            f"It contradicts itself: architecture {family.architecture} has model_type {family.model_type!r}, "
            f"not {raw['model_type']!r}."
        )
    if raw.get("quantization_config") is not None:
        raise ModelError(
            f"Quantized weights are not supported (quantization_config={raw['quantization_config']}); "
            f"use a checkpoint in {', '.join(DTYPE_NAMES)}."
        )
    return family


def _hf_config(raw: dict[str, Any], family: Family) -> Any:
    """The config with every default that Transformers fills in, built from the parsed JSON alone."""
    try:
        return CONFIG_MAPPING[family.model_type].from_dict(raw)
    # Its validators raise many unrelated types, some outside the standard hierarchy.
    except Exception as error:
        reason = " ".join(str(error).split()).strip('"')
        raise ModelError(f"It is not valid for a {family.architecture}: {reason}") from error


def _token_ids(value: Any) -> list[int]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise ModelError(f"eos_token_id must be a token id or a list of them, but it holds {token!r}.")
    return ids
