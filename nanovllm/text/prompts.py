"""The input of `LLM.generate`: prompts in all their forms, and parameters for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, NotRequired, TypedDict, TypeVar, cast

from nanovllm.errors import RequestError, quoted
from nanovllm.outputs import RequestOutputKind
from nanovllm.sampling_params import SamplingParams

Prompt = str | Sequence[int] | Mapping[str, Any]
Message = Mapping[str, Any]
T = TypeVar("T")
# What a chat template gets of a content: a list of parts where it shows their texts, one text always, a list always.
CONTENT_FORMATS = ("auto", "string", "openai")
CONTENT_FORMAT_HELP = (
    "what the chat template gets of a content: string is its text, openai a list of its parts, auto a list where the "
    "template shows the texts of parts"
)


class TextPrompt(TypedDict):
    """A prompt as text. cache_salt: only requests with the same salt share blocks of the prefix cache."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """A prompt as token ids. prompt: their text, which outputs repeat."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


# Keys of vLLM's prompt dicts for other models; they are accepted if they are empty.
UNUSED_KEYS = frozenset({"multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs", "token_type_ids"})


class PromptParts(NamedTuple):
    """A prompt as the engine takes it: its text, its token ids, or both."""

    text: str | None
    token_ids: Sequence[int] | None
    cache_salt: str | None = None


def prompt_parts(prompts: Prompt | Sequence[Prompt]) -> list[PromptParts]:
    """The parts of each prompt, of one or many. Raises RequestError."""
    return [prompt_part(prompt) for prompt in prompt_list(prompts)]


def params_for_each(
    sampling_params: SamplingParams | Sequence[SamplingParams], num_prompts: int
) -> list[SamplingParams]:
    """One SamplingParams for each prompt. Raises RequestError."""
    if isinstance(sampling_params, SamplingParams):
        return [sampling_params] * num_prompts
    if not isinstance(sampling_params, Sequence):
        raise RequestError(f"sampling_params must be SamplingParams or a list of them, got {quoted(sampling_params)}")
    for param in sampling_params:
        if not isinstance(param, SamplingParams):
            raise RequestError(f"sampling_params must be SamplingParams, got {quoted(param)}")
    return _for_each("sampling_params", sampling_params, num_prompts)


def priority_for_each(priority: int | Sequence[int] | None, num_prompts: int) -> list[int]:
    """One priority for each prompt, 0 where none are given. Raises RequestError."""
    if priority is None or isinstance(priority, int):
        return [priority or 0] * num_prompts
    if isinstance(priority, str) or not isinstance(priority, Sequence):
        raise RequestError(f"priority must be a list with a whole number for each prompt, got {quoted(priority)}")
    return _for_each("priorities", priority, num_prompts)


def lora_request_for_each(lora_request: Any, num_prompts: int) -> list[Any]:
    """One LoRARequest, or None, for each prompt, from one for all or a list. Raises RequestError."""
    if not isinstance(lora_request, Sequence) or isinstance(lora_request, str):
        return [lora_request] * num_prompts
    return _for_each("lora_requests", lora_request, num_prompts)


def _for_each(name: str, values: Sequence[T], num_prompts: int) -> list[T]:
    if len(values) != num_prompts:
        raise RequestError(f"{num_prompts} prompts and {len(values)} {name}: give one for all, or one for each")
    return list(values)


def final_only(params: Sequence[SamplingParams]) -> list[SamplingParams]:
    """Copies of the parameters with output_kind FINAL_ONLY."""
    changed = {id(param): replace(param, output_kind=RequestOutputKind.FINAL_ONLY) for param in params}
    return [changed[id(param)] for param in params]


def check_use_tqdm(use_tqdm: object) -> None:
    """Raise RequestError for what is neither a truth value nor called as tqdm is."""
    if not callable(use_tqdm) and use_tqdm not in (True, False):
        raise RequestError(f"use_tqdm={quoted(use_tqdm)}: must be True, False, or what makes a bar as tqdm does")


def prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts, from one or many; a list of integers is one prompt."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise RequestError(f"prompts must be text, token ids, a dict or a sequence of those, got {quoted(prompts)}")
    if prompts and all(isinstance(item, int) for item in prompts):
        return [cast(Sequence[int], prompts)]
    return list(cast(Sequence[Prompt], prompts))


def prompt_part(prompt: Prompt) -> PromptParts:
    """The parts of one prompt. Raises RequestError."""
    if isinstance(prompt, str):
        return PromptParts(prompt, None)
    if isinstance(prompt, Mapping):
        return _dict_part({name: value for name, value in prompt.items() if name not in UNUSED_KEYS or value})
    if isinstance(prompt, Sequence) and all(isinstance(token, int) for token in prompt):
        return PromptParts(None, cast(Sequence[int], prompt))
    raise RequestError(f"a prompt must be text, a list of token ids or a dict, got {quoted(prompt)}")


def _dict_part(prompt: Mapping[str, Any]) -> PromptParts:
    keys = set(prompt) - {"cache_salt"}
    salt = prompt.get("cache_salt")
    if keys == {"prompt"} and isinstance(prompt["prompt"], str):
        return PromptParts(prompt["prompt"], None, salt)
    if keys == {"prompt_token_ids"} or (keys == {"prompt_token_ids", "prompt"} and isinstance(prompt["prompt"], str)):
        return PromptParts(prompt.get("prompt"), prompt["prompt_token_ids"], salt)
    raise RequestError(
        "a prompt dict needs 'prompt' (text), or 'prompt_token_ids' (ids) with or without their text as 'prompt', and "
        f"nothing else but 'cache_salt', got {quoted(prompt)}"
    )


def open_end(text: str, stops: Sequence[str]) -> str:
    """The longest end of the text that is a proper prefix of a stop string."""
    for length in range(min(len(text), max(len(stop) for stop in stops) - 1), 0, -1):
        end = text[-length:]
        if any(len(stop) > length and stop.startswith(end) for stop in stops):
            return end
    return ""
