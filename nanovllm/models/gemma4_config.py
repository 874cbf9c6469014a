"""What the config of a Gemma 4 says of its layers, which differ from each other, and what contradicts itself there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nanovllm.errors import ConfigError, ModelError, quoted
from nanovllm.layers.build_context import BuildContext
from nanovllm.models.config_fields import FULL, head_dim_of, kv_heads_of, layer_windows

_FULL_ONLY = (
    "layers with full attention may share another head_dim and num_key_value_heads, and no other layer anything"
)
_NO_SKIP: tuple[str, list[str]] = ("skip", [])  # what Transformers adds to the config of a layer


@dataclass(frozen=True, slots=True)
class Gemma4Layer:
    """What sets a layer apart from the others."""

    index: int
    window: int | None  # keys that a query sees, its own included; None: all
    kv_heads: int
    head_dim: int
    # The layer whose keys and values several layers read, this one among them; None: no other does.
    kv_owner: int | None

    @property
    def has_keys(self) -> bool:
        """Whether the layer has keys and values of its own."""
        return self.kv_owner in (None, self.index)


def gemma4_layers(config: Any) -> Sequence[Gemma4Layer]:
    """All layers. Raises ModelError for what contradicts itself."""
    owners = _kv_owners(config)
    _check_own_inputs(config)
    full = _full_heads(config)
    local = (kv_heads_of(config), head_dim_of(config))
    return [
        Gemma4Layer(index, window, *(full if window is None else local), owners[index])
        for index, window in enumerate(layer_windows(config))
    ]


def has_experts(config: Any) -> bool:
    """Whether layers have experts beside their MLP. Raises ModelError if the config does not say which."""
    if not getattr(config, "enable_moe_block", False):
        return False
    for name in ("num_experts", "top_k_experts", "moe_intermediate_size"):
        if not getattr(config, name):
            raise ModelError(f"enable_moe_block=true needs {name} above 0, but it is {getattr(config, name)}.")
    if config.top_k_experts > config.num_experts:
        raise ModelError(f"top_k_experts={config.top_k_experts} is above num_experts={config.num_experts}.")
    return True


def own_input_size(config: Any) -> int:
    """Width of the input that each layer has of its own; 0: there is none."""
    return int(getattr(config, "hidden_size_per_layer_input", 0))


def check_ranks(config: Any, layers: Sequence[Gemma4Layer], build: BuildContext) -> None:
    """Raise ConfigError unless every rank has as many heads of a layer as the others."""
    if build.group is None:
        return
    heads = config.num_attention_heads
    counts = dict.fromkeys(layer.kv_heads for layer in layers)
    of_ranks = [build.heads_of_ranks(heads, kv_heads) for kv_heads in counts]
    num_queries = {len(queries) for ranks in of_ranks for queries, _ in ranks}
    if len(num_queries) > 1 or any(len({len(keys) for _, keys in ranks}) > 1 for ranks in of_ranks):
        raise ConfigError(
            f"tensor_parallel_size={build.num_ranks}: every rank must have as many of a layer's {heads} heads, and of "
            f"its KV heads, {kv_heads_of(config)} or {_full_heads(config)[0]}; take another number of ranks"
        )


def _kv_owners(config: Any) -> list[int | None]:
    """Of each layer the one whose keys and values several layers read, as in `Gemma4Layer`."""
    kinds = config.layer_types
    shared = config.num_kv_shared_layers
    own = kinds[: len(kinds) - shared]
    if shared >= len(kinds) or set(kinds[len(own) :]) - set(own):
        raise ModelError(
            f"num_kv_shared_layers={shared}: of each kind of layers that have no keys and values, "
            f"one of the others must have them, but these are layers of {quoted(', '.join(kinds))}."
        )
    last = {kind: index for index, kind in enumerate(own)}
    read = [last[kind] for kind in kinds[len(own) :]]
    return [index if index in read else None for index in range(len(own))] + read


def _check_own_inputs(config: Any) -> None:
    vocab = getattr(config, "vocab_size_per_layer_input", 0)
    if own_input_size(config) and vocab < config.vocab_size:
        raise ModelError(f"vocab_size_per_layer_input={vocab} must not be below vocab_size={config.vocab_size}.")


def _full_heads(config: Any) -> tuple[int, int]:
    """Of layers with full attention: the number of KV heads and the size of a head. Transformers has both by layer."""
    of_all = vars(config)
    heads: set[tuple[int, int]] = set()
    for kind, layer in zip(config.layer_types, config.per_layer_config, strict=True):
        others = {
            name for name, value in vars(layer).items() if of_all.get(name) != value and (name, value) != _NO_SKIP
        }
        if kind == FULL:
            others -= {"num_key_value_heads", "head_dim"}
            heads.add((layer.num_key_value_heads, layer.head_dim))
        if others:
            raise ModelError(
                f"per_layer_config is not supported with {quoted(sorted(others))} of a layer; {_FULL_ONLY}."
            )
    if len(heads) != 1:
        raise ModelError(
            f"per_layer_config gives layers with full attention other heads than each other; {_FULL_ONLY}."
        )
    kv_heads, head_dim = heads.pop()
    if config.num_attention_heads % kv_heads or head_dim % 2:
        raise ModelError(
            f"Layers with full attention have {kv_heads} KV heads of {head_dim}: "
            f"num_attention_heads={config.num_attention_heads} must be a multiple of them, and their size even."
        )
    return kv_heads, head_dim
