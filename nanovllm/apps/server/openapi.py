"""`/openapi.json`: the published schema, made from the models that read the requests."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from nanovllm.apps.server.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

POSTS: dict[str, tuple[type[BaseModel], str]] = {
    "/v1/completions": (CompletionRequest, "Complete one prompt or several"),
    "/v1/chat/completions": (ChatRequest, "Answer a conversation"),
    "/tokenize": (TokenizeRequest, "Token ids of a prompt or of messages"),
    "/detokenize": (DetokenizeRequest, "The text of token ids"),
}
GETS = {
    "/v1/models": "The models that are served",
    "/health": "Whether the server answers requests",
    "/version": "The version of nanovllm",
}
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
REFUSALS = {
    "400": "The request cannot be served as it is",
    "401": "A valid key is needed",
    "403": "A server for its own machine was addressed by another name",
    "404": "The model is not served",
    "408": "The body stopped coming",
    "413": "The body is too large",
    "415": "The body is not JSON",
    "429": "The queue is full",
    "500": "The engine failed while it computed the answer",
    "503": "The server is shutting down, or has too many connections",
}


def openapi(version: str) -> dict[str, Any]:
    """The schema as OpenAPI 3.1."""
    kinds = [(kind, "validation") for kind, _ in POSTS.values()]
    _, definitions = models_json_schema(kinds, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
    paths: dict[str, Any] = {}
    for path, (kind, summary) in POSTS.items():
        reference = {"$ref": f"#/components/schemas/{kind.__name__}"}
        body = {"required": True, "content": {"application/json": {"schema": reference}}}
        paths[path] = {"post": {"summary": summary, "requestBody": body, "responses": _responses(path)}}
    for path, summary in GETS.items():
        paths[path] = {"get": {"summary": summary, "responses": _responses(path)}}
    schemas = {**definitions["$defs"], "Error": ERROR}
    return {
        "openapi": "3.1.0",
        "info": {"title": "nanovllm", "version": version, "description": "OpenAI's API, with vLLM's extra fields."},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    }


def _responses(path: str) -> dict[str, Any]:
    answer: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if path.endswith("completions"):
        answer["text/event-stream"] = {"schema": {"type": "string"}}
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    refusals = {status: {"description": text, "content": error} for status, text in REFUSALS.items()}
    if path == "/health":
        refusals["503"] = {"description": "The server is shutting down, or its engine has ended"}
    return {"200": {"description": "The answer", "content": answer}, **refusals}
