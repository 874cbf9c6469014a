"""The input of `LLM.generate`: prompts in all their forms, and parameters for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

from nanovllm.errors import RequestError, quoted, unknown_name_message
from nanovllm.outputs import RequestOutputKind
from nanovllm.sampling_params import SamplingParams

Prompt = str | Sequence[int] | Mapping[str, Any]
Message = Mapping[str, Any]

# Arguments of vLLM for features that this engine does not have; they are accepted as None.
VLLM_ONLY = frozenset({"lora_request", "prompt_adapter_request", "tokenization_kwargs", "mm_processor_kwargs"})


class PromptParts(NamedTuple):
    """A prompt as the engine takes it: text, token ids, or both if the ids are those of the text."""

    text: str | None
    token_ids: Sequence[int] | None
    cache_salt: str | None = None


def prompt_parts(prompts: Prompt | Sequence[Prompt]) -> list[PromptParts]:
    """The parts of one prompt or many. Raises RequestError."""
    return [_parts(prompt) for prompt in _as_list(prompts)]


def params_for_each(
    sampling_params: SamplingParams | Sequence[SamplingParams], num_prompts: int
) -> list[SamplingParams]:
    """One SamplingParams for each prompt. Raises RequestError."""
    if isinstance(sampling_params, SamplingParams):
        return [sampling_params] * num_prompts
    if not isinstance(sampling_params, Sequence):
        raise RequestError(f"sampling_params must be SamplingParams or a list of them, got {quoted(sampling_params)}")
    params = list(sampling_params)
    if len(params) != num_prompts:
        raise RequestError(
            f"{num_prompts} prompts and {len(params)} sampling_params: give one SamplingParams for all, or one for each"
        )
    for param in params:
        if not isinstance(param, SamplingParams):
            raise RequestError(f"sampling_params must be SamplingParams, got {quoted(param)}")
    return params


def priority_for_each(priority: Sequence[int] | None, num_prompts: int) -> list[int]:
    """One priority for each prompt, 0 where none are given. Raises RequestError."""
    if priority is None:
        return [0] * num_prompts
    if isinstance(priority, str) or not isinstance(priority, Sequence):
        raise RequestError(f"priority must be a list with a whole number for each prompt, got {quoted(priority)}")
    if len(priority) != num_prompts:
        raise RequestError(f"{num_prompts} prompts and {len(priority)} priorities: give one for each")
    return list(priority)


def final_only(params: Sequence[SamplingParams]) -> list[SamplingParams]:
    """Copies of the parameters with output_kind FINAL_ONLY."""
    changed = {id(param): replace(param, output_kind=RequestOutputKind.FINAL_ONLY) for param in params}
    return [changed[id(param)] for param in params]


def refuse_unknown(method: str, arguments: Mapping[str, Any], known: Sequence[str]) -> None:
    """Raise RequestError for keyword arguments that `method` does not have."""
    for name, value in arguments.items():
        if name not in VLLM_ONLY or value is not None:
            raise RequestError(unknown_name_message(f"argument of {method}", name, list(known)))


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts, from one or many; a list of integers is one prompt."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise RequestError(f"prompts must be text, token ids, a dict or a sequence of those, got {quoted(prompts)}")
    if prompts and all(isinstance(item, int) for item in prompts):
        return [cast(Sequence[int], prompts)]
    return list(cast(Sequence[Prompt], prompts))


def _parts(prompt: Prompt) -> PromptParts:
    if isinstance(prompt, str):
        return PromptParts(prompt, None)
    if isinstance(prompt, Mapping):
        keys, salt = set(prompt) - {"cache_salt"}, prompt.get("cache_salt")
        if keys == {"prompt"} and isinstance(prompt["prompt"], str):
            return PromptParts(prompt["prompt"], None, salt)
        if keys == {"prompt_token_ids"}:
            return PromptParts(None, prompt["prompt_token_ids"], salt)
        raise RequestError(
            "a prompt dict needs exactly one key, 'prompt' (text) or 'prompt_token_ids' (ids), besides 'cache_salt', "
            f"got {quoted(prompt)}"
        )
    if isinstance(prompt, Sequence) and all(isinstance(token, int) for token in prompt):
        return PromptParts(None, cast(Sequence[int], prompt))
    raise RequestError(f"a prompt must be text, a list of token ids or a dict, got {quoted(prompt)}")
