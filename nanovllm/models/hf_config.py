"""Reading the config of a Hugging Face model directory or GGUF file: which network it is, where its sequences end.

Nothing in the directory is trusted. Only fields that `config_fields.py` and the family list are read, after they were
checked; the family has those that a config leaves out. Fields that it does not read are refused if they may have an
effect.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from nanovllm.data.json_fields import OBJECT, checked_fields, read_json_object
from nanovllm.errors import ConfigError, ModelError, quoted, unknown_name_message
from nanovllm.formats.config_fields import (
    FIELDS_WITHOUT_EFFECT,
    GENERATION_FIELDS,
    NETWORK_FIELDS,
    OFF_VALUES,
    OTHER_FIELDS,
)
from nanovllm.formats.hub import MODELOPT, is_gguf
from nanovllm.models.families import FAMILIES
from nanovllm.models.family import Family, complete_config, decoder_spec
from nanovllm.models.rope_config import rope_specs
from nanovllm.models.spec import DecoderSpec

if TYPE_CHECKING:  # imports torch
    from nanovllm.formats.gguf.model import GgufConfig

# Fields of generation_config.json and the sampling parameters that they set.
_SAME_NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
SAMPLING_DEFAULTS = {**{name: name for name in _SAME_NAMES}, "max_new_tokens": "max_tokens"}
NO_OVERRIDES: Mapping[str, Any] = MappingProxyType({})
_EXPERT_COUNTS = ("num_experts", "num_local_experts")  # Qwen's name and Mixtral's, which Transformers 5 writes for both
_DTYPES = ("dtype", "torch_dtype")  # the newer name and the older one


class ModelConfig:
    """What a model directory or GGUF file says about its network and its use. Each file is read once.

    spec: the network that `model_dir`/config.json describes, with the fields of `overrides` in the place of its own.
    Raises ModelError on a missing directory or file, broken JSON, and everything that is not supported, with what is;
    of generation_config.json when it is asked for.
    """

    def __init__(
        self, model_dir: str | Path, overrides: Mapping[str, Any] = NO_OVERRIDES, generation_config: str | Path = "auto"
    ) -> None:
        """generation_config: as the engine argument."""
        self._model = Path(model_dir)
        self._generation_config = generation_config
        self._config = _read_config(self._model, overrides)
        self._family = _family(self._config)
        self.spec = _spec(self._config, self._family)

    @property
    def model_type(self) -> str:
        """The family's name in Transformers, which selects its tokenizer class."""
        return self._family.model_type

    @cached_property
    def _generation(self) -> Mapping[str, Any]:
        """The fields of generation_config.json."""
        if self._generation_config not in ("auto", "vllm"):
            return _generation_fields(Path(self._generation_config))
        if self._config.gguf is not None:
            return checked_fields(self._model, self._config.gguf.generation, GENERATION_FIELDS)
        return _generation_fields(self._model)

    def eos_token_ids(self) -> tuple[int, ...]:
        """Every end-of-sequence id of config.json and generation_config.json, in that order, each once.

        With generation_config "vllm", the model's own file still counts here, as in vLLM. If neither file has the key,
        the family's default applies (Llama and Mistral: 2).
        """
        sources = [_network_fields(self._config, self._family), self._generation]
        if not any("eos_token_id" in source for source in sources):
            sources = [self._family.defaults]
        ids = [token for source in sources for token in _token_ids(source.get("eos_token_id"))]
        return tuple(dict.fromkeys(ids))

    def sampling_defaults(self, overrides: Mapping[str, Any] = NO_OVERRIDES) -> dict[str, Any]:
        """What generation_config.json recommends, under the names of SamplingParams. do_sample is ignored, as in vLLM.

        overrides: as the engine argument override_generation_config. Raises ConfigError for wrong ones.
        """
        unknown = [name for name in overrides if name not in SAMPLING_DEFAULTS]
        if unknown:
            raise ConfigError(
                unknown_name_message("field of override_generation_config", unknown[0], SAMPLING_DEFAULTS)
            )
        try:
            checked_fields("override_generation_config", overrides, GENERATION_FIELDS)
        except ModelError as error:
            raise ConfigError(str(error)) from None
        found = {} if self._generation_config == "vllm" else self._generation
        recommended = {**found, **overrides}
        return {name: recommended[key] for key, name in SAMPLING_DEFAULTS.items() if recommended.get(key) is not None}


def load_decoder_spec(model_dir: str | Path, overrides: Mapping[str, Any] = NO_OVERRIDES) -> DecoderSpec:
    """`ModelConfig.spec`."""
    return ModelConfig(model_dir, overrides).spec


def read_decoder_spec(config: str | Path, overrides: Mapping[str, Any] = NO_OVERRIDES) -> DecoderSpec:
    """As `load_decoder_spec`; `config` may also be a single config file. Raises ModelError as `ModelConfig`."""
    path = Path(config)
    if not path.is_file() or is_gguf(path):
        return load_decoder_spec(path, overrides)
    fields = _with_overrides(path, read_json_object(path), overrides)
    return _spec(fields, _family(fields))


def _generation_fields(directory: Path) -> dict[str, Any]:
    if is_gguf(directory):
        return checked_fields(directory, _read_gguf(directory).generation, GENERATION_FIELDS)
    path = directory / "generation_config.json"
    return checked_fields(path, read_json_object(path), GENERATION_FIELDS) if path.is_file() else {}


class _Config(NamedTuple):
    """The fields of a config.json, and where they come from, for messages.

    gguf: what else a GGUF file says; is_part: whether they are those of the text model of a larger one.
    """

    where: str
    fields: dict[str, Any]
    gguf: GgufConfig | None = None
    is_part: bool = False


def _read_config(model: Path, overrides: Mapping[str, Any]) -> _Config:
    """The config of a model directory or a GGUF file."""
    if is_gguf(model):
        gguf = _read_gguf(model)
        return _with_overrides(model, gguf.fields, overrides, gguf)
    if not model.is_dir():
        raise ModelError(
            f"Model directory {str(model)!r} does not exist; give the path of a local directory in Hugging Face "
            "format, or of a GGUF file."
        )
    path = model / "config.json"
    if not path.is_file():
        raise ModelError(f"{path} does not exist; a model directory must hold a config.json.")
    return _with_overrides(path, read_json_object(path), overrides)


def _with_overrides(
    path: Path, fields: dict[str, Any], overrides: Mapping[str, Any], gguf: GgufConfig | None = None
) -> _Config:
    text = text_fields(str(path), fields)
    if path.name == "config.json" and {**text, **overrides}.get("quantization_config") is None:
        _refuse_modelopt(path.with_name(MODELOPT))
    if not overrides:
        return _Config(str(path), text, gguf, text is not fields)
    return _Config(f"{path} with hf_overrides", _overridden(text, overrides), gguf, text is not fields)


def _refuse_modelopt(path: Path) -> None:
    """Raise ModelError for a checkpoint that ModelOpt has quantized, which the config does not say."""
    if not path.is_file():
        return
    content = read_json_object(path)
    fields = content["quantization"] if isinstance(content.get("quantization"), dict) else content
    for name in ("quant_algo", "kv_cache_quant_algo"):
        if fields.get(name) is not None:
            raise ModelError(
                f"{path}: {name}={quoted(fields[name])}: checkpoints that ModelOpt has quantized are not supported; "
                "take one in float32, float16 or bfloat16, or quantized as gptq, awq, compressed-tensors or fp8."
            )


def _overridden(fields: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The fields with those of `overrides` in their place.

    RoPE has an older form and a newer one. A new one replaces both, except for the theta if it names none, and for what
    each layer type has, of which rope_scaling changes a part.
    """
    merged = {**fields, **overrides}
    if not {"rope_scaling", "rope_parameters"} & overrides.keys():
        return merged
    own = fields.get("rope_parameters")
    if isinstance(own, dict) and "full_attention" in own and "rope_parameters" not in overrides:
        return merged
    for name in {"rope_scaling", "rope_parameters"} - overrides.keys():
        merged.pop(name, None)
    theta = own.get("rope_theta") if isinstance(own, dict) else None
    if theta is not None and overrides.get("rope_theta") is None:
        merged["rope_theta"] = theta
    return merged


def _spec(config: _Config, family: Family) -> DecoderSpec:
    fields = _network_fields(config, family)
    _refuse_unread(config, family)
    try:
        complete = complete_config(family, fields)
        complete.dtype = next((fields[name] for name in _DTYPES if fields.get(name) is not None), None)
        spec = decoder_spec(family, complete, *rope_specs(family, complete, config.fields))
        quantization = config.fields.get("quantization_config")
        if config.gguf is not None:
            return _gguf_spec(spec, quantization, config.gguf)
        return _with_quantization(spec, quantization, config.is_part)
    except ModelError as error:
        raise ModelError(f"{config.where}: {error}") from None


def _gguf_spec(spec: DecoderSpec, quantization: Mapping[str, Any] | None, gguf: GgufConfig) -> DecoderSpec:
    """The network with what a config.json cannot say. RoPE factors apply to RoPE as the file has it."""
    if quantization is not None:
        raise ModelError(
            f"quantization_config={quoted(quantization)}: a GGUF file has the types of its tensors instead."
        )
    rope = spec.rope
    factors = gguf.rope_factors
    if factors and rope.kind == "default":
        if len(factors) != spec.head_dim // 2:
            raise ModelError(f"its {len(factors)} RoPE factors do not fit heads of {spec.head_dim} numbers.")
        rope = replace(rope, frequency_factors=factors)
    if spec.gemma4 is not None:
        from nanovllm.formats.gguf.gemma4 import rotated_pairs  # numpy

        rope = replace(rope, rotated_pairs=rotated_pairs(factors, spec.gemma4.full_head_dim))
    recurrent = spec.recurrent
    if recurrent is not None:  # a file has the parts of merged projections one by one
        recurrent = replace(recurrent, merged_projections=False)
    return replace(spec, rope=rope, quantization=gguf.method, recurrent=recurrent)


def _network_fields(config: _Config, family: Family) -> dict[str, Any]:
    """The checked fields of the network that the family reads."""
    rules = {name: field for name, field in {**NETWORK_FIELDS, **family.own_fields}.items() if family.reads(name)}
    fields = checked_fields(config.where, config.fields, rules)
    counts = {name: fields[name] for name in _EXPERT_COUNTS if name in fields}
    if len(set(counts.values())) > 1:
        given = " and ".join(f"{name}={value}" for name, value in counts.items())
        raise ModelError(f"{config.where} contradicts itself: {given} are two names of one field.")
    return fields


def _refuse_unread(config: _Config, family: Family) -> None:
    """Raise ModelError for a field that may change the network and that the family does not read, unless it is off."""
    for name, value in config.fields.items():
        if family.reads(name) or name in FIELDS_WITHOUT_EFFECT or value is None:
            continue
        if name not in OFF_VALUES or value != OFF_VALUES[name]:
            raise ModelError(
                f"{config.where}: {quoted(name)}: {quoted(value)} is a field that a {family.architecture} does not "
                "have, and it may change what the model computes. If it does not, leave it out with "
                f"hf_overrides={{{quoted(name)}: None}}."
            )


def _family(config: _Config) -> Family:
    where = config.where
    fields = checked_fields(where, config.fields, OTHER_FIELDS)
    named = fields.get("architectures") or []
    family = next((FAMILIES[name] for name in named if name in FAMILIES), None)
    if family is None:
        found = f"architectures={quoted(named)} is not supported" if named else "it names no architecture"
        raise ModelError(f"{where}: {found}; supported: {', '.join((*FAMILIES, *TEXT_MODELS))}.")
    known = (family.model_type, *family.other_types)
    model_type = fields.get("model_type", family.model_type)
    if model_type not in known and config.is_part:  # an architecture can have text models of several families
        raise ModelError(
            f"{where}: text_config: model_type {quoted(model_type)} is not supported; take a checkpoint whose text "
            f"model has {' or '.join(map(repr, known))}."
        )
    if model_type not in known:
        raise ModelError(
            f"{where} contradicts itself: architecture {family.architecture} has model_type {family.model_type!r}, "
            f"not {quoted(model_type)}."
        )
    return family


def _read_gguf(path: Path) -> GgufConfig:
    from nanovllm.formats.gguf.model import read_config  # imports torch, which no other config needs

    return read_config(path)


def _with_quantization(spec: DecoderSpec, config: Mapping[str, Any] | None, is_part: bool) -> DecoderSpec:
    """The network with the way in which its matrices are stored. Raises ModelError for a form that is not supported.

    is_part: of a larger model, whose names of modules the config has.
    """
    if config is None:
        return spec
    from nanovllm.formats.quantization import read_quantization  # imports torch, which no other config needs

    prefixes = tuple((own, whole) for whole, own in _TEXT.items()) if is_part else ()
    quantization = read_quantization(config, spec.dtype, prefixes)
    for module, rows, columns in spec.matrices():
        try:
            deque(quantization.tensors(module, rows, columns), maxlen=0)
        except ModelError as error:
            raise ModelError(f"{module} cannot be stored as {quantization.name}: {error}") from None
    return replace(spec, quantization=quantization)


def _token_ids(value: Any) -> list[int]:
    return value if isinstance(value, list) else [] if value is None else [value]


# The architecture of the whole model, and that of its text model.
TEXT_MODELS: Mapping[str, str] = MappingProxyType(
    {
        "Gemma3ForConditionalGeneration": "Gemma3ForCausalLM",
        "Gemma4ForConditionalGeneration": "Gemma4ForCausalLM",
        "Gemma4UnifiedForConditionalGeneration": "Gemma4ForCausalLM",
        "Mistral3ForConditionalGeneration": "MistralForCausalLM",
        "Qwen3VLForConditionalGeneration": "Qwen3ForCausalLM",
        "Qwen3_5ForConditionalGeneration": "Qwen3_5ForCausalLM",
        "Qwen3_5MoeForConditionalGeneration": "Qwen3_5MoeForCausalLM",
    }
)
# The text models of other types that an architecture may have.
_OTHER_TEXT: Mapping[tuple[str, str], str] = MappingProxyType(
    {("Mistral3ForConditionalGeneration", "ministral3"): "Ministral3ForCausalLM"}
)
TEXT_ARCHITECTURES = frozenset((*TEXT_MODELS.values(), *_OTHER_TEXT.values()))
# What a text model's config takes where it names nothing, as far as its family takes something else.
_OTHER_DEFAULTS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "Gemma4UnifiedForConditionalGeneration": {
            "hidden_size_per_layer_input": 0,
            "max_position_embeddings": 262_144,
            "sliding_window": 1024,
        },
        "Qwen3VLForConditionalGeneration": {"max_position_embeddings": 128_000, "rope_theta": 500_000},
    }
)
# Fields that the whole model has and the text model reads.
_SHARED = ("dtype", "torch_dtype", "eos_token_id", "tie_word_embeddings", "quantization_config")
# Prefixes of tensors, of newer and older checkpoints: those of the text model with its own, and the others.
_TEXT = {"model.language_model.": "model.", "language_model.model.": "model.", "language_model.lm_head.": "lm_head."}
_IMAGES = (
    *("model.vision_tower.", "model.multi_modal_projector.", "vision_tower.", "multi_modal_projector."),
    *("model.visual.", "visual."),
    *("model.embed_vision.", "model.vision_embedder.", "model.audio_tower.", "model.embed_audio."),
)


def text_fields(where: str, fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of config.json as the text model would have them; those of a model for text as they are.

    Raises ModelError if a model for text and images does not say what its text model is.
    """
    named = fields.get("architectures")
    names = named if isinstance(named, list) else ()  # whatever else is there is refused later
    whole = next((name for name in TEXT_MODELS if name in names), None)
    if whole is None:
        return fields
    text = checked_fields(where, fields, {"text_config": OBJECT}).get("text_config")
    if text is None:
        raise ModelError(f"{where}: text_config is missing, which a {whole} needs.")
    shared = {name: fields[name] for name in _SHARED if fields.get(name) is not None}
    architecture = _OTHER_TEXT.get((whole, str(text.get("model_type"))), TEXT_MODELS[whole])
    return {**_OTHER_DEFAULTS.get(whole, {}), **text, **shared, "architectures": [architecture]}


def text_name(name: str) -> str | None:
    """The text model's name of a tensor of the whole model; None if only images or sounds need it."""
    prefix = next((prefix for prefix in _TEXT if name.startswith(prefix)), None)
    if prefix is not None:
        return _TEXT[prefix] + name.removeprefix(prefix)
    return None if name.startswith(_IMAGES) else name
