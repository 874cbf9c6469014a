"""vLLM's names that this engine lacks: other names of an argument, and values that say what the engine does anyway."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

from nanovllm.errors import quoted, unknown_name_message

Values = Mapping[str, tuple[Any, ...]]

# Engine arguments that this engine has under a name of its own.
ENGINE_ALIASES: Mapping[str, str] = MappingProxyType(
    {"block_size": "kvcache_block_size", "num_gpu_blocks_override": "num_gpu_blocks"}
)
# Arguments that scripts give to vLLM, and their values that say what this engine does anyway. The first is the default.
ENGINE_ARGUMENTS: Values = MappingProxyType(
    {
        "tokenizer_mode": ("auto", "hf"),
        "config_format": ("auto", "hf"),
        "model_impl": ("auto",),
        "runner": ("auto", "generate"),
        "task": ("auto", "generate"),
        "pipeline_parallel_size": (1,),
        "data_parallel_size": (1,),
        "enable_expert_parallel": (False,),
        "enable_chunked_prefill": (None, True),
        "async_scheduling": (None, True, False),
        "scheduling_policy": ("fcfs", "priority"),
        "logprobs_mode": ("raw_logprobs",),
        "cpu_offload_gb": (0,),
        "disable_sliding_window": (False,),
        "disable_custom_all_reduce": (False, True),
        "disable_log_stats": (False, True),
        "enable_sleep_mode": (False,),
        "limit_mm_per_prompt": (None, {}),
        "compilation_config": (None, {}),
    }
)
# Tokenizers decide about spaces between special tokens, so that both values mean the same.
SAMPLING_PARAMETERS: Values = MappingProxyType(
    {"spaces_between_special_tokens": (True, False), "guided_decoding": (None,), "extra_args": (None, {})}
)


def own_arguments(
    what: str, given: Mapping[str, Any], known: Collection[str], others: Values, error: type[Exception]
) -> dict[str, Any]:
    """The arguments of `given` that are `known`, without those of `others` that say what the engine does anyway.

    what: such as "engine argument". Raises `error` for other values of `others`, and for unknown names.
    """
    for name, value in given.items():
        if name in known:
            continue
        if name not in others:
            raise error(unknown_name_message(what, name, [*known, *others]))
        if not any(type(value) is type(same) and value == same for same in others[name]):
            values = " or ".join(map(repr, others[name]))
            raise error(f"{name}={quoted(value)} is not supported: it must be {values}, which is what the engine does")
    return {name: value for name, value in given.items() if name in known}
