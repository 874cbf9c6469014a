"""HTTP connections with limits on their number and on the time that a request's header may take."""

from __future__ import annotations

import asyncio
import json
import resource
import ssl
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from nanovllm.server.http_errors import SERVER, ApiError
from nanovllm.server.limits import RETRY_SECONDS
from nanovllm.server.settings import ServerSettings

SPARE_FILES = 128  # descriptors that connections leave to everything else
MOST_FILES = 65536


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
            timeout_graceful_shutdown=5,
            ssl_keyfile=settings.ssl_keyfile,
            ssl_certfile=settings.ssl_certfile,
            ssl_keyfile_password=settings.ssl_keyfile_password,
            ssl_ca_certs=settings.ssl_ca_certs,
            ssl_cert_reqs=ssl.CERT_NONE if settings.ssl_ca_certs is None else ssl.CERT_REQUIRED,
        )
        self.max_connections = max_connections
        self.header_timeout = settings.header_timeout


class LimitedProtocol(H11Protocol):
    """Refuses connections beyond the limit with status 503, and closes those whose header takes too long."""

    config: ConnectionConfig
    _header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.config.max_connections:
            transport.write(_refusal(self.config.max_connections))
            transport.close()
        else:
            self._wait_for_header()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._stop_waiting()
        elif self._header_timer is None and self.conn.trailing_data[0]:
            self._wait_for_header()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

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


def _refusal(max_connections: int) -> bytes:
    message = f"the server has its {max_connections} connections: try again later"
    body = json.dumps(ApiError(503, message, kind=SERVER, code="too_many_connections").body).encode()
    header = (
        "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nConnection: close\r\n"
        f"Retry-After: {RETRY_SECONDS}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return header.encode() + body
