"""From the prompts and messages of requests to token ids. These functions run in the text thread."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from nanovllm import LLM
from nanovllm.apps.server.http_errors import ApiError, invalid
from nanovllm.apps.server.protocol import ChatFields, ChatMessage, ChatRequest, CompletionRequest, TokenizeRequest, Tool
from nanovllm.apps.server.serving import Serving
from nanovllm.errors import RequestError
from nanovllm.text.chat_template import ChatTemplate
from nanovllm.text.prompts import PromptParts
from nanovllm.text.tokenizer import HuggingFaceTokenizer


def prompts_of(request: CompletionRequest) -> list[str | list[int]]:
    """One entry for each prompt: text, or token ids."""
    prompt = request.prompt
    if isinstance(prompt, str):
        return [prompt]
    if prompt and isinstance(prompt[0], int):
        return [[token for token in prompt if isinstance(token, int)]]
    return [entry for entry in prompt if not isinstance(entry, int)]


def completion_prompt(serving: Serving, prompt: str | list[int], request: CompletionRequest) -> PromptParts:
    """Tokenize and check one prompt. Raises RequestError and ApiError."""
    llm = serving.engine.llm
    with naming("prompt"):
        tokens = prompt if isinstance(prompt, list) else encode(llm, prompt, request.add_special_tokens is not False)
    if request.truncate_prompt_tokens is None:
        check_tokens(llm, tokens, "prompt")
    return PromptParts(None, tokens, request.cache_salt)


def encode(llm: LLM, text: str, add_special_tokens: bool) -> list[int]:
    """Token ids of a text. Raises RequestError where there is no tokenizer."""
    tokenizer = llm.engine.tokenizer
    if tokenizer is None or not text:
        return llm.engine.check_prompt(text, None)  # which says what is wrong
    return tokenizer.encode(text, add_special_tokens=add_special_tokens)


def check_tokens(llm: LLM, tokens: Sequence[int], param: str) -> None:
    """Raise ApiError, with what to do, for a prompt that the engine cannot take."""
    with naming(param, "context_length_exceeded" if len(tokens) > llm.max_model_len else None):
        llm.engine.check_prompt(None, tokens)


@contextmanager
def naming(param: str, code: str | None = None) -> Iterator[None]:
    """Context whose RequestError becomes an ApiError that names the field."""
    try:
        yield
    except RequestError as error:
        raise invalid(str(error), param, code) from None


def chat_prompt(serving: Serving, request: ChatFields | TokenizeRequest) -> list[int]:
    """Render the messages with the chat template and tokenize them. Raises RequestError and ApiError."""
    settings = serving.settings
    if request.chat_template is not None and not settings.trust_request_chat_template:
        raise invalid(
            "chat_template: this server takes no templates from requests; --trust-request-chat-template allows them",
            "chat_template",
        )
    tools = None if isinstance(request, ChatRequest) and request.tool_choice == "none" else request.tools or None
    template = ChatTemplate(
        serving.engine.llm.engine.tokenizer,
        request.chat_template or settings.chat_template,
        add_generation_prompt=request.add_generation_prompt and not request.continue_final_message,
        continue_final_message=request.continue_final_message,
        tools=None if tools is None else [_as_template_expects(tool) for tool in tools],
        template_kwargs={**(request.chat_template_kwargs or {}), **_documents(request)},
    )
    with naming("messages"):
        return template.token_ids([_message(message, i) for i, message in enumerate(request.messages or ())])


def template_text(serving: Serving) -> str:
    """The text of all chat templates that answers may be made with."""
    tokenizer = serving.engine.llm.engine.tokenizer
    own = tokenizer.chat_template if isinstance(tokenizer, HuggingFaceTokenizer) else None
    texts = own.values() if isinstance(own, Mapping) else [own or ""]
    return serving.settings.chat_template or "\n".join(map(str, texts))


def _documents(request: ChatFields | TokenizeRequest) -> dict[str, Any]:
    return {} if request.documents is None else {"documents": request.documents}


def _as_template_expects(tool: Tool) -> dict[str, Any]:
    return tool.model_dump(exclude_none=True)


def _message(message: ChatMessage, number: int) -> dict[str, Any]:
    """A message as templates expect it: arguments of tool calls as objects, OpenAI's developer as system."""
    fields = message.model_dump(exclude_none=True)
    if message.role == "developer":
        fields["role"] = "system"
    for i, call in enumerate(fields.get("tool_calls", ())):
        call["function"]["arguments"] = _arguments(call["function"]["arguments"], f"messages.{number}.tool_calls.{i}")
    return fields


def _arguments(arguments: str | dict[str, Any], param: str) -> dict[str, Any]:
    if isinstance(arguments, dict):
        return arguments
    try:
        read = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        read = None
    if not isinstance(read, dict):
        raise _not_an_object(param)
    return read


def _not_an_object(param: str) -> ApiError:
    return invalid(f"{param}.function.arguments must be a JSON object as text", f"{param}.function.arguments")
