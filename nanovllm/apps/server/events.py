"""Responses that end when their client goes away: events as they come (SSE), and answers in one piece."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from nanovllm.apps.server.http_errors import as_api_error

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"


def to_json(value: Any) -> bytes:
    """Strict JSON in UTF-8."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def event(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + to_json(value) + b"\n\n"


class EventStream(Response):
    """Sends events as the generator yields them, no faster than the client reads. The generator is always closed."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await unless_disconnected(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        async with aclosing(self._events):
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            try:
                async for data in self._events:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            except Exception as error:  # the status is sent already: an event tells of the error
                await send({"type": "http.response.body", "body": event(as_api_error(error).body), "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def answer(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """What `work` returns. Cancels it and raises ClientDisconnect if the client goes away first."""
    response = await unless_disconnected(request.receive, work)
    if response is None:
        raise ClientDisconnect
    return response


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, Any]) -> Any:
    """The result of `work`, or None if the client goes away first, which cancels it. The body must have been read."""
    working, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
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
