"""Who may use the server, how long a body may be, and how many prompts may wait."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from nanovllm import AsyncLLM
from nanovllm.apps.server.responses import ApiError
from nanovllm.apps.server.settings import LOOPBACK, ServerSettings
from nanovllm.errors import quoted

FREE_PATHS = ("/health", "/")  # need no key; the page at / asks for one
HOST = re.compile(r":\d*$")  # the port in a header Host


class Admission:
    """Counts the prompts that the server works on, and refuses what would make the queue too long."""

    def __init__(self, engine: AsyncLLM, max_queue: int) -> None:
        self._engine = engine
        self._max_queue = max_queue
        self.num_prompts = 0  # from the time that they are read until their answers are complete
        self.is_closing = False  # the server stops: streams without an end of their own end

    @contextmanager
    def admitted(self, num_prompts: int) -> Iterator[None]:
        """Context in which a request's prompts count. Raises ApiError with status 429 if too many wait."""
        waiting = self.num_prompts - self._engine.llm.metrics().requests.running
        if waiting + num_prompts > self._max_queue:
            message = f"{waiting} prompts wait for the engine and at most {self._max_queue} may: send it later"
            raise ApiError(429, message, code="queue_full")
        self.num_prompts += num_prompts
        try:
            yield
        finally:
            self.num_prompts -= num_prompts


class Gate:
    """ASGI middleware that asks for a key.

    A server for this machine alone that asks for no key takes only requests that address this machine. Otherwise a web
    page could reach it through a name of its own that it resolves to this machine (DNS rebinding).
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app = app
        self._is_local = not settings.is_public and not settings.api_keys
        self._digests = [_digest(key) for key in settings.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        await (self._app if refusal is None else refusal.response())(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if self._is_local and HOST.sub("", host).strip("[]").lower() not in LOOPBACK:
            return ApiError(
                403,
                f"this server takes requests to {LOOPBACK[0]} and the header Host is {quoted(host)}: use that address, "
                "or start the server with an API key",
                code="wrong_host",
            )
        if scope["path"] in FREE_PATHS:
            return None
        if self._digests and not self._has_key(headers.get("authorization", "")):
            message = "a valid API key is needed, as the header 'Authorization: Bearer KEY'"
            return ApiError(401, message, code="invalid_api_key")
        return None

    def _has_key(self, authorization: str) -> bool:
        """Compares with every key, in a time that does not depend on where they differ."""
        scheme, _, key = authorization.partition(" ")
        given = _digest(key.strip())
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        return any(matches) and scheme.lower() == "bearer"


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


async def read_body(request: Request, most_bytes: int) -> bytes:
    """The body of a JSON request. Raises ApiError: 415, or 413 beyond `most_bytes`, of which no more is kept."""
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(415, "the header Content-Type must be application/json")
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > most_bytes:
            message = f"the body has more than the {most_bytes:,} bytes that this server takes: send a shorter prompt"
            raise ApiError(413, message, code="body_too_large")
    return bytes(body)


def check_model(name: str | None, names: Sequence[str]) -> None:
    """Raise ApiError with status 404 for a model that is not served. None is the model that is."""
    if name is not None and name not in names:
        message = f"the model {name!r:.100} is not served: this server has {names[0]!r}"
        raise ApiError(404, message, param="model", code="model_not_found")
