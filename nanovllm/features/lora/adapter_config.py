"""adapter_config.json: what PEFT wrote about an adapter. What would change its meaning is refused by name."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanovllm.data.json_fields import (
    FLAG,
    LIST,
    NULL,
    OBJECT,
    TEXT,
    checked_fields,
    integer,
    list_of,
    number,
    one_of,
    read_json_object,
)
from nanovllm.errors import ModelError, quoted

CONFIG = "adapter_config.json"
MOST_RANK = 2**15
MOST_LAYERS = 2**16

FIELDS = {
    "peft_type": one_of(("LORA",)),
    "task_type": one_of(("CAUSAL_LM",)) | NULL,
    "r": integer(1, MOST_RANK),
    "lora_alpha": number(0),
    "use_rslora": FLAG | NULL,
    "target_modules": TEXT | LIST | NULL,
    "layers_to_transform": integer(0) | list_of(integer(0), MOST_LAYERS) | NULL,
    "rank_pattern": OBJECT | NULL,
    "alpha_pattern": OBJECT | NULL,
    "bias": TEXT | NULL,
    "init_lora_weights": TEXT | FLAG | NULL,
}
MERGE = "merge the adapter into the checkpoint with PEFT's merge_and_unload()"
# Fields that must be unset, with the reason. PEFT's other methods add terms that the engine does not compute.
REFUSED: Mapping[str, str] = {
    "use_dora": f"DoRA scales the model's own weights too; {MERGE}",
    "lora_bias": f"only adapters without biases are applied; {MERGE}",
    "modules_to_save": f"modules that were trained in full are no low-rank addition; {MERGE}",
    "fan_in_fan_out": "the linear layers of the model families are not transposed; convert the adapter",
    "trainable_token_indices": f"only linear layers are adapted, not the embedding; {MERGE}",
    "target_parameters": f"only linear layers are adapted; {MERGE}",
    "layer_replication": "the model has its layers once; expand the checkpoint itself",
    "alora_invocation_tokens": "an adapter applies to all tokens of a request",
    "use_qalora": f"only plain LoRA is applied; {MERGE}",
    "use_bdlora": f"only plain LoRA is applied; {MERGE}",
    "arrow_config": "each request names its adapter",
    "megatron_config": f"only PEFT's own layers are read; {MERGE}",
}
# They concern how the adapter was trained or found.
WITHOUT_EFFECT = (
    "auto_mapping",
    "base_model_name_or_path",
    "corda_config",
    "ensure_weight_tying",
    "eva_config",
    "exclude_modules",
    "inference_mode",
    "layers_pattern",
    "loftq_config",
    "lora_dropout",
    "lora_ga_config",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
)
OWN_WEIGHTS = ("pissa", "olora", "corda", "loftq", "lora_ga")  # these ways to begin a training change the model
UNTRAINABLE = ("embed_tokens", "lm_head")


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """What determines an adapter's numbers, besides its tensors.

    targets: names of modules, or the ends of names; None if a pattern chose them. layers: None for all. The patterns
    give the rank or alpha of modules by their name or its end.
    """

    rank: int
    alpha: float
    use_rslora: bool
    targets: Sequence[str] | None
    layers: frozenset[int] | None
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]

    def rank_of(self, module: str) -> int:
        return int(_matched(self.rank_pattern, module, self.rank))

    def scale_of(self, module: str) -> float:
        """What B A x is multiplied by: alpha / r, or alpha / sqrt(r) with rank-stabilized LoRA (arXiv:2312.03732)."""
        alpha, rank = _matched(self.alpha_pattern, module, self.alpha), self.rank_of(module)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def targets_module(self, module: str) -> bool:
        """Whether the config names the module; False if a pattern chose the modules."""
        layer = int(module.split(".")[2])
        in_layers = self.layers is None or layer in self.layers
        return in_layers and any(_names(target, module) for target in self.targets or ())


def read_adapter_config(path: Path) -> AdapterConfig:
    """The checked content of adapter_config.json. Raises ModelError, with the field, for what cannot be applied."""
    content = read_json_object(path)
    found = checked_fields(path, content, FIELDS)
    for name in ("peft_type", "r", "lora_alpha"):
        if name not in found:
            raise ModelError(f"{path} lacks {name}: save the adapter with PEFT's save_pretrained().")
    _refuse(path, content)
    targets = found.get("target_modules")
    if isinstance(targets, list) and not all(isinstance(target, str) for target in targets):
        raise ModelError(f"{path}: target_modules={quoted(targets)}: must be names of modules.")
    untrainable = [name for name in targets or () if name.rpartition(".")[2] in UNTRAINABLE]
    if isinstance(targets, list) and untrainable:
        found_one = quoted(untrainable[0])
        raise ModelError(f"{path}: target_modules names {found_one}: only linear layers are adapted; {MERGE}.")
    layers = found.get("layers_to_transform")
    layers = [layers] if isinstance(layers, int) else layers
    return AdapterConfig(
        rank=found["r"],
        alpha=found["lora_alpha"],
        use_rslora=bool(found.get("use_rslora")),
        targets=targets if isinstance(targets, list) else None,
        layers=frozenset(layers) if layers is not None else None,
        rank_pattern=_pattern(path, "rank_pattern", found, integer(1, MOST_RANK)),
        alpha_pattern=_pattern(path, "alpha_pattern", found, number(0)),
    )


def _refuse(path: Path, content: Mapping[str, Any]) -> None:
    for name, reason in REFUSED.items():
        if content.get(name):
            raise ModelError(f"{path}: {name}={quoted(content[name])}: not supported: {reason}.")
    bias, init = content.get("bias") or "none", content.get("init_lora_weights")
    if bias != "none":
        raise ModelError(
            f"{path}: bias={quoted(bias)}: not supported: only adapters without biases are applied; {MERGE}."
        )
    if isinstance(init, str) and init.lower().startswith(OWN_WEIGHTS):
        raise ModelError(
            f"{path}: init_lora_weights={quoted(init)}: not supported: it changes the model's own weights; save the "
            "adapter with PEFT's path_initial_model_for_weight_conversion."
        )
    for name, value in content.items():
        if name not in FIELDS and name not in REFUSED and name not in WITHOUT_EFFECT and value:
            raise ModelError(
                f"{path}: {quoted(name)}={quoted(value)}: not supported: only plain LoRA is applied; {MERGE}."
            )


def _pattern(path: Path, name: str, found: Mapping[str, Any], rule: Any) -> dict[str, Any]:
    """A pattern by plain names. PEFT takes regular expressions, of which these are the ones that it writes itself."""
    pattern = {key.removeprefix("^"): value for key, value in (found.get(name) or {}).items()}
    for key in pattern:
        if not re.fullmatch(r"\w+(\.\w+)*", key):
            raise ModelError(f"{path}: {name} has {quoted(key)}: not supported: only names of modules are read.")
    return checked_fields(f"{path}: {name}", pattern, dict.fromkeys(pattern, rule))


def _matched(pattern: Mapping[str, float], module: str, default: float) -> float:
    """The value of the first key that names the module, as in PEFT."""
    return next((value for key, value in pattern.items() if _names(key, module)), default)


def _names(name: str, module: str) -> bool:
    """Whether `name` is the module's, or whole parts of its end."""
    return module == name or module.endswith(f".{name}")
