"""What is sent: errors in OpenAI's shape, and responses that end when their client goes away."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import ExitStack, aclosing
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from nanovllm.errors import ConfigError, EngineError, RequestError, one_line

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
COMMENT = b": keep-alive\n\n"  # clients ignore it
SILENCE_SECONDS = 15.0  # until a comment is sent; proxies and clients give up after 60 s or more without data
LONGEST = 2000  # characters of a message
PARAMETER = re.compile(r"\b([a-z_]+)=")  # how RequestErrors quote the value of a parameter
LATER = {"Retry-After": "5"}
KINDS = {
    401: ("authentication_error", {"WWW-Authenticate": "Bearer"}),
    429: ("rate_limit_error", LATER),
    500: ("server_error", {}),
    503: ("server_error", LATER),
}


class ApiError(Exception):
    """An answer that is an error: `{"error": {"message", "type", "param", "code"}}`, as OpenAI's.

    param: the field of the request that is wrong.
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        kind, headers = KINDS.get(status, ("invalid_request_error", {}))
        self.status = status
        self.headers = dict(headers)
        self.body = {"error": {"message": one_line(message, LONGEST), "type": kind, "param": param, "code": code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status, self.headers)


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A request that cannot be served as it is: status 400."""
    return ApiError(400, message, param=param, code=code)


def as_api_error(error: Exception) -> ApiError:
    """The answer to any exception. Only messages that are written for users are shown."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ConfigError | RequestError):
        named = PARAMETER.search(str(error))
        return invalid(str(error), named[1] if named else None)
    if isinstance(error, EngineError):
        logger.error("%s", error)
        return ApiError(503, "the engine has ended; the server's log says why", code="engine_error")
    if isinstance(error, ClientDisconnect):
        return invalid("the client went away before its request was complete")
    logger.error("a request failed", exc_info=error)
    return ApiError(500, "the server failed to answer this request; its log says why", code="internal_error")


async def respond_to_wrong_path(request: Request, error: Exception) -> JSONResponse:
    """Starlette's exception handler for paths and methods that are not served."""
    assert isinstance(error, HTTPException)
    answer = ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
    answer.headers |= error.headers or {}
    return answer.response()


def to_json(value: Any) -> bytes:
    """Strict JSON in UTF-8."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def event(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + to_json(value) + b"\n\n"


class EventStream(Response):
    """Sends events as the generator yields them, no faster than the client reads. The generator is always closed.

    After each `silence` seconds in which nothing was sent, it sends a comment: a long prompt takes minutes, and so may
    text that is held back.
    held: is closed at the end, also where the client goes away before the generator has begun.
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncGenerator[bytes, None], held: ExitStack | None = None, silence: float | None = None
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._held = ExitStack() if held is None else held
        self._silence = SILENCE_SECONDS if silence is None else silence

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._held:
            await unless_disconnected(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        async def send_part(data: bytes, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": more})

        async with aclosing(self._events):
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            try:
                while (data := await self._next(send_part)) is not None:
                    await send_part(data)
            except Exception as error:  # the status is sent already: an event tells of the error
                await send_part(event(as_api_error(error).body))
            await send_part(b"", more=False)

    async def _next(self, send_part: Callable[[bytes], Awaitable[None]]) -> bytes | None:
        """The next event, with comments while it does not come; None after the last one."""
        coming = asyncio.ensure_future(anext(self._events, None))
        try:
            while not (await asyncio.wait((coming,), timeout=self._silence))[0]:
                await send_part(COMMENT)
            return coming.result()
        finally:
            coming.cancel()
            await asyncio.gather(coming, return_exceptions=True)  # the generator cannot be closed while it runs


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, Any]) -> Any:
    """The result of `work`, or None if the client goes away first, which cancels it. The body must have been read."""
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        gone.cancel()
        await asyncio.wait((working, gone))


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
