"""The files of an adapter in PEFT's format, checked against the model from headers alone: no tensor's data is read.

Whatever would change the meaning of the low-rank additions is refused by name. An adapter that was trained on a model
for images and text uses that model's names, which are mapped like those of its checkpoint. What it adds to the parts
that only images or sounds pass has no effect on text and is left out.
"""

from __future__ import annotations

import logging
import math
import os
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nanovllm.data import json_fields as rules
from nanovllm.data.batch import Adapter
from nanovllm.data.json_fields import FLAG, NULL, OBJECT, TEXT, Field, checked_fields, read_json_object
from nanovllm.data.network import Network
from nanovllm.errors import ConfigError, ModelError, RequestError, quoted, told
from nanovllm.formats.checkpoint import StoredTensor, headers, some_of
from nanovllm.layers.linear_method import FLOATS
from nanovllm.lora_request import LoRARequest
from nanovllm.models.hf_config import TEXT_ARCHITECTURES, text_name

logger = logging.getLogger(__name__)

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."  # PEFT's, before the model's own names
TEXT_PREFIX = "model."  # of the text model's layers, in their own names
TENSOR = re.compile(re.escape(PREFIX) + r"(.+)\.lora_(A|B)\.weight")
MERGE = "merge the adapter into the checkpoint with PEFT's merge_and_unload()"
OWN_WEIGHTS = ("pissa", "olora", "corda", "loftq", "lora_ga")  # initializations that change the model's own weights
RANK = rules.integer(1, 2**15)
ALPHA = rules.number(0)
FIELDS = {
    "peft_type": rules.one_of(("LORA",)),
    "task_type": rules.one_of(("CAUSAL_LM",)) | NULL,
    "r": RANK,
    "lora_alpha": ALPHA,
    "use_rslora": FLAG | NULL,
    "target_modules": TEXT | rules.list_of(TEXT, 2**16) | NULL,
    "layers_to_transform": rules.integer(0) | rules.list_of(rules.integer(0), 2**16) | NULL,
    "rank_pattern": OBJECT | NULL,
    "alpha_pattern": OBJECT | NULL,
    "bias": rules.one_of(("none",)) | NULL,
    "init_lora_weights": Field(
        "a way that leaves the model's own weights alone; save it with path_initial_model_for_weight_conversion",
        lambda value: not isinstance(value, str) or not value.lower().startswith(OWN_WEIGHTS),
    ),
}
# How the adapter was trained or found. Any other field that is set may add terms that the engine does not compute.
WITHOUT_EFFECT = frozenset(
    (
        *("auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config"),
        *("exclude_modules", "inference_mode", "layers_pattern", "loftq_config", "lora_dropout", "lora_ga_config"),
        *("megatron_core", "peft_version", "qalora_group_size", "revision", "runtime_config"),
    )
)


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """What determines an adapter's numbers, besides its tensors. Names are those of the model that it was trained on.

    The keys of patterns are names of modules or ends of names; after ^ they are whole names.
    """

    rank: int
    alpha: float
    use_rslora: bool
    targets: Sequence[str] | None  # names of modules, or ends of names; None if something else chooses modules too
    layers: frozenset[int] | None  # None: all
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]

    def rank_of(self, module: str) -> int:
        return int(_matched(self.rank_pattern, module, self.rank))

    def scale_of(self, module: str) -> float:
        """What B A x is multiplied by: alpha / r, or alpha / sqrt(r) with rank-stabilized LoRA (arXiv:2312.03732)."""
        alpha = _matched(self.alpha_pattern, module, self.alpha)
        rank = self.rank_of(module)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def targets_module(self, module: str) -> bool:
        """Whether `targets` and `layers` say that the file has tensors of the module."""
        layer = int(re.findall(r"\.(\d+)\.", module)[0])
        in_layers = self.layers is None or layer in self.layers
        return in_layers and any(_names(target, module) for target in self.targets or ())


@dataclass(frozen=True, slots=True)
class ModuleAdapter:
    """An adapter's part for one module: y += scale * B A x, with A [rank, in] and B [out, rank]."""

    module: str
    trained: str  # the module's name in the model that the adapter was trained on
    rank: int
    scale: float

    @property
    def a(self) -> str:
        """The name of A in the file."""
        return f"{PREFIX}{self.trained}.lora_A.weight"

    @property
    def b(self) -> str:
        """The name of B in the file."""
        return f"{PREFIX}{self.trained}.lora_B.weight"


class AdapterRegistry:
    """Finds the adapters that requests name, and gives each content of files a number of its own.

    Path and stamp of the files tell contents apart. Because of the number, a request shares blocks of the prefix cache,
    and a copy on the device, only with requests that named the same content. Each content is checked once. See
    `data.batch.Adapters`.
    """

    def __init__(self, network: Network, max_lora_rank: int) -> None:
        self._network = network
        self._max_lora_rank = max_lora_rank
        self._known: dict[tuple[str, tuple[int, ...]], Adapter] = {}
        self._paths: dict[int, str] = {}  # by lora_int_id
        self._lock = threading.Lock()  # requests are made in any thread

    def find(self, lora_request: object) -> Adapter:
        """The adapter of a `LoRARequest`. Raises RequestError."""
        if not isinstance(lora_request, LoRARequest):
            raise RequestError(
                f"lora_request={quoted(lora_request)}: must be a LoRARequest of nanovllm.lora_request, or None"
            )
        try:
            with self._lock:
                return self._find(lora_request)
        except (ModelError, ConfigError) as error:  # ConfigError: the file cannot be mapped
            sentence = str(error).removesuffix(".")
            raise RequestError(f"the adapter {quoted(lora_request.lora_name)} cannot be used: {sentence}") from error

    def _find(self, lora_request: LoRARequest) -> Adapter:
        path = _resolved(lora_request.lora_path)
        stamp = stamp_of(path)
        other = self._paths.get(lora_request.lora_int_id, str(path))
        if other != str(path) and not lora_request.load_inplace:
            raise RequestError(
                f"lora_int_id={lora_request.lora_int_id} of {quoted(lora_request.lora_name)} belongs to the adapter in "
                f"{other}: give every adapter an id of its own, or load_inplace=True to replace it"
            )
        adapter = self._known.get((str(path), stamp))
        if adapter is None:
            _tell_left_out(path / WEIGHTS, self._network)
            read_adapter(path, self._network, self._max_lora_rank)
            adapter = Adapter(len(self._known) + 1, lora_request, path, stamp)
            self._known[str(path), stamp] = adapter
        self._paths[lora_request.lora_int_id] = str(path)
        return replace(adapter, request=lora_request)


def _resolved(path: str) -> Path:
    try:
        return Path(path).expanduser().resolve()
    except (OSError, RuntimeError, ValueError) as error:  # such as ~ before the name of an unknown user
        raise ModelError(f"{quoted(path)} is not a path: {told(error)}.") from error


def stamp_of(directory: Path) -> tuple[int, ...]:
    """Sizes, times and inodes of an adapter's files, which change with their content. Raises ModelError."""
    if not os.path.isdir(directory):
        raise ModelError(f"{directory} is not a directory: give the local directory of an adapter in PEFT's format.")
    stamp: list[int] = []
    for name in (CONFIG, WEIGHTS):
        try:
            status = (directory / name).stat()
        except OSError:
            raise ModelError(f"{directory} has no {name}: save it with PEFT's save_pretrained().") from None
        stamp += (status.st_size, status.st_mtime_ns, status.st_ino)
    return tuple(stamp)


def check_unchanged(adapter: Adapter) -> None:
    """Raise ModelError if the files have changed since the adapter was found."""
    if stamp_of(adapter.directory) != adapter.stamp:
        raise ModelError(f"the files in {adapter.directory} have changed since the request was added: send it again.")


def read_adapter(directory: Path, network: Network, max_lora_rank: int) -> dict[str, ModuleAdapter]:
    """The parts of the adapter in a directory, by the names of their modules.

    network: of the model, or of a tensor-parallel rank's part of it. Raises ModelError, which names the field or
    tensor, if the adapter does not fit the model.
    """
    config = _read_config(directory / CONFIG)
    path = directory / WEIGHTS
    stored = headers(path)
    prefix = _check_names(path, network, config, stored)
    modules: dict[str, ModuleAdapter] = {}
    for module, shape in network.modules.items():
        out_size, in_size = shape.whole
        trained = prefix + module.removeprefix(TEXT_PREFIX)
        adapter = ModuleAdapter(module, trained, config.rank_of(trained), config.scale_of(trained))
        if adapter.a not in stored and adapter.b not in stored and not config.targets_module(trained):
            continue
        if adapter.rank > max_lora_rank:
            rule = f"max_lora_rank={max_lora_rank}: raise max_lora_rank to {adapter.rank}"
            raise ModelError(f"{directory}: {module} has rank {adapter.rank}, and {rule}.")
        _check_tensor(path, adapter.a, (adapter.rank, in_size), stored)
        _check_tensor(path, adapter.b, (out_size, adapter.rank), stored)
        modules[module] = adapter
    return modules


def _read_config(path: Path) -> AdapterConfig:
    content = read_json_object(path)
    fields = checked_fields(path, content, FIELDS)
    for name in ("peft_type", "r", "lora_alpha"):
        if name not in fields:
            raise ModelError(f"{path} lacks {name}: save the adapter with PEFT's save_pretrained().")
    for name, value in content.items():
        if value and name not in FIELDS and name not in WITHOUT_EFFECT:
            raise ModelError(
                f"{path}: {quoted(name)}={quoted(value)}: not supported: only plain LoRA is applied; {MERGE}."
            )
    targets = fields.get("target_modules")
    layers = fields.get("layers_to_transform")
    layers = [layers] if isinstance(layers, int) else layers
    says_all = isinstance(targets, list) and not content.get("exclude_modules")
    return AdapterConfig(
        rank=fields["r"],
        alpha=fields["lora_alpha"],
        use_rslora=bool(fields.get("use_rslora")),
        targets=targets if says_all else None,
        layers=frozenset(layers) if layers else None,
        rank_pattern=_pattern(path, "rank_pattern", fields, RANK),
        alpha_pattern=_pattern(path, "alpha_pattern", fields, ALPHA),
    )


def _pattern(path: Path, name: str, fields: Mapping[str, Any], rule: Field) -> dict[str, Any]:
    """A pattern whose keys are names. PEFT also takes regular expressions, but writes names itself."""
    pattern = fields.get(name) or {}
    for key in pattern:
        if not re.fullmatch(r"\^?\w+(\.\w+)*", key):
            raise ModelError(f"{path}: {name} has {quoted(key)}: not supported: only names of modules are read.")
    return checked_fields(f"{path}: {name}", pattern, dict.fromkeys(pattern, rule))


def _matched(pattern: Mapping[str, float], module: str, default: float) -> float:
    """The value of the first key that names the module, as in PEFT."""
    return next((value for key, value in pattern.items() if _names(key, module)), default)


def _names(name: str, module: str) -> bool:
    """Whether `name` is the module's name, with or without ^, or its last parts."""
    return module == name.removeprefix("^") or module.endswith(f".{name}")


def _check_names(path: Path, network: Network, config: AdapterConfig, stored: Mapping[str, StoredTensor]) -> str:
    """Raise ModelError for tensors that are no low-rank addition to a linear layer of the model.

    Returns what the names of the text model's layers begin with in the model that the adapter was trained on.
    """
    if not stored:
        raise ModelError(f"{path} holds no tensors: save the adapter anew.")
    prefixes = dict[str, str]()
    for name in stored:
        match = TENSOR.fullmatch(name)
        if match is None:
            raise ModelError(f"{path} holds {quoted(name)}: not supported: only lora_A and lora_B are read; {MERGE}.")
        trained = match[1]
        module = _text_module(match[1], network)
        if module is None:
            continue
        if module not in network.modules:
            raise ModelError(
                f"{path} holds {quoted(name)}: a {network.architecture} of {network.num_layers} layers has no such "
                f"linear layer to adapt; take an adapter of this model, or {MERGE}."
            )
        if config.targets is not None and not config.targets_module(trained):
            raise ModelError(f"{path} holds {quoted(name)}: target_modules of {CONFIG} does not name it.")
        prefixes.setdefault(trained.removesuffix(module.removeprefix(TEXT_PREFIX)), name)
    if not prefixes:
        raise ModelError(f"{path} adapts what only images or sounds pass, {some_of(stored)}: text needs none of it.")
    if len(prefixes) > 1:
        one, other, *_ = map(quoted, prefixes.values())
        raise ModelError(f"{path} holds {one} and {other}: names of two models; save the adapter anew.")
    return next(iter(prefixes))


def _text_module(trained: str, network: Network) -> str | None:
    """The text model's name of a module of the model that the adapter was trained on; None if no text needs it."""
    return text_name(trained) if network.architecture in TEXT_ARCHITECTURES else trained


def _tell_left_out(path: Path, network: Network) -> None:
    matches = {name: TENSOR.fullmatch(name) for name in headers(path)}
    unread = [name for name, match in matches.items() if match is not None and _text_module(match[1], network) is None]
    if unread:
        logger.info("%s: tensors that text does not need are left out (%s)", path, some_of(unread))


def _check_tensor(path: Path, name: str, shape: tuple[int, int], stored: Mapping[str, StoredTensor]) -> None:
    if name not in stored:
        raise ModelError(f"{path} lacks {name}, which {CONFIG} and its other tensors need: save the adapter anew.")
    if stored[name].shape != shape:
        sizes = f"expected {list(shape)}, found {list(stored[name].shape)}"
        raise ModelError(f"{path}: {name} {sizes}: take an adapter of this model.")
    if stored[name].dtype not in FLOATS:
        raise ModelError(f"{path}: {name} is {stored[name].dtype}: not read; read are {', '.join(FLOATS)}.")
