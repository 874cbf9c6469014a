"""The `body` of OpenAI's batch files, as the columns of other rows: a chat completion or a completion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from nanovllm.errors import RequestError, quoted
from nanovllm.sampling_params import SamplingParams
from nanovllm.vllm_names import unknown_name

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
# Fields with the same name and meaning.
NOT_OF_A_BODY = ("logprobs", "detokenize", "logits_processors", "output_kind", "skip_clone")
SAME = (*(each.name for each in fields(SamplingParams) if each.name not in NOT_OF_A_BODY), "cache_salt")
CHAT_FIELDS = ("messages", "tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")
WITHOUT_EFFECT = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
READ = ("model", "stream", "prompt", "logprobs", "top_logprobs", "max_completion_tokens", "response_format")


def body_columns(row: Mapping[str, Any], model_names: Sequence[str], has_max_tokens: bool) -> dict[str, Any]:
    """The columns that stand for row["body"]. Raises RequestError.

    model_names: what the body's model may be. has_max_tokens: whether a chat without a limit has one from the job;
    otherwise it may use the model's full length, as OpenAI's.
    """
    body = row["body"]
    if not isinstance(body, Mapping):
        raise RequestError(f"body must be an object, got {quoted(body)}")
    given = {name: value for name, value in body.items() if value is not None}
    is_chat = _check_request(row, given, model_names)
    known = [*SAME, *CHAT_FIELDS, *WITHOUT_EFFECT, *READ]
    for name in given:
        if name not in known:
            raise RequestError(unknown_name("field of body", name, known))
    columns = {name: given[name] for name in (*SAME, *CHAT_FIELDS) if name in given}
    if is_chat:
        _chat_columns(given, columns, has_max_tokens)
    else:
        _completion_columns(given, columns)
    if "response_format" in given:
        if "structured_outputs" in columns:
            raise RequestError("body has response_format and structured_outputs, which exclude each other")
        structure = _structure(given["response_format"])
        columns |= {} if structure is None else {"structured_outputs": structure}
    return columns


def _check_request(row: Mapping[str, Any], given: Mapping[str, Any], model_names: Sequence[str]) -> bool:
    """Check what is no parameter. Returns whether the body is a chat."""
    if row.get("method", "POST") != "POST":
        raise RequestError(f"method={quoted(row['method'])}: must be POST")
    is_chat = "messages" in given
    url = row.get("url", CHAT if is_chat else COMPLETIONS)
    if url not in (CHAT, COMPLETIONS):
        raise RequestError(f"url={quoted(url)}: must be {CHAT} or {COMPLETIONS}")
    needed = "messages" if url == CHAT else "prompt"
    if needed not in given or ("messages" in given and "prompt" in given):
        raise RequestError(f"body must have {needed}, as its url is {url}, and no other prompt")
    if given.get("stream"):
        raise RequestError("body has stream=true, and a batch has no streams: leave it out")
    model = given.get("model")
    if model is not None and model not in model_names:
        names = ", ".join(map(repr, model_names))
        raise RequestError(
            f"body asks for model {quoted(model)}, and this job runs {names}: --served-model-name names it"
        )
    return is_chat


def _chat_columns(given: Mapping[str, Any], columns: dict[str, Any], has_max_tokens: bool) -> None:
    if "max_completion_tokens" in given:
        columns["max_tokens"] = given["max_completion_tokens"]
    if "max_tokens" not in columns and not has_max_tokens:
        columns["max_tokens"] = None
    wants_logprobs = given.get("logprobs", False)
    if not isinstance(wants_logprobs, bool):
        raise RequestError(f"logprobs={quoted(wants_logprobs)}: must be true or false; top_logprobs is their number")
    if "top_logprobs" in given and not wants_logprobs:
        raise RequestError("top_logprobs needs logprobs=true")
    if wants_logprobs:
        columns["logprobs"] = given.get("top_logprobs", 0)


def _completion_columns(given: Mapping[str, Any], columns: dict[str, Any]) -> None:
    for name in (*CHAT_FIELDS, "top_logprobs", "max_completion_tokens"):
        if name in given:
            raise RequestError(f"{name} is for {CHAT}: leave it out, or give messages")
    if "logprobs" in given:
        columns["logprobs"] = given["logprobs"]
    prompt = given["prompt"]
    is_ids = isinstance(prompt, list) and all(isinstance(token, int) for token in prompt)
    columns["prompt_token_ids" if is_ids else "prompt"] = prompt


def _structure(wanted: Any) -> dict[str, Any] | None:
    """OpenAI's response_format as structured_outputs."""
    kind = wanted.get("type") if isinstance(wanted, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return {"json_object": True}
    schema = wanted.get("json_schema") if kind == "json_schema" else None
    if isinstance(schema, Mapping) and isinstance(schema.get("schema"), Mapping):
        return {"json": dict(schema["schema"])}
    raise RequestError(f"response_format={quoted(wanted)}: must be text, json_object, or json_schema with its schema")
