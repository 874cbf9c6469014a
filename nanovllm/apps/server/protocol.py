"""The bodies of requests: OpenAI's fields and vLLM's. Unknown fields are refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, JsonValue, PrivateAttr, WithJsonSchema

T = TypeVar("T")
List = Annotated[list[T], Field(fail_fast=True)]  # the first wrong item is told of, not each of millions
TokenIds = List[int]
Texts = List[str]
Json = dict[str, JsonValue]


class Body(BaseModel):
    """Strict: a number in quotes is not a number."""

    model_config = ConfigDict(strict=True, extra="forbid")
    _num_bytes: int = PrivateAttr(0)

    @classmethod
    def read(cls, raw: bytes) -> Self:
        """The body of a request. Raises ValidationError."""
        body = cls.model_validate_json(raw)
        body._num_bytes = len(raw)
        return body

    @property
    def num_bytes(self) -> int:
        """Size of the body as JSON."""
        return self._num_bytes


class StreamOptions(Body):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool | None = None  # padding against eavesdroppers; no answer changes without it


class JsonSchema(Body):
    name: str
    description: str | None = None
    schema_: Json | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class SamplingFields(Body):
    """What both kinds of completions have. None stands for the model's default."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    best_of: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    stop: str | Texts | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    logit_bias: dict[int, float] | None = None
    bad_words: Texts | None = None
    allowed_token_ids: TokenIds | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: Json | None = None  # fields of `StructuredOutputsParams`
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    priority: int = 0
    cache_salt: str | None = None
    request_id: str | None = None
    # These change no answer.
    user: str | None = None
    metadata: Mapping[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None


class CompletionRequest(SamplingFields):
    prompt: str | TokenIds | Texts | List[TokenIds]
    max_tokens: int | None = 16
    logprobs: int | None = None
    echo: bool | None = None
    suffix: Literal[""] | None = None


# The chat template sees every field, known or not, and `nanovllm.text` says what is wrong with one.
ChatMessage = Annotated[
    Json,
    WithJsonSchema(
        {
            "type": "object",
            "properties": {
                "role": {"type": "string"},
                "content": {
                    "anyOf": [
                        {"type": "string"},
                        {"type": "array", "items": {"anyOf": [{"type": "string"}, {"type": "object"}]}},
                        {"type": "null"},
                    ]
                },
                "tool_calls": {"anyOf": [{"type": "array", "items": {"type": "object"}}, {"type": "null"}]},
            },
            "required": ["role"],
        }
    ),
]


class TemplateFields(Body):
    """What a chat template takes beside the messages."""

    tools: List[Json] | None = None  # checked by `tool_choice.check_tools`; templates see them as they are
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: Json | None = None
    documents: List[Json] | None = None


class ChatRequest(SamplingFields, TemplateFields):
    messages: List[ChatMessage] = Field(min_length=1)
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0)
    tool_choice: str | Json | None = None  # checked by `tool_choice.check_choice`
    parallel_tool_calls: bool | None = None
    modalities: List[Literal["text"]] | None = None
    prediction: Json | None = None  # a hint that makes other servers faster


class TokenizeRequest(TemplateFields):
    """Either a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    messages: List[ChatMessage] | None = Field(default=None, min_length=1)


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: TokenIds
