"""From the fields of a request to SamplingParams."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from nanovllm.apps.server.http_errors import invalid
from nanovllm.apps.server.protocol import ChatRequest, CompletionRequest, SamplingFields
from nanovllm.outputs import RequestOutputKind
from nanovllm.sampling_params import SamplingParams, StructuredOutputsParams

# Fields that are parameters of the same name and meaning. Those that are None keep the model's default.
PARAMETERS = {parameter.name for parameter in fields(SamplingParams)} - {"logit_bias", "structured_outputs"}
SAME_NAME = tuple(name for name in SamplingFields.model_fields if name in PARAMETERS)


def completion_params(request: CompletionRequest, defaults: SamplingParams) -> SamplingParams:
    """The parameters of a completion. Raises RequestError and ApiError."""
    given: dict[str, Any] = {"max_tokens": request.max_tokens, "logprobs": request.logprobs}
    if request.echo and request.logprobs is not None and request.prompt_logprobs is None:
        given["prompt_logprobs"] = request.logprobs
    return _params(request, defaults, given)


def chat_params(request: ChatRequest, defaults: SamplingParams, **forced: Any) -> SamplingParams:
    """The parameters of a chat completion; `forced` come from its tools. Raises RequestError and ApiError."""
    if request.top_logprobs is not None and not request.logprobs:
        raise invalid("top_logprobs needs logprobs=true", "top_logprobs")
    limits = [limit for limit in (request.max_completion_tokens, request.max_tokens) if limit is not None]
    given = {
        "max_tokens": limits[0] if limits else None,
        "logprobs": (request.top_logprobs or 0) if request.logprobs else None,
    }
    return _params(request, defaults, given | forced)


def _params(request: SamplingFields, defaults: SamplingParams, given: dict[str, Any]) -> SamplingParams:
    if request.stream_options is not None and not request.stream:
        raise invalid("stream_options needs stream=true", "stream_options")
    for name in SAME_NAME:
        value = getattr(request, name)
        if value is not None and name not in given:
            given[name] = value
    if request.logit_bias:
        given["logit_bias"] = _logit_bias(request.logit_bias)
    structure = _structured_outputs(request)
    if structure is not None and "structured_outputs" not in given:
        given["structured_outputs"] = StructuredOutputsParams(**structure)
    given["output_kind"] = RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY
    if given.get("use_beam_search"):  # which does not sample
        defaults = SamplingParams(temperature=0.0)
    return replace(defaults, **given)


def _logit_bias(biases: dict[str, float]) -> dict[int, float]:
    for token in biases:
        if not (token.isascii() and token.isdecimal() and len(token) < 12):
            raise invalid(f"logit_bias has the key {token!r:.50}: keys must be token ids", "logit_bias")
    return {int(token): bias for token, bias in biases.items()}


def _structured_outputs(request: SamplingFields) -> dict[str, Any] | None:
    """The one structure that the text must have, as arguments of StructuredOutputsParams."""
    wanted, kind = request.structured_outputs, request.response_format
    if kind is None or kind.type == "text":
        return None if wanted is None else wanted.model_dump(by_alias=True, exclude_none=True)
    if wanted is not None:
        raise invalid("response_format and structured_outputs exclude each other: leave one out", "response_format")
    if kind.type == "json_object":
        return {"json_object": True}
    if kind.json_schema is None or not isinstance(kind.json_schema.schema_, dict):
        raise invalid("response_format of type json_schema needs json_schema.schema", "response_format")
    return {"json": kind.json_schema.schema_}
