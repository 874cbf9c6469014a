"""What a client may do: keys, the size of bodies, and how many requests may wait."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager, suppress

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from nanovllm import AsyncLLM
from nanovllm.apps.server.http_errors import AUTHENTICATION, RATE_LIMIT, SERVER, ApiError
from nanovllm.apps.server.settings import LOOPBACK, ServerSettings
from nanovllm.errors import quoted

FREE_PATHS = ("/health", "/")  # need no key; the page at / asks for one
HOST = re.compile(r":\d*$")  # the port in a header Host
RETRY_SECONDS = 5  # what refused clients are told to wait
DISCARD_SECONDS = 5.0  # how long an oversized body is read and discarded, so that its client reads the answer


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
            raise ApiError(
                429,
                f"{waiting} prompts wait for the engine and at most {self._max_queue} may: send this request later",
                kind=RATE_LIMIT,
                code="queue_full",
                retry_after=RETRY_SECONDS,
            )
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
            return ApiError(401, message, kind=AUTHENTICATION, code="invalid_api_key")
        if self._admission.draining and scope["path"].startswith("/v1/"):
            return ApiError(
                503, "the server is shutting down", kind=SERVER, code="shutting_down", retry_after=RETRY_SECONDS
            )
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
    """The body of a JSON request. Raises ApiError: 415, 413 beyond max_body_bytes, 408 if the client stops sending."""
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(415, "the header Content-Type must be application/json")
    parts: list[bytes] = []
    size = 0  # what Content-Length announces was checked with the header
    stream = request.stream()
    while (part := await _next_part(stream, settings.idle_timeout)) is not None and size <= settings.max_body_bytes:
        parts.append(part)
        size += len(part)
    if size <= settings.max_body_bytes:
        return b"".join(parts)
    parts.clear()
    until = time.monotonic() + DISCARD_SECONDS
    with suppress(ApiError):
        while time.monotonic() < until and await _next_part(stream, DISCARD_SECONDS) is not None:
            pass
    raise body_too_large(settings.max_body_bytes)


def body_too_large(most: int) -> ApiError:
    """The refusal of a body of more than `most` bytes."""
    message = f"the body has more than the {most:,} bytes that this server takes: send a shorter prompt"
    return ApiError(413, message, code="body_too_large")


async def _next_part(stream: AsyncIterator[bytes], seconds: float) -> bytes | None:
    try:
        async with asyncio.timeout(seconds):
            return await anext(stream, None)
    except TimeoutError:
        raise ApiError(408, f"the body stopped coming for {seconds:g} s: send it again") from None


def check_count(num_prompts: int, settings: ServerSettings) -> None:
    """Raise ApiError for no prompts, or for too many."""
    if not 1 <= num_prompts <= settings.max_prompts:
        raise ApiError(
            400, f"prompt holds {num_prompts} prompts and must hold 1 to {settings.max_prompts}", param="prompt"
        )


def check_model(name: str | None, names: Sequence[str]) -> None:
    """Raise ApiError with status 404 for a model that is not served. None is the model that is."""
    if name is not None and name not in names:
        raise ApiError(
            404,
            f"the model {name!r:.100} is not served: this server has {names[0]!r}",
            param="model",
            code="model_not_found",
        )
