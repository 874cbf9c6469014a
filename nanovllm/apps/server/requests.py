"""From the fields of requests to token ids and SamplingParams. What reads prompts runs in the text thread."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

from nanovllm import LLM
from nanovllm.apps.server.protocol import ChatRequest, CompletionRequest, SamplingFields, TokenizeRequest
from nanovllm.apps.server.responses import invalid
from nanovllm.apps.server.serving import Serving
from nanovllm.apps.tool_choice import check_tools
from nanovllm.errors import RequestError
from nanovllm.outputs import RequestOutputKind
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.chat_template import ChatTemplate
from nanovllm.text.prompts import PromptParts

# Fields that are parameters of the same name and meaning. Those that are None keep the model's default.
PARAMETERS = {parameter.name for parameter in fields(SamplingParams)} - {"structured_outputs"}
SAME_NAME = tuple(name for name in SamplingFields.model_fields if name in PARAMETERS)


# ---- prompts


def prompts_of(request: CompletionRequest) -> list[str | list[int]]:
    """One entry for each prompt: text, or token ids."""
    prompt: Any = request.prompt
    is_one = isinstance(prompt, str) or (prompt and isinstance(prompt[0], int))
    return [prompt] if is_one else prompt


def completion_prompt(serving: Serving, prompt: str | list[int], request: CompletionRequest) -> PromptParts:
    """Tokenize and check one prompt; a text that is echoed whole stays with its tokens. Raises RequestError and
    ApiError."""
    if not isinstance(prompt, str):
        return checked_prompt(serving, prompt, request, "prompt")
    with naming("prompt"):
        tokens = encode(serving.engine.llm, prompt, request.add_special_tokens is not False)
    text = prompt if request.echo and request.truncate_prompt_tokens is None else None
    return checked_prompt(serving, tokens, request, "prompt")._replace(text=text)


def checked_prompt(serving: Serving, tokens: list[int], request: SamplingFields, param: str) -> PromptParts:
    """A prompt for the engine. Raises ApiError, with what to do, for one that it cannot take."""
    llm = serving.engine.llm
    if request.truncate_prompt_tokens is None:
        with naming(param, "context_length_exceeded" if len(tokens) > llm.max_model_len else None):
            llm.engine.check_prompt(None, tokens)
    return PromptParts(None, tokens, request.cache_salt)


def encode(llm: LLM, text: str, add_special_tokens: bool) -> list[int]:
    """Token ids of a text. Raises RequestError where there is no tokenizer."""
    tokenizer = llm.engine.tokenizer
    if tokenizer is None:
        return llm.engine.check_prompt(text, None)  # which says what is wrong
    return tokenizer.encode(text, add_special_tokens=add_special_tokens)


@contextmanager
def naming(param: str, code: str | None = None) -> Iterator[None]:
    """Context whose RequestError becomes an ApiError that names the field, or the part of a message that is wrong."""
    try:
        yield
    except RequestError as error:
        raise invalid(str(error), error.field or param, code) from None


def chat_prompt(serving: Serving, request: ChatRequest | TokenizeRequest) -> list[int]:
    """Render the messages with the chat template and tokenize them. Raises RequestError and ApiError.

    By default without special tokens of the tokenizer's own, since templates have them.
    """
    settings = serving.settings
    if request.chat_template is not None and not settings.trust_request_chat_template:
        raise invalid(
            "chat_template: this server takes no templates from requests; --trust-request-chat-template allows them",
            "chat_template",
        )
    with naming("tools"):
        check_tools(request.tools or [])
    template = ChatTemplate(
        serving.engine.llm.engine.tokenizer,
        request.chat_template or settings.chat_template,
        add_generation_prompt=request.add_generation_prompt and not request.continue_final_message,
        continue_final_message=request.continue_final_message,
        tools=request.tools or None,  # with a `tool_choice` of "none" too, so that prompts go on beginning alike
        documents=request.documents,
        template_kwargs={**settings.default_chat_template_kwargs, **(request.chat_template_kwargs or {})},
        content_format=settings.chat_template_content_format,
    )
    with naming("messages"):
        (prompt,) = template.prompts(request.messages or [])
        if request.add_special_tokens and prompt.text is not None:
            return encode(serving.engine.llm, prompt.text, add_special_tokens=True)
        return list(prompt.token_ids or ())


# ---- sampling


def completion_params(request: CompletionRequest, defaults: SamplingParams) -> SamplingParams:
    """The parameters of a completion. Raises RequestError and ApiError."""
    given: dict[str, Any] = {"logprobs": request.logprobs}
    if request.max_tokens is not None:
        given["max_tokens"] = request.max_tokens
    if request.echo and request.prompt_logprobs is None and (request.logprobs is not None or request.max_tokens == 0):
        given["prompt_logprobs"] = request.logprobs or 0
    return _params(request, defaults, given)


def chat_params(request: ChatRequest, defaults: SamplingParams, **forced: Any) -> SamplingParams:
    """The parameters of a chat completion; `forced` come from its tools. Raises RequestError and ApiError."""
    if request.top_logprobs and not request.logprobs:
        raise invalid("top_logprobs needs logprobs=true", "top_logprobs")
    limits = [limit for limit in (request.max_completion_tokens, request.max_tokens) if limit is not None]
    given: dict[str, Any] = {"logprobs": (request.top_logprobs or 0) if request.logprobs else None}
    if limits:
        given["max_tokens"] = limits[0]
    return _params(request, defaults, given | forced)


def _params(request: SamplingFields, defaults: SamplingParams, given: dict[str, Any]) -> SamplingParams:
    if request.stream_options is not None and not request.stream:
        raise invalid("stream_options needs stream=true", "stream_options")
    for name in SAME_NAME:
        value = getattr(request, name)
        if value is not None and name not in given:
            given[name] = value
    structure = _structured_outputs(request)
    if structure is not None:
        given.setdefault("structured_outputs", structure)
    given["output_kind"] = RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY
    if given.get("use_beam_search"):  # which does not sample
        defaults = SamplingParams(temperature=0.0, max_tokens=defaults.max_tokens)
    return replace(defaults, **given)


def _structured_outputs(request: SamplingFields) -> dict[str, Any] | None:
    """The one structure that the text must have, as fields of StructuredOutputsParams."""
    wanted = request.structured_outputs
    kind = request.response_format
    if kind is None or kind.type == "text":
        return wanted and {name: value for name, value in wanted.items() if value is not None}
    if wanted is not None:
        raise invalid("response_format and structured_outputs exclude each other: leave one out", "response_format")
    if kind.type == "json_object":
        return {"json_object": True}
    if kind.json_schema is None or kind.json_schema.schema_ is None:
        raise invalid("response_format of type json_schema needs json_schema.schema", "response_format")
    return {"json": kind.json_schema.schema_}
