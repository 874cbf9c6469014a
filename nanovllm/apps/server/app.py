"""The application: which endpoint is where, what stands before all, and the endpoints that compute no tokens."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from pydantic.json_schema import models_json_schema
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import BaseRoute, Route

from nanovllm import AsyncLLM, __version__
from nanovllm.apps.server.admission import Admission, Gate, check_model
from nanovllm.apps.server.chat import create_chat_completion
from nanovllm.apps.server.completions import create_completion
from nanovllm.apps.server.kv_events import KVCacheEvents
from nanovllm.apps.server.metrics import ServerMetrics
from nanovllm.apps.server.protocol import Body, ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from nanovllm.apps.server.requests import chat_prompt, encode
from nanovllm.apps.server.responses import EventStream, as_api_error, invalid, respond_to_wrong_path
from nanovllm.apps.server.serving import Serving
from nanovllm.apps.server.settings import ServerSettings
from nanovllm.apps.tool_calls.reading import Formats
from nanovllm.errors import RequestError, as_request_error, quoted

Endpoint = Callable[[Serving, Request], Awaitable[Response]]
PAGE = Path(__file__).with_name("page.html")


def build_app(engine: AsyncLLM, settings: ServerSettings, admission: Admission | None = None) -> Starlette:
    """The server as an ASGI application. admission: counts the prompts; made here if it is None."""
    admission = Admission(engine, settings.max_queue) if admission is None else admission
    # Without a limit of the request or the checkpoint, an answer may have the rest of the model's length.
    limit = engine.llm.engine.sampling_defaults.get("max_tokens")
    defaults = replace(engine.llm.get_default_sampling_params(), max_tokens=limit)
    metrics = ServerMetrics(engine.llm, settings.model_name)
    kv_events = KVCacheEvents(engine, is_over=lambda: admission.is_closing or engine.error is not None)
    formats = Formats(engine.llm.engine.tokenizer, settings.tool_call_parser)
    serving = Serving(engine, settings, admission, metrics, kv_events, defaults, formats)
    middleware = [Middleware(Gate, settings=settings)]
    if settings.allowed_origins:
        origins = settings.allowed_origins
        cors = Middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
        middleware.insert(0, cors)
    handlers = {HTTPException: respond_to_wrong_path}
    return Starlette(routes=_routes(serving), middleware=middleware, exception_handlers=handlers)


def _routes(serving: Serving) -> list[BaseRoute]:
    def route(path: str, endpoint: Endpoint, method: str) -> Route:
        async def respond(request: Request) -> Response:
            try:
                return await endpoint(serving, request)
            except Exception as error:
                return as_api_error(error).response()

        return Route(path, respond, methods=[method])

    gets = GETS if serving.settings.ui else {path: GETS[path] for path in GETS if path != "/"}
    return [
        *(route(path, endpoint, "GET") for path, endpoint in gets.items()),
        *(route(path, endpoint, "POST") for path, (endpoint, _) in POSTS.items()),
    ]


async def health(serving: Serving, request: Request) -> Response:
    """Whether requests are served: 503 after the engine has ended"""
    if serving.engine.error is not None:
        return JSONResponse({"status": "error", "message": "the engine has ended"}, 503)
    return JSONResponse({"status": "ok"})


async def show_version(serving: Serving, request: Request) -> Response:
    """The version of nanovllm"""
    return JSONResponse({"version": __version__})


async def show_metrics(serving: Serving, request: Request) -> Response:
    """Metrics for Prometheus"""
    return Response(serving.metrics.text(), media_type=CONTENT_TYPE_LATEST)


async def list_models(serving: Serving, request: Request) -> Response:
    """The models that are served"""
    names = serving.settings.names
    return JSONResponse({"object": "list", "data": [_model(serving, name) for name in names]})


async def show_model(serving: Serving, request: Request) -> Response:
    """One of the models"""
    name = request.path_params["name"]
    check_model(name, serving.settings.names)
    return JSONResponse(_model(serving, name))


def _model(serving: Serving, name: str) -> dict[str, Any]:
    settings = serving.settings
    adapter = serving.settings.adapter(name)
    return {
        "id": name,
        "object": "model",
        "created": serving.started,
        "owned_by": "nanovllm",
        "root": settings.model_name if adapter is None else adapter.lora_path,
        "parent": None if adapter is None else adapter.base_model_name or settings.model_name,
        "max_model_len": serving.engine.llm.max_model_len,
    }


async def tokenize(serving: Serving, request: Request) -> Response:
    """Token ids of a prompt or of messages, which may be longer than what the engine takes"""
    body = await serving.read(request, TokenizeRequest)
    if (body.prompt is None) == (body.messages is None):
        raise invalid("give either prompt or messages", "prompt")
    llm = serving.engine.llm

    def token_ids() -> list[int]:
        if body.prompt is None:
            return chat_prompt(serving, body)
        return encode(llm, body.prompt, body.add_special_tokens is not False)

    tokens = await serving.in_text_thread(body, token_ids)
    answer = {"count": len(tokens), "max_model_len": llm.max_model_len, "tokens": tokens, "token_strs": None}
    if body.return_token_strs:
        tokenizer = llm.engine.tokenizer
        assert tokenizer is not None
        answer["token_strs"] = await serving.in_text_thread(body, lambda: [*map(tokenizer.token_string, tokens)])
    return JSONResponse(answer)


async def detokenize(serving: Serving, request: Request) -> Response:
    """The text of token ids"""
    body = await serving.read(request, DetokenizeRequest)
    tokenizer = serving.engine.llm.engine.tokenizer
    size = serving.engine.llm.engine.vocab_size
    if tokenizer is None:
        raise RequestError("the model directory has no tokenizer files, so token ids have no text")
    for token in body.tokens:
        if not 0 <= token < size:
            raise invalid(f"token id {quoted(token)} is not one of the model's: ids are from 0 to {size - 1}", "tokens")

    def text() -> str:
        with as_request_error("the tokenizer cannot decode the tokens"):
            return tokenizer.decode(body.tokens, skip_special_tokens=False)

    return JSONResponse({"prompt": await serving.in_text_thread(body, text)})


# ---- the page: one file that loads nothing from elsewhere, and the events that it shows


async def show_page(serving: Serving, request: Request) -> Response:
    """A page: a conversation about documents, and where the KV cache is"""
    html = PAGE.read_text(encoding="utf-8")
    return HTMLResponse(html, headers=page_headers(html))


async def kv_cache_events(serving: Serving, request: Request) -> Response:
    """Where the KV cache is, as server-sent events"""
    return EventStream(serving.kv_events.listen())


def page_headers(html: str) -> dict[str, str]:
    """The headers of the page. The browser runs only what the file itself holds, and connects only to this server."""
    policy = (
        f"default-src 'none'; script-src {_hashes(html, 'script')}; style-src {_hashes(html, 'style')}; img-src data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    )
    others = {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "Cache-Control": "no-cache"}
    return {"Content-Security-Policy": policy, **others}


def _hashes(html: str, tag: str) -> str:
    """The sources that allow the inline elements of this tag, as Content-Security-Policy names them."""
    bodies = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(body.encode()).digest()).decode() for body in bodies]
    return " ".join(f"'sha256-{digest}'" for digest in digests)


# ---- which endpoint is where


async def show_schema(serving: Serving, request: Request) -> Response:
    """This schema, as OpenAPI 3.1"""
    kinds = [(kind, "validation") for _, kind in POSTS.values()]
    _, definitions = models_json_schema(kinds, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
    responses = {"200": {"description": "The answer"}, "default": {"description": "An error, in OpenAI's shape"}}
    paths: dict[str, Any] = {
        path: {"get": {"summary": GETS[path].__doc__, "responses": responses}}
        for path in ("/v1/models", "/health", "/version")
    }
    for path, (endpoint, kind) in POSTS.items():
        content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{kind.__name__}"}}}
        body = {"required": True, "content": content}
        paths[path] = {"post": {"summary": endpoint.__doc__, "requestBody": body, "responses": responses}}
    key = {"key": {"type": "http", "scheme": "bearer"}}
    return JSONResponse(
        {
            "openapi": "3.1.0",
            "info": {"title": "nanovllm", "version": __version__},
            "paths": paths,
            "components": {"schemas": definitions["$defs"], "securitySchemes": key},
        }
    )


GETS: dict[str, Endpoint] = {
    "/": show_page,
    "/v1/kv-cache/events": kv_cache_events,
    "/v1/models": list_models,
    "/v1/models/{name:path}": show_model,
    "/health": health,
    "/version": show_version,
    "/metrics": show_metrics,
    "/openapi.json": show_schema,
}
POSTS: dict[str, tuple[Endpoint, type[Body]]] = {
    "/v1/completions": (create_completion, CompletionRequest),
    "/v1/chat/completions": (create_chat_completion, ChatRequest),
    "/tokenize": (tokenize, TokenizeRequest),
    "/detokenize": (detokenize, DetokenizeRequest),
}
