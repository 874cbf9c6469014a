"""The `body` of OpenAI's batch files, as the columns of other rows: a request of the server, without streams."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from nanovllm.apps.server.protocol import ChatRequest, CompletionRequest
from nanovllm.apps.tool_choice import check_choice, check_tools, forced_schema
from nanovllm.errors import RequestError, quoted

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
ELSEWHERE = ("prompt", "tools", "logprobs")  # read in the functions of chats and completions
NOT_SUPPORTED = ("stream", "stream_options", "echo", "chat_template")


def body_columns(
    row: Mapping[str, Any], known: Collection[str], model_names: Sequence[str], has_max_tokens: bool
) -> dict[str, Any]:
    """The columns that stand for row["body"]. Raises RequestError.

    known: columns that have the name and the meaning of a body's field. model_names: what the body's model may be.
    has_max_tokens: whether a chat without a limit has one from the job; otherwise it may use the model's full length.
    """
    body = row["body"]
    url = row.get("url", CHAT if isinstance(body, Mapping) and "messages" in body else COMPLETIONS)
    if url not in (CHAT, COMPLETIONS) or row.get("method", "POST") != "POST":
        raise RequestError(f"method and url must be POST and {CHAT} or {COMPLETIONS}, got {quoted(url)}")
    given = _checked(body, url)
    for name in NOT_SUPPORTED:
        if given.get(name):
            raise RequestError(f"{name}={quoted(given[name])} is not supported in a batch: leave it out")
    if "model" in given and given["model"] not in model_names:
        names = ", ".join(map(repr, model_names))
        raise RequestError(f"body asks for model {quoted(given['model'])}, and this job runs {names}")
    columns = {name: value for name, value in given.items() if name in known and name not in ELSEWHERE}
    structure = _structure(given.get("response_format", {"type": "text"}))
    if structure is not None:
        if "structured_outputs" in columns:
            raise RequestError("body has response_format and structured_outputs: leave one out")
        columns["structured_outputs"] = structure
    return columns | (_of_chat(given, has_max_tokens) if url == CHAT else _of_completion(given))


def _checked(body: Any, url: str) -> dict[str, Any]:
    """The fields of a body that are given, of the types that the server takes. Raises RequestError."""
    try:
        (ChatRequest if url == CHAT else CompletionRequest).model_validate_json(json.dumps(body))
    except ValidationError as error:
        wrong = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(map(str, ("body", *wrong["loc"])))
        raise RequestError(f"{where}: {wrong['msg']}, for {url}; got {quoted(wrong['input'])}") from None
    return {name: value for name, value in body.items() if value is not None}


def _of_chat(given: Mapping[str, Any], has_max_tokens: bool) -> dict[str, Any]:
    columns: dict[str, Any] = {}
    tools = given.get("tools", [])
    choice = given.get("tool_choice")
    check_tools(tools)
    check_choice(tools, choice)
    if tools:  # with a choice of "none" too: the model may not call, and its prompt begins as the others
        columns["tools"] = tools
    schema = forced_schema(tools, choice, given.get("parallel_tool_calls"))
    if schema is not None:
        columns["structured_outputs"] = {"json": schema}
    if given.get("continue_final_message"):
        columns["add_generation_prompt"] = False
    if "max_completion_tokens" in given:
        columns["max_tokens"] = given["max_completion_tokens"]
    elif "max_tokens" not in given and not has_max_tokens:
        columns["max_tokens"] = None
    if given.get("logprobs"):
        columns["logprobs"] = given.get("top_logprobs", 0)
    elif given.get("top_logprobs"):
        raise RequestError("top_logprobs needs logprobs=true")
    return columns


def _of_completion(given: Mapping[str, Any]) -> dict[str, Any]:
    prompt = given["prompt"]
    if isinstance(prompt, list) and not all(isinstance(token, int) for token in prompt):
        raise RequestError("body.prompt has several prompts: give each a row of its own")
    columns = {"prompt_token_ids" if isinstance(prompt, list) else "prompt": prompt}
    return columns | ({"logprobs": given["logprobs"]} if "logprobs" in given else {})


def _structure(wanted: Mapping[str, Any]) -> dict[str, Any] | None:
    """OpenAI's response_format as structured_outputs."""
    if wanted["type"] == "text":
        return None
    if wanted["type"] == "json_object":
        return {"json_object": True}
    schema = (wanted.get("json_schema") or {}).get("schema")
    if schema is None:
        raise RequestError(f"response_format={quoted(wanted)}: json_schema needs its schema")
    return {"json": schema}
