"""Arguments by name: which are this engine's own, and what becomes of others that vLLM has.

Values of vLLM's that mean what the engine does anyway are accepted; all others are refused with the reason. The tables
of names and reasons are a side, `nanovllm.vllm_names`. Without it all names but the engine's own are unknown.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol, cast

from nanovllm.errors import quoted, unknown_name_message
from nanovllm.side_modules import find_side

# vLLM's names of engine arguments that this engine has under a name of its own.
ENGINE_ALIASES: Mapping[str, str] = MappingProxyType(
    {"block_size": "kvcache_block_size", "num_gpu_blocks_override": "num_gpu_blocks"}
)


@dataclass(frozen=True, slots=True)
class VllmName:
    """A name of vLLM's for something that this engine does not have.

    same: the values that mean what the engine does anyway; the first is vLLM's default. reason: completes "not
    supported: ..." for all other values.
    """

    same: tuple[Any, ...]
    reason: str

    def accepts(self, value: object) -> bool:
        return any(value is known or _equal(value, known) for known in self.same)


Table = Mapping[str, VllmName]


class VllmNames(Protocol):
    """vLLM's names that are not this engine's. LLM_METHODS: of the LLM, with the reasons.

    EVERYWHERE: names that are refused for the same reason as an argument, a flag, a sampling parameter or a field.
    """

    ENGINE_ARGUMENTS: Table
    SAMPLING_PARAMETERS: Table
    CALL_ARGUMENTS: Table
    ENGINE_CALL_ARGUMENTS: Table
    LLM_METHODS: Mapping[str, str]
    EVERYWHERE: Mapping[str, str]


def vllm_names() -> VllmNames | None:
    return cast("VllmNames | None", find_side("nanovllm.vllm_names"))


def own_arguments(
    what: str, given: Mapping[str, Any], known: Collection[str], table: str, error: type[Exception]
) -> dict[str, Any]:
    """The arguments that this engine has. vLLM's others are left out where they mean what the engine does anyway.

    what: such as "engine argument"; table: of `VllmNames`. Raises `error` for other values, and for unknown names with
    the nearest valid one.
    """
    others: Table = getattr(vllm_names(), table, {})
    for name, value in given.items():
        if name in known or (name in others and others[name].accepts(value)):
            continue
        if name not in others:
            raise error(unknown_name(what, name, [*known, *others], listed=known))
        raise error(f"{name}={quoted(value)}: not supported: {others[name].reason}")
    return {name: value for name, value in given.items() if name in known}


def refusal(name: str) -> str | None:
    """What is said of a name wherever it is given, such as guided_json, which people try in many places."""
    reason = getattr(vllm_names(), "EVERYWHERE", {}).get(name)
    return None if reason is None else f"not supported: {reason}"


def unknown_name(what: str, name: str, known: Collection[str], listed: Collection[str] | None = None) -> str:
    """The message for a name that is not known here: `refusal`, or the most similar one that is."""
    reason = refusal(name)
    return unknown_name_message(what, name, known, listed) if reason is None else f"{name}: {reason}"


def _equal(value: object, known: object) -> bool:
    if isinstance(value, bool) is not isinstance(known, bool):
        return False  # 1 is not True
    try:
        return bool(value == known)
    except Exception:  # from the object's own __eq__, such as an array's
        return False
