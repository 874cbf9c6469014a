"""HTTP connections with limits on their number, on a header's bytes and time, and on the body that it announces."""

from __future__ import annotations

import asyncio
import json
import re
import resource
import ssl
from http import HTTPStatus
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from nanovllm.apps.server.http_errors import SERVER, ApiError, invalid
from nanovllm.apps.server.limits import DISCARD_SECONDS, RETRY_SECONDS, body_too_large
from nanovllm.apps.server.settings import ServerSettings

SPARE_FILES = 128  # descriptors that connections leave to everything else
MOST_FILES = 65536
MAX_HEADER_BYTES = 1 << 16  # of the request line and all header fields
TOO_MANY_DIGITS = re.compile(rb"\ncontent-length:[ \t]*\d{21,}[ \t]*\r?\n", re.IGNORECASE)  # for h11


class ConnectionConfig(uvicorn.Config):
    """uvicorn's configuration, from the server's settings."""

    def __init__(self, app: Any, settings: ServerSettings, max_connections: int) -> None:
        super().__init__(
            app,
            host=settings.host,
            http=LimitedProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",  # every broken request would be a warning
            access_log=settings.access_log,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=max(1, round(settings.idle_timeout)),
            timeout_graceful_shutdown=30,  # `Server._cut_off` comes first
            ssl_keyfile=settings.ssl_keyfile,
            ssl_certfile=settings.ssl_certfile,
            ssl_keyfile_password=settings.ssl_keyfile_password,
            ssl_ca_certs=settings.ssl_ca_certs,
            ssl_cert_reqs=ssl.CERT_NONE if settings.ssl_ca_certs is None else ssl.CERT_REQUIRED,
        )
        self.max_connections = max_connections
        self.header_timeout = settings.header_timeout
        self.max_body_bytes = settings.max_body_bytes


class CheckedConnection(h11.Connection):
    """Reads no request whose header is too long, announces too long a body, or has a body of two lengths.

    refusal: why `next_event` has raised RemoteProtocolError, if it was for one of these.
    """

    def __init__(self, max_body_bytes: int) -> None:
        super().__init__(h11.SERVER, MAX_HEADER_BYTES)
        self.refusal: ApiError | None = None
        self._max_body_bytes = max_body_bytes

    def next_event(self) -> Any:
        begun = self.trailing_data[0] if self.their_state is h11.IDLE else b""
        try:
            event = super().next_event()
        except h11.RemoteProtocolError as error:
            if begun and error.error_status_hint == HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE:
                self.refusal = _header_too_large()
            elif TOO_MANY_DIGITS.search(begun):
                self.refusal = body_too_large(self._max_body_bytes)
            raise
        if isinstance(event, h11.Request):
            self.refusal = self._refused(event, len(begun) - len(self.trailing_data[0]))
            if self.refusal is not None:
                raise h11.RemoteProtocolError(str(self.refusal))
        return event

    def _refused(self, request: h11.Request, num_bytes: int) -> ApiError | None:
        headers = dict(request.headers)  # h11 has checked that a field of these two comes once
        length = headers.get(b"content-length")
        if num_bytes > MAX_HEADER_BYTES:
            return _header_too_large()
        if length is not None and b"transfer-encoding" in headers:  # a proxy may have read the other one
            return invalid("the header has both Content-Length and Transfer-Encoding: send one of them")
        if length is not None and int(length) > self._max_body_bytes:
            return body_too_large(self._max_body_bytes)
        return None


class LimitedProtocol(H11Protocol):
    """Refuses connections beyond the limit with status 503, and closes those whose header takes too long."""

    config: ConnectionConfig
    conn: CheckedConnection
    _header_timer: asyncio.TimerHandle | None = None
    _refused = False  # the rest of what the client sends is discarded

    def __init__(self, *arguments: Any, **others: Any) -> None:
        super().__init__(*arguments, **others)
        self.conn = CheckedConnection(self.config.max_body_bytes)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.config.max_connections:
            message = f"the server has its {self.config.max_connections} connections: try again later"
            busy = ApiError(503, message, kind=SERVER, code="too_many_connections", retry_after=RETRY_SECONDS)
            transport.write(_as_bytes(busy))
            transport.close()
        else:
            self._wait_for_header()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing() or self._refused:
            return
        super().data_received(data)
        if self._refused:
            return
        if self.conn.their_state is not h11.IDLE:
            self._stop_waiting()
        elif self._header_timer is None and self.conn.trailing_data[0]:
            self._wait_for_header()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """uvicorn's answer to what is not HTTP, and here also to what `CheckedConnection` refuses.

        The client may still send, and would lose the answer if the connection were closed at once.
        """
        if self.conn.refusal is None:
            super().send_400_response(msg)
            return
        self._stop_waiting()
        self._refused = True
        self.transport.write(_as_bytes(self.conn.refusal))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._header_timer = self.loop.call_later(DISCARD_SECONDS, self.transport.close)

    def shutdown(self) -> None:
        """uvicorn's: close the connection, if need be after its answer. h11 refuses to close one that was refused."""
        if self._refused:
            self.transport.close()
        else:
            super().shutdown()

    def _wait_for_header(self) -> None:
        self._header_timer = self.loop.call_later(self.config.header_timeout, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None


def usable_connections(wanted: int) -> int:
    """How many connections the process can hold, after raising its limit of open files as far as allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft = most
    return max(1, min(wanted, soft - SPARE_FILES))


def _header_too_large() -> ApiError:
    message = f"the header has more than the {MAX_HEADER_BYTES:,} bytes that this server takes: send a shorter one"
    return ApiError(431, message, code="header_too_large")


def _as_bytes(error: ApiError) -> bytes:
    """The whole answer, after which the connection is closed."""
    body = json.dumps(error.body).encode()
    fields = {"Content-Type": "application/json", "Connection": "close", "Content-Length": len(body), **error.headers}
    lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}", *(f"{k}: {v}" for k, v in fields.items())]
    return "\r\n".join([*lines, "", ""]).encode() + body
