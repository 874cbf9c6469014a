"""Arguments by name: which are this engine's own, and what becomes of others that vLLM has.

Values of vLLM's that mean what the engine does anyway are accepted; all others are refused with the reason. The tables
of names and reasons are in `nanovllm.vllm_names`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

from nanovllm import vllm_names
from nanovllm.errors import quoted, unknown_name_message
from nanovllm.vllm_names import Table

# vLLM's names of engine arguments that this engine has under a name of its own.
ENGINE_ALIASES: Mapping[str, str] = MappingProxyType(
    {"block_size": "kvcache_block_size", "num_gpu_blocks_override": "num_gpu_blocks"}
)


def own_arguments(
    what: str, given: Mapping[str, Any], known: Collection[str], table: str, error: type[Exception]
) -> dict[str, Any]:
    """The arguments that this engine has. vLLM's others are left out where they mean what the engine does anyway.

    what: such as "engine argument"; table: of `vllm_names`. Raises `error` for other values, and for unknown names with
    the nearest valid one.
    """
    others: Table = getattr(vllm_names, table)
    for name, value in given.items():
        if name in known or (name in others and others[name].accepts(value)):
            continue
        if name not in others:
            raise error(unknown_name(what, name, [*known, *others], listed=known))
        raise error(f"{name}={quoted(value)}: not supported: {others[name].reason}")
    return {name: value for name, value in given.items() if name in known}


def refusal(name: str) -> str | None:
    """What is said of a name wherever it is given, such as guided_json, which people try in many places."""
    reason = vllm_names.EVERYWHERE.get(name)
    return None if reason is None else f"not supported: {reason}"


def unknown_name(what: str, name: str, known: Collection[str], listed: Collection[str] | None = None) -> str:
    """The message for a name that is not known here: `refusal`, or the most similar one that is."""
    reason = refusal(name)
    return unknown_name_message(what, name, known, listed) if reason is None else f"{name}: {reason}"
