"""Reading the config of a Hugging Face model directory or GGUF file: which network it is, where its sequences end.

Transformers' config classes read config.json, as `AutoConfig` with trust_remote_code=False does: code in a model
directory is never run. The files are not trusted: sizes are checked before a config class sees them, and a family
refuses the values that it does not compute.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields as fields_of
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from nanovllm.data.json_fields import checked_fields, read_json_object
from nanovllm.data.network import DTYPE_NAMES
from nanovllm.errors import ConfigError, ModelError, quoted, told, unknown_name_message
from nanovllm.formats.config_fields import GENERATION_FIELDS, NETWORK_FIELDS
from nanovllm.formats.hub import MODELOPT, is_gguf
from nanovllm.layers.causal_lm import CausalLM
from nanovllm.models.network_config import NetworkConfig
from nanovllm.models.registry import ARCHITECTURES

if TYPE_CHECKING:  # imports torch
    from nanovllm.formats.gguf.model import GgufConfig

# Fields of generation_config.json and the sampling parameters that they set.
_SAME_NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
SAMPLING_DEFAULTS = {**{name: name for name in _SAME_NAMES}, "max_new_tokens": "max_tokens"}
NO_OVERRIDES: Mapping[str, Any] = MappingProxyType({})
_DTYPES = ("dtype", "torch_dtype")  # the newer name and the older one
# Fields that a config class is given although every class has an attribute of that name. The others are methods, or say
# how Transformers runs a model.
_GIVEN = ("rope_scaling", "per_layer_config")
# Fields of a larger model's config that its text model reads too.
_SHARED = (*_DTYPES, "eos_token_id", "tie_word_embeddings", "quantization_config")
WHOLE_MODELS = tuple(dict.fromkeys(name for model in ARCHITECTURES.values() for name in model.wholes))
# Architectures that can be the text model of a larger one, whose tensors then have other names.
TEXT_ARCHITECTURES = frozenset(name for name, model in ARCHITECTURES.items() if model.wholes)
# Prefixes of tensors, of newer and older checkpoints: those of the text model with its own, and the others.
_TEXT = {"model.language_model.": "model.", "language_model.model.": "model.", "language_model.lm_head.": "lm_head."}
_IMAGES = (
    *("model.vision_tower.", "model.multi_modal_projector.", "vision_tower.", "multi_modal_projector."),
    *("model.visual.", "visual."),
    *("model.embed_vision.", "model.vision_embedder.", "model.audio_tower.", "model.embed_audio."),
)


class ModelConfig:
    """What a model directory or GGUF file says about its network and its use. Each file is read once.

    network_config: what `model_dir`/config.json describes, with the fields of `overrides` in the place of its own.
    Raises ModelError on a missing directory or file, broken JSON, and everything that is not supported, with what is;
    of generation_config.json when it is asked for.
    """

    def __init__(
        self, model_dir: str | Path, overrides: Mapping[str, Any] = NO_OVERRIDES, generation_config: str | Path = "auto"
    ) -> None:
        """generation_config: as the engine argument."""
        self._model = Path(model_dir)
        self._generation_config = generation_config
        self._file = _read_config(self._model, overrides)
        self._network = _Network(self._file)
        self.network_config = self._network.network_config

    @property
    def model_type(self) -> str:
        """The family's name in Transformers, which selects its tokenizer class."""
        return self._network.model.model_types[0]

    @cached_property
    def _generation(self) -> Mapping[str, Any]:
        """The fields of generation_config.json."""
        if self._generation_config not in ("auto", "vllm"):
            return _generation_fields(Path(self._generation_config))
        if self._file.gguf is not None:
            return checked_fields(self._model, self._file.gguf.generation, GENERATION_FIELDS)
        return _generation_fields(self._model)

    def eos_token_ids(self) -> tuple[int, ...]:
        """Every end-of-sequence id of config.json and generation_config.json, in that order, each once.

        With generation_config "vllm", the model's own file still counts here, as in vLLM. If neither file has the key,
        the default of Transformers' config class applies (Llama and Mistral: 2).
        """
        sources = [self._file.fields, self._generation]
        values = [source["eos_token_id"] for source in sources if "eos_token_id" in source]
        if not values:
            values = [getattr(self._network.config, "eos_token_id", None)]
        return tuple(dict.fromkeys(token for value in values for token in _token_ids(value)))

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
        own = {} if self._generation_config == "vllm" else self._generation
        recommended = {**own, **overrides}
        return {name: recommended[key] for key, name in SAMPLING_DEFAULTS.items() if recommended.get(key) is not None}


def load_network_config(model_dir: str | Path, overrides: Mapping[str, Any] = NO_OVERRIDES) -> NetworkConfig:
    """`ModelConfig.network_config`."""
    return ModelConfig(model_dir, overrides).network_config


def read_network_config(config: str | Path, overrides: Mapping[str, Any] = NO_OVERRIDES) -> NetworkConfig:
    """As `load_network_config`; `config` may also be a single config file. Raises ModelError as `ModelConfig`."""
    path = Path(config)
    if not path.is_file() or is_gguf(path):
        return load_network_config(path, overrides)
    return _Network(_with_overrides(path, read_json_object(path), overrides)).network_config


def _generation_fields(directory: Path) -> dict[str, Any]:
    if is_gguf(directory):
        return checked_fields(directory, _read_gguf(directory).generation, GENERATION_FIELDS)
    path = directory / "generation_config.json"
    return checked_fields(path, read_json_object(path), GENERATION_FIELDS) if path.is_file() else {}


def _read_gguf(path: Path) -> GgufConfig:
    from nanovllm.formats.gguf.model import read_config  # imports torch

    return read_config(path)


class _ConfigFile(NamedTuple):
    """The fields of a config.json, those of its text model if it is of a larger one."""

    where: str  # begins messages
    fields: Mapping[str, Any]
    whole_type: str | None = None  # the model type of the larger model
    gguf: GgufConfig | None = None  # what else a GGUF file says
    added: tuple[str, ...] = ()  # names of hf_overrides that the file does not have


def _read_config(model: Path, overrides: Mapping[str, Any]) -> _ConfigFile:
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
    path: Path, content: Mapping[str, Any], overrides: Mapping[str, Any], gguf: GgufConfig | None = None
) -> _ConfigFile:
    """The config of `path` with those of `overrides` in the place of its own fields.

    Of a larger model, the text model's fields are changed, whether `overrides` has them alone or under text_config.
    """
    where = str(path)
    whole_type = None
    names = content.get("architectures")
    whole = next((name for name in WHOLE_MODELS if isinstance(names, list) and name in names), None)
    if whole is not None:
        fields = checked_fields(where, content, NETWORK_FIELDS)
        for name in ("model_type", "text_config"):
            if fields.get(name) is None:
                raise ModelError(f"{where}: {name} is missing, which a {whole} needs.")
        whole_type = fields["model_type"]
        shared = {name: fields[name] for name in (*_SHARED, "architectures") if fields.get(name) is not None}
        content = {**fields["text_config"], **shared}
    added: tuple[str, ...] = ()
    if overrides:
        where = f"{path} with hf_overrides"
        if whole is not None:
            checked_fields(where, overrides, NETWORK_FIELDS)
            of_text = overrides.get("text_config") or {}
            overrides = {**{name: value for name, value in overrides.items() if name != "text_config"}, **of_text}
        added = tuple(name for name in overrides if name not in content)
        content = _overridden(content, overrides)
    checked_fields(where, content, NETWORK_FIELDS)
    if path.name == "config.json" and content.get("quantization_config") is None:
        _refuse_modelopt(path.with_name(MODELOPT))
    return _ConfigFile(where, content, whole_type, gguf, added)


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
    own = fields.get("rope_parameters")
    if not {"rope_scaling", "rope_parameters"} & overrides.keys():
        if isinstance(own, dict) and "rope_theta" in overrides:
            merged["rope_parameters"] = _with_theta(own, overrides["rope_theta"])
        return merged
    if isinstance(own, dict) and "full_attention" in own and "rope_parameters" not in overrides:
        return merged
    for name in {"rope_scaling", "rope_parameters"} - overrides.keys():
        merged.pop(name, None)
    theta = own.get("rope_theta") if isinstance(own, dict) else None
    if theta is not None and overrides.get("rope_theta") is None:
        merged["rope_theta"] = theta
    return merged


def _with_theta(rope: Mapping[str, Any], theta: Any) -> dict[str, Any]:
    """The newer form with the older form's rope_theta: that of full attention, where each kind of layer has its own."""
    full = rope.get("full_attention")
    if isinstance(full, dict):
        return {**rope, "full_attention": {**full, "rope_theta": theta}}
    return {**rope, "rope_theta": theta}


class _Network:
    """What a config file describes: its architecture, Transformers' config object of it, and the network."""

    def __init__(self, file: _ConfigFile) -> None:
        """Raises ModelError for what cannot be read or is not supported."""
        self.model = _model(file)
        with _quiet_transformers():
            self.config = _transformers_config(file, self.model)
            try:
                self.network_config = _network_config(file, self.model, self.config)
            except ModelError as error:
                raise ModelError(f"{file.where}: {error}") from None


def _model(file: _ConfigFile) -> type[CausalLM]:
    """The class of a config's architecture, and of a larger model by the type of its text model too."""
    names = file.fields.get("architectures") or []
    models = [model for name, model in ARCHITECTURES.items() if not {name, *model.wholes}.isdisjoint(names)]
    if not models:
        given = f"architectures={quoted(names)} is not supported" if names else "it names no architecture"
        raise ModelError(f"{file.where}: {given}; supported: {', '.join((*ARCHITECTURES, *WHOLE_MODELS))}.")
    types = {name: model for model in models for name in model.model_types}
    model_type = file.fields.get("model_type", models[0].model_types[0])
    if model_type in types:
        return types[model_type]
    if file.whole_type is not None:
        raise ModelError(
            f"{file.where}: text_config: model_type {quoted(model_type)} is not supported; take a checkpoint whose "
            f"text model has {' or '.join(map(repr, types))}."
        )
    raise ModelError(
        f"{file.where} contradicts itself: architecture {models[0].__name__} has model_type "
        f"{models[0].model_types[0]!r}, not {quoted(model_type)}."
    )


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Context without Transformers' warnings: values that are not computed are refused."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _transformers_config(file: _ConfigFile, model: type[CausalLM]) -> Any:
    """Transformers' config object of a network. Raises ModelError for what its class refuses."""
    from transformers import AutoConfig, PreTrainedConfig

    fields = {
        name: copy.deepcopy(value)  # which a config class changes
        for name, value in file.fields.items()
        if name in _GIVEN or not (name.startswith("_") or hasattr(PreTrainedConfig, name))
    }
    try:
        if file.whole_type is None:
            config = AutoConfig.for_model(model.model_types[0], **fields)
        else:
            fields |= {name: file.fields[name] for name in ("model_type",) if name in file.fields}
            config = AutoConfig.for_model(file.whole_type, text_config=fields).get_text_config()
        # Of a Gemma 4, whose layers differ in their heads: read without a layer, they are those of a window.
        config.allow_global_per_layer_attribute_access = True
    except Exception as error:  # the validators of config classes raise many types
        raise ModelError(f"{file.where}: Transformers' config class refuses it: {told(error)}") from None
    if (own_type := type(config).model_type) not in model.model_types:
        raise ModelError(
            f"{file.where} contradicts itself: a model of type {quoted(file.whole_type)} has a text model of type "
            f"{own_type!r}, not {model.model_types[0]!r}."
        )
    known = {*NETWORK_FIELDS, *(field.name for field in fields_of(config))} - {"text_config"}
    unknown = [name for name in file.added if name not in known]
    if unknown:
        advice = f"a {own_type} has none of that name, see Transformers' {type(config).__name__}"
        raise ModelError(f"{file.where}: {unknown_name_message('field', unknown[0], known, advice)}.")
    return config


def _network_config(file: _ConfigFile, model: type[CausalLM], config: Any) -> NetworkConfig:
    dtype = next((file.fields[name] for name in _DTYPES if file.fields.get(name) is not None), model.default_dtype)
    dtype = dtype.removeprefix("torch.")
    if dtype not in DTYPE_NAMES:
        raise ModelError(f"The dtype {quoted(dtype)} is not supported; supported: {', '.join(DTYPE_NAMES)}.")
    network = NetworkConfig(model.__name__, _plain(config), dtype)
    quantization = file.fields.get("quantization_config")
    if file.gguf is not None:
        network = _gguf_network(network, quantization, file.gguf)
    elif quantization is not None:
        network = _quantized(network, quantization, file.whole_type is not None)
    network.network  # noqa: B018 # built once, which refuses what is not computed
    return network


def _plain(config: Any) -> SimpleNamespace:
    """What a config object says. Ranks get it without importing Transformers' class, which takes 80 MiB in each."""
    values = _public(config, *type(config).attribute_map, "is_heterogeneous", "per_layer_config")
    layers = values["per_layer_config"]
    values["per_layer_config"] = layers and [SimpleNamespace(**_public(layer)) for layer in layers]
    return SimpleNamespace(**values)


def _public(config: Any, *others: str) -> dict[str, Any]:
    names = {*vars(config), *others}
    return {name: getattr(config, name, None) for name in names if not name.startswith("_")}


def _gguf_network(network: NetworkConfig, quantization: Mapping[str, Any] | None, gguf: GgufConfig) -> NetworkConfig:
    """The network with what a config.json cannot say. RoPE factors apply to RoPE as the file has it."""
    if quantization is not None:
        raise ModelError(
            f"quantization_config={quoted(quantization)}: a GGUF file has the types of its tensors instead."
        )
    return replace(network, method=gguf.method, rope_factors=gguf.rope_factors, is_gguf=True)


def _quantized(network: NetworkConfig, config: Mapping[str, Any], is_part: bool) -> NetworkConfig:
    """The network with the way in which its matrices are stored. Raises ModelError for a form that is not supported.

    is_part: of a larger model, whose names of modules the config has.
    """
    from nanovllm.formats.quantization import read_quantization

    prefixes = tuple((own, whole) for whole, own in _TEXT.items()) if is_part else ()
    return network.stored_as(read_quantization(config, network.dtype, prefixes))


def _token_ids(value: Any) -> list[int]:
    return value if isinstance(value, list) else [] if value is None else [value]


def text_name(name: str) -> str | None:
    """The text model's name of a tensor of the whole model; None if only images or sounds need it."""
    prefix = next((prefix for prefix in _TEXT if name.startswith(prefix)), None)
    if prefix is not None:
        return _TEXT[prefix] + name.removeprefix(prefix)
    return None if name.startswith(_IMAGES) else name
