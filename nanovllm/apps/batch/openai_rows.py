"""The `body` of OpenAI's batch files, as the columns of other rows: a chat completion or a completion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from nanovllm.apps.tool_choice import check_choice, check_tools, forced_schema
from nanovllm.errors import RequestError, quoted, unknown_name_message
from nanovllm.sampling_params import SamplingParams

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
# Fields with the same name and meaning.
NOT_OF_A_BODY = ("logprobs", "detokenize", "logits_processors", "output_kind", "skip_clone")
SAME = (*(field.name for field in fields(SamplingParams) if field.name not in NOT_OF_A_BODY), "cache_salt")
SAME_OF_CHATS = ("messages", "chat_template_kwargs", "documents", "add_generation_prompt", "continue_final_message")
OF_CHATS = (
    *SAME_OF_CHATS,
    *("tools", "tool_choice", "parallel_tool_calls", "top_logprobs", "max_completion_tokens", "modalities"),
    *("prediction", "chat_template"),
)
# These change no row: who asks, what is kept where, when it runs, and what all results have anyway.
WITHOUT_EFFECT = (
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
    *("prediction", "priority", "request_id", "return_token_ids", "return_tokens_as_token_ids"),
    "spaces_between_special_tokens",
)
READ = ("model", "stream", "stream_options", "prompt", "logprobs", "response_format", "add_special_tokens")
OF_COMPLETIONS = ("echo", "suffix")


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
    known = [*SAME, *OF_CHATS, *WITHOUT_EFFECT, *READ, *OF_COMPLETIONS]
    for name in given:
        if name not in known:
            raise RequestError(unknown_name_message("field of body", name, known))
    columns = {name: given[name] for name in (*SAME, *SAME_OF_CHATS, "add_special_tokens") if name in given}
    structure = _structure(given["response_format"]) if "response_format" in given else None
    if structure is not None and "structured_outputs" in columns:
        raise RequestError("body has response_format and structured_outputs, which exclude each other")
    columns |= {} if structure is None else {"structured_outputs": structure}
    if is_chat:
        _chat_columns(given, columns, has_max_tokens)
    else:
        _completion_columns(given, columns)
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
    if "stream_options" in given:
        raise RequestError("stream_options needs stream=true, and a batch has no streams: leave it out")
    model = given.get("model")
    if model is not None and model not in model_names:
        names = ", ".join(map(repr, model_names))
        raise RequestError(
            f"body asks for model {quoted(model)}, and this job runs {names}: --served-model-name names it"
        )
    return is_chat


def _chat_columns(given: Mapping[str, Any], columns: dict[str, Any], has_max_tokens: bool) -> None:
    for name in OF_COMPLETIONS:
        if name in given:
            raise RequestError(f"{name} is for {COMPLETIONS}: leave it out")
    if "chat_template" in given:
        raise RequestError("chat_template: rows bring no templates of their own; --chat-template gives one to the job")
    if given.get("modalities", ["text"]) != ["text"]:
        raise RequestError(f"modalities={quoted(given['modalities'])}: must be ['text']")
    _tool_columns(given, columns)
    if given.get("continue_final_message"):
        columns["add_generation_prompt"] = False
    if "max_completion_tokens" in given:
        columns["max_tokens"] = given["max_completion_tokens"]
    if "max_tokens" not in columns and not has_max_tokens:
        columns["max_tokens"] = None
    wants_logprobs = given.get("logprobs", False)
    if not isinstance(wants_logprobs, bool):
        raise RequestError(f"logprobs={quoted(wants_logprobs)}: must be true or false; top_logprobs is their number")
    if given.get("top_logprobs") and not wants_logprobs:
        raise RequestError("top_logprobs needs logprobs=true")
    if wants_logprobs:
        columns["logprobs"] = given.get("top_logprobs", 0)


def _tool_columns(given: Mapping[str, Any], columns: dict[str, Any]) -> None:
    """The tools that the template shows, and the structure that `tool_choice` forces the answer into."""
    tools = given.get("tools", [])
    choice = given.get("tool_choice")
    parallel = given.get("parallel_tool_calls")
    if not isinstance(parallel, bool | None):
        raise RequestError(f"parallel_tool_calls={quoted(parallel)}: must be true or false")
    check_tools(tools)
    check_choice(tools, choice)
    if tools and choice != "none":
        columns["tools"] = tools
    schema = forced_schema(tools, choice, parallel)
    if schema is not None:
        columns["structured_outputs"] = {"json": schema}


def _completion_columns(given: Mapping[str, Any], columns: dict[str, Any]) -> None:
    for name in OF_CHATS:
        if name in given and name not in WITHOUT_EFFECT:
            raise RequestError(f"{name} is for {CHAT}: leave it out, or give messages")
    if given.get("echo"):
        raise RequestError("echo=true is not supported: the row has its prompt, and prompt_logprobs gives theirs")
    if given.get("suffix"):
        raise RequestError(f"suffix={quoted(given['suffix'])} is not supported: leave it out")
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
