"""Reading a Hugging Face model directory's config: which network it is, and where its sequences end.

Nothing in the directory is trusted. Every field is checked first (`config_fields.py`). Transformers' config class sees
only fields that were, and gives the family's defaults.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING

from nanovllm.errors import ModelError, quoted, told
from nanovllm.model_files import checked_fields, read_json_object
from nanovllm.models.config_fields import GENERATION_FIELDS, NETWORK_FIELDS, OTHER_FIELDS
from nanovllm.models.families import FAMILIES
from nanovllm.models.family import Family, decoder_spec
from nanovllm.models.rope_config import rope_parameters
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
_DTYPES = ("dtype", "torch_dtype")  # under the newer name and the older one


def load_decoder_spec(model_dir: str | Path) -> DecoderSpec:
    """The network that `model_dir`/config.json describes.

    Only the local directory is read; a name on a hub is refused. Raises ModelError on a missing directory or
    file, broken JSON, and everything that is not supported, with what is.
    """
    return _spec(_config_path(Path(model_dir)))


def read_decoder_spec(config: str | Path) -> DecoderSpec:
    """The network that a model directory, or a config file by itself, describes. Raises ModelError as above."""
    return _spec(Path(config)) if Path(config).is_file() else load_decoder_spec(config)


def load_model_type(model_dir: str | Path) -> str:
    """The family's name in Transformers, which says what its tokenizer is. Raises ModelError as above."""
    path = _config_path(Path(model_dir))
    return _family(path, read_json_object(path)).model_type


def load_eos_token_ids(model_dir: str | Path) -> tuple[int, ...]:
    """Every end-of-sequence id of config.json and generation_config.json, in that order, each once.

    Where neither file has the key, the family's own default holds (Llama and Mistral: 2).
    """
    path = _config_path(Path(model_dir))
    raw, generation = read_json_object(path), _generation_fields(path.parent)
    sources = [checked_fields(path, raw, NETWORK_FIELDS), generation]
    if not any("eos_token_id" in source for source in sources):
        sources = [{"eos_token_id": CONFIG_MAPPING[_family(path, raw).model_type]().eos_token_id}]
    ids = [token for source in sources for token in _token_ids(source.get("eos_token_id"))]
    return tuple(dict.fromkeys(ids))


def load_sampling_defaults(model_dir: str | Path) -> dict[str, Any]:
    """What generation_config.json recommends, under the names of SamplingParams; as vLLM, whatever its do_sample."""
    recommended = _generation_fields(Path(model_dir))
    return {name: recommended[key] for key, name in SAMPLING_DEFAULTS.items() if recommended.get(key) is not None}


def _generation_fields(directory: Path) -> dict[str, Any]:
    path = directory / "generation_config.json"
    return checked_fields(path, read_json_object(path), GENERATION_FIELDS) if path.is_file() else {}


def _spec(path: Path) -> DecoderSpec:
    raw = read_json_object(path)
    family = _family(path, raw)
    fields = checked_fields(path, raw, NETWORK_FIELDS)
    try:
        config = _with_defaults(family, fields)
        config.rope_parameters = rope_parameters(raw, config.max_position_embeddings, config.default_theta)
        config.dtype = next((fields[name] for name in _DTYPES if fields.get(name) is not None), None)
        return decoder_spec(family, config)
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


def _family(path: Path, raw: dict[str, Any]) -> Family:
    fields = checked_fields(path, raw, OTHER_FIELDS)
    named = fields.get("architectures") or []
    family = next((FAMILIES[name] for name in named if name in FAMILIES), None)
    if family is None:
        found = f"architectures={quoted(named)} is not supported" if named else "it names no architecture"
        raise ModelError(f"{path}: {found}; supported: {', '.join(FAMILIES)}.")
    if fields.get("model_type", family.model_type) != family.model_type:
        raise ModelError(
            f"{path} contradicts itself: architecture {family.architecture} has model_type {family.model_type!r}, "
            f"not {quoted(fields['model_type'])}."
        )
    if fields.get("quantization_config") is not None:
        raise ModelError(
            f"{path}: quantized weights are not supported (quantization_config="
            f"{quoted(fields['quantization_config'])}); use a checkpoint in {', '.join(DTYPE_NAMES)}."
        )
    return family


def _with_defaults(family: Family, fields: dict[str, Any]) -> Any:
    """Transformers' config with every default filled in. It reads neither files nor RoPE nor the dtype."""
    given = {name: value for name, value in fields.items() if name not in _DTYPES}
    try:
        return CONFIG_MAPPING[family.model_type](**given)
    # Its validators raise many unrelated types, some outside the standard hierarchy.
    except Exception as error:
        raise ModelError(f"it is not valid for a {family.architecture}: {told(error)}.") from error


def _token_ids(value: Any) -> list[int]:
    return value if isinstance(value, list) else [] if value is None else [value]
