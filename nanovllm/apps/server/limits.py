"""What a client may do: keys, the size of bodies, and how many requests may wait."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from nanovllm import AsyncLLM
from nanovllm.apps.server.responses import ApiError, invalid
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
        self.draining = False

    @contextmanager
    def admitted(self, num_prompts: int) -> Iterator[None]:
        """Context in which a request's prompts count. Raises ApiError with status 429 if too many wait."""
        waiting = self.num_prompts - self._engine.llm.metrics().running_requests
        if waiting + num_prompts > self._max_queue:
            message = f"{waiting} prompts wait for the engine and at most {self._max_queue} may: send it later"
            raise ApiError(429, message, code="queue_full")
        self.num_prompts += num_prompts
        try:
            yield
        finally:
            self.num_prompts -= num_prompts


class Gate:
    """ASGI middleware: asks for a key, and refuses requests while the server drains.

    A server for this machine alone that asks for no key takes only requests that address this machine. Otherwise a web
    page could reach it through a name of its own that it resolves to this machine (DNS rebinding).
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings, admission: Admission) -> None:
        self._app = app
        self._is_local = not settings.is_public and not settings.api_keys
        self._digests = [_digest(key) for key in settings.api_keys]
        self._admission = admission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        await (self._app if refusal is None else refusal.response())(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        headers = Headers(scope=scope)
        if "content-length" in headers and "transfer-encoding" in headers:  # a proxy may have read the other one
            refusal = invalid("the header has both Content-Length and Transfer-Encoding: send one of them")
            refusal.headers["Connection"] = "close"
            return refusal
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
        if self._admission.draining and scope["path"].startswith("/v1/"):
            return ApiError(503, "the server is shutting down", code="shutting_down")
        return None

    def _has_key(self, authorization: str) -> bool:
        """Compares with every key, in a time that does not depend on where they differ."""
        scheme, _, key = authorization.partition(" ")
        given = _digest(key.strip())
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        return any(matches) and scheme.lower() == "bearer"


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


async def read_body(request: Request, settings: ServerSettings) -> bytes:
    """The body of a JSON request. Raises ApiError: 415, 413 beyond max_body_bytes, 408 if the client stops sending.

    uvicorn discards what a refused client still sends.
    """
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(415, "the header Content-Type must be application/json")
    coding = request.headers.get("content-encoding", "").strip()
    if coding.lower() not in ("", "identity"):
        message = f"the body is compressed (Content-Encoding: {coding!r:.100}), and this server takes plain JSON only"
        refusal = ApiError(415, f"{message}: send it without compression")
        refusal.headers["Accept-Encoding"] = "identity"
        raise refusal
    announced = int(request.headers.get("content-length", 0))
    body = bytearray()
    stream = request.stream()
    while max(len(body), announced) <= settings.max_body_bytes:
        try:
            async with asyncio.timeout(settings.idle_timeout):
                part = await anext(stream, None)
        except TimeoutError:
            raise ApiError(408, f"the body stopped coming for {settings.idle_timeout:g} s: send it again") from None
        if part is None:
            return bytes(body)
        body += part
    message = f"the body has more than the {settings.max_body_bytes:,} bytes that this server takes"
    raise ApiError(413, f"{message}: send a shorter prompt", code="body_too_large")


def check_model(name: str | None, names: Sequence[str]) -> None:
    """Raise ApiError with status 404 for a model that is not served. None is the model that is."""
    if name is not None and name not in names:
        message = f"the model {name!r:.100} is not served: this server has {names[0]!r}"
        raise ApiError(404, message, param="model", code="model_not_found")
