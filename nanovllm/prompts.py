"""The input of `LLM.generate` and `LLM.chat`: prompts in all their forms, conversations, and parameters for each."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, NotRequired, TypedDict, cast

from nanovllm.errors import RequestError, quoted
from nanovllm.outputs import RequestOutputKind
from nanovllm.sampling_params import SamplingParams
from nanovllm.sampling_rules import check_characters
from nanovllm.tokenizer import HuggingFaceTokenizer, Tokenizer
from nanovllm.vllm_names import CALL_ARGUMENTS, own_arguments

Prompt = str | Sequence[int] | Mapping[str, Any]
Message = Mapping[str, Any]


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

REASONING = ("reasoning_content", "thinking", "reasoning")
MARK = "CONTINUE_FINAL_MESSAGE_TAG "  # marks the end of the message to continue


class PromptParts(NamedTuple):
    """A prompt as the engine takes it: text, token ids, or both if the ids are those of the text."""

    text: str | None
    token_ids: Sequence[int] | None
    cache_salt: str | None = None


def prompt_parts(prompts: Prompt | Sequence[Prompt]) -> list[PromptParts]:
    """The parts of one prompt or many. Raises RequestError."""
    return [prompt_part(prompt) for prompt in prompt_list(prompts)]


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


def priority_for_each(priority: int | Sequence[int] | None, num_prompts: int) -> list[int]:
    """One priority for each prompt, 0 where none are given. Raises RequestError."""
    if priority is None or isinstance(priority, int):
        return [priority or 0] * num_prompts
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
    own_arguments(f"argument of {method}", arguments, known, CALL_ARGUMENTS, RequestError)


class ChatTemplate:
    """Turns conversations into prompts with the tokenizer's chat template, or with `template` instead.

    Raises RequestError if there is no template, for template arguments that it does not have, and for conversations
    that it rejects.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        template: str | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        if not isinstance(tokenizer, HuggingFaceTokenizer):
            raise RequestError(
                "the model directory has no tokenizer files, so messages cannot be read: give token ids to generate, "
                "or add the tokenizer's files to the directory"
            )
        if template is not None and not isinstance(template, str):
            raise RequestError(f"chat_template={quoted(template)}: must be the text of a Jinja template")
        if template is None and not tokenizer.tokenizer.chat_template:
            raise RequestError(
                "the tokenizer has no chat template, which says how messages become a prompt: give one as "
                "chat_template, or the finished prompt to generate"
            )
        if add_generation_prompt and continue_final_message:
            raise RequestError(
                "continue_final_message=True: needs add_generation_prompt=False, because the last message is continued"
            )
        for tool in tools or ():
            if not isinstance(tool, Mapping):
                raise RequestError(f"tools must be a list of JSON schemas, got {tool!r:.100}")
        self._tokenizer = tokenizer
        self._continues = continue_final_message
        self._template = _named_template(tokenizer, template, tools is not None)
        variables = dict(template_kwargs or {})
        for name in inspect.signature(tokenizer.tokenizer.apply_chat_template).parameters:
            if name in variables and name != "documents":
                raise RequestError(f"chat_template_kwargs={name!r}: must hold variables of the template only")
        self._variables = {
            "documents": None,
            **tokenizer.tokenizer.special_tokens_map,
            **variables,
            "tools": None if tools is None else list(tools),
            "add_generation_prompt": add_generation_prompt,
        }

    def prompts(self, messages: Sequence[Message] | Sequence[Sequence[Message]]) -> list[PromptParts]:
        """The prompt of one conversation, or of each of several."""
        return [self._render(conversation) for conversation in _conversations(messages)]

    def token_ids(self, messages: Sequence[Message]) -> list[int]:
        """The prompt of one conversation as token ids."""
        (prompt,) = self.prompts(list(messages))
        return list(prompt.token_ids or ())

    def _render(self, conversation: list[dict[str, Any]]) -> PromptParts:
        text = self._open_text(conversation) if self._continues else self._text(conversation)
        check_characters("the prompt that the chat template makes", text)
        return PromptParts(text, self._tokenizer.encode(text, add_special_tokens=False))

    def _text(self, conversation: list[dict[str, Any]]) -> str:
        messages = [_as_templates_expect(message) for message in conversation]
        return self._tokenizer.templates.render(self._template, {**self._variables, "messages": messages})

    def _open_text(self, conversation: list[dict[str, Any]]) -> str:
        """The prompt up to the end of the last message's content, which a marker locates, as in Transformers."""
        messages, last = copy.deepcopy(conversation), conversation[-1].get("content")
        if last is None:
            raise RequestError("continue_final_message=True: the last message has no content that could go on")
        messages[-1]["content"] = last + MARK
        text = self._text(messages)
        end = text.rfind(MARK.strip())
        if end < 0 or last.strip() not in text:
            raise RequestError("continue_final_message=True: the chat template does not show the last message as it is")
        kept = text[:end]
        return kept if text[end:].startswith(MARK) else kept.rstrip()  # the template strips spaces


def _as_templates_expect(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message as Transformers passes it: without None values, and with its reasoning under every known name."""
    kept = {name: value for name, value in message.items() if value is not None}
    reasoning = next((kept[name] for name in REASONING if name in kept), None)
    return kept if reasoning is None else {"thinking": reasoning, **kept, "reasoning_content": reasoning}


def _named_template(tokenizer: HuggingFaceTokenizer, template: str | None, with_tools: bool) -> str:
    """The text of the template to use; a tokenizer may have several named ones."""
    own = tokenizer.tokenizer.chat_template
    named = own if isinstance(own, Mapping) else {"default": own}
    if template is not None:
        found = named.get(template, template) if isinstance(own, Mapping) else template
    else:
        found = named.get("tool_use" if with_tools and "tool_use" in named else "default")
    if not isinstance(found, str):
        raise RequestError(
            f"the tokenizer has chat templates named {', '.join(map(str, sorted(named)))} and none is the default: "
            "name one as chat_template"
        )
    return found


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
    keys, salt = set(prompt) - {"cache_salt"}, prompt.get("cache_salt")
    if keys == {"prompt"} and isinstance(prompt["prompt"], str):
        return PromptParts(prompt["prompt"], None, salt)
    if keys == {"prompt_token_ids"} or (keys == {"prompt_token_ids", "prompt"} and isinstance(prompt["prompt"], str)):
        return PromptParts(prompt.get("prompt"), prompt["prompt_token_ids"], salt)
    raise RequestError(
        "a prompt dict needs 'prompt' (text), or 'prompt_token_ids' (ids) with or without their text as 'prompt', and "
        f"nothing else but 'cache_salt', got {quoted(prompt)}"
    )


def _conversations(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> list[list[dict[str, Any]]]:
    """A list of conversations, from one or many; a list that begins with a message is one conversation."""
    if isinstance(messages, str) or not isinstance(messages, Sequence):
        raise RequestError(f"messages must be a list of messages or a list of such lists, got {quoted(messages)}")
    several = [messages] if messages and isinstance(messages[0], Mapping) else messages
    return [_conversation(conversation) for conversation in several]


def _conversation(messages: Any) -> list[dict[str, Any]]:
    if isinstance(messages, str) or not isinstance(messages, Sequence) or not messages:
        raise RequestError(f"a conversation must be a list of at least one message, got {quoted(messages)}")
    return [_message(message) for message in messages]


def _message(message: Any) -> dict[str, Any]:
    """The message with its content joined to one text, as templates of text models expect."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError(f"a message must be a dict with a role and a content, got {quoted(message)}")
    content = message.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str):
        content = "\n".join(_text_of(part) for part in content)
    if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
        raise RequestError(f"the content of a message must be text or a list of text parts, got {quoted(message)}")
    return {**message, "content": content}


def _text_of(part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise RequestError(f"a part of a message must be {{'type': 'text', 'text': ...}}, got {quoted(part)}")
