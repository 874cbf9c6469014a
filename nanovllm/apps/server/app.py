"""The application: which endpoint is where, and what stands before all of them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib.metadata import PackageNotFoundError, version

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from nanovllm import AsyncLLM
from nanovllm.apps.server import models, tokens
from nanovllm.apps.server.chat import create_chat_completion
from nanovllm.apps.server.completions import create_completion
from nanovllm.apps.server.http_errors import respond_to_error
from nanovllm.apps.server.kv_events import KVCacheEvents
from nanovllm.apps.server.limits import Admission, Gate
from nanovllm.apps.server.metrics import ServerMetrics
from nanovllm.apps.server.openapi import openapi
from nanovllm.apps.server.page import kv_cache_events, show_page
from nanovllm.apps.server.serving import Serving
from nanovllm.apps.server.settings import ServerSettings

Endpoint = Callable[[Serving, Request], Awaitable[Response]]


def build_app(engine: AsyncLLM, settings: ServerSettings, admission: Admission | None = None) -> Starlette:
    """The server as an ASGI application. admission: counts the prompts; its owner can drain the server."""
    admission = Admission(engine, settings.max_queue) if admission is None else admission
    defaults = engine.llm.get_default_sampling_params()
    metrics = ServerMetrics(engine.llm, settings.model_name)
    kv_events = KVCacheEvents(engine, is_over=lambda: admission.draining or engine.error is not None)
    serving = Serving(engine, settings, admission, metrics, kv_events, defaults)
    middleware = [Middleware(Gate, settings=settings, admission=admission)]
    if settings.allowed_origins:
        origins = settings.allowed_origins
        cors = Middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
        middleware.insert(0, cors)
    return Starlette(
        routes=_routes(serving),
        middleware=middleware,
        exception_handlers={HTTPException: respond_to_error, Exception: respond_to_error},
    )


def _routes(serving: Serving) -> list[BaseRoute]:
    def route(path: str, method: str, endpoint: Endpoint) -> Route:
        async def respond(request: Request) -> Response:
            try:
                return await endpoint(serving, request)
            except Exception as error:
                return await respond_to_error(request, error)

        return Route(path, respond, methods=[method])

    return [
        *([route("/", "GET", show_page)] if serving.settings.ui else []),
        route("/v1/kv-cache/events", "GET", kv_cache_events),
        route("/v1/completions", "POST", create_completion),
        route("/v1/chat/completions", "POST", create_chat_completion),
        route("/v1/models", "GET", models.list_models),
        route("/v1/models/{name:path}", "GET", models.show_model),
        route("/tokenize", "POST", tokens.tokenize),
        route("/detokenize", "POST", tokens.detokenize),
        route("/health", "GET", health),
        route("/version", "GET", show_version),
        route("/metrics", "GET", show_metrics),
        route("/openapi.json", "GET", show_schema),
    ]


async def health(serving: Serving, request: Request) -> Response:
    """200 while requests are served, 503 while the server drains and after the engine has ended."""
    if serving.engine.error is not None:
        return JSONResponse({"status": "error", "message": "the engine has ended"}, 503)
    if serving.admission.draining:
        return JSONResponse({"status": "draining"}, 503)
    return JSONResponse({"status": "ok"})


async def show_version(serving: Serving, request: Request) -> Response:
    return JSONResponse({"version": package_version()})


async def show_metrics(serving: Serving, request: Request) -> Response:
    return Response(serving.metrics.text(), media_type=CONTENT_TYPE_LATEST)


async def show_schema(serving: Serving, request: Request) -> Response:
    return JSONResponse(openapi(package_version()))


def package_version() -> str:
    try:
        return version("nanovllm")
    except PackageNotFoundError:  # the sources, run where they are
        return "unknown"
