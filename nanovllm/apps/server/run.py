"""Runs the server: from the socket to the last answer after SIGTERM."""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import ssl
import time
from types import FrameType
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from nanovllm import AsyncLLM
from nanovllm.apps.server.app import build_app
from nanovllm.apps.server.limits import Admission
from nanovllm.apps.server.responses import LATER, ApiError, to_json
from nanovllm.apps.server.settings import ServerSettings
from nanovllm.errors import ConfigError

logger = logging.getLogger(__name__)

FORCED_CLOSE_SECONDS = 2.0
ANSWER_SECONDS = 5.0  # in which clients read what is left of their answers
BACKLOG = 2048  # uvicorn's
SPARE_FILES = 128  # descriptors that connections leave to everything else


def open_socket(settings: ServerSettings) -> socket.socket:
    """A socket at the server's address, not yet listening. Raises ConfigError."""
    try:
        family = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[0][0]
        # Its connections send at once (TCP_NODELAY): asyncio sees to it for sockets whose protocol is named.
        opened = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind((settings.host, settings.port))
    except OSError as error:
        raise ConfigError(
            f"the server cannot listen on {settings.host}:{settings.port}: {error.strerror or error}; name another "
            "--host or --port"
        ) from None
    return opened


def address(settings: ServerSettings, opened: socket.socket) -> str:
    """The server's URL."""
    scheme = "http" if settings.ssl_certfile is None else "https"
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"{scheme}://{host}:{opened.getsockname()[1]}"


def serve(engine: AsyncLLM, settings: ServerSettings, opened: socket.socket) -> int:
    """Serve until a signal ends it, or the engine's end. Closes the engine. Returns the exit status."""
    server = Server(engine, settings)
    try:
        server.run(sockets=[opened])
    finally:
        engine.close(FORCED_CLOSE_SECONDS) if server.stops_now else engine.close()
    return 1 if server.engine_failed else 0


class Server(uvicorn.Server):
    """Drains on SIGTERM and SIGINT: refuses new requests, lets running ones end. A second signal ends it at once."""

    def __init__(self, engine: AsyncLLM, settings: ServerSettings) -> None:
        self._engine = engine
        self._admission = Admission(engine, settings.max_queue)
        self._shutdown_timeout = settings.shutdown_timeout
        self._deadline: float | None = None  # of draining
        self.stops_now = False  # a second signal has come
        self.engine_failed = False
        app = build_app(engine, settings, self._admission)
        super().__init__(ConnectionConfig(app, settings))

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """uvicorn's signal handler."""
        self.stops_now = self._admission.draining
        self._admission.draining = True

    async def on_tick(self, counter: int) -> bool:
        """uvicorn's: called every 0.1 s. Returns whether to stop listening."""
        self.engine_failed = self._engine.error is not None
        if self._admission.draining and not self.stops_now:
            await self._drain()
        return self.engine_failed or self.stops_now or await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """uvicorn's: stop listening, and wait until the answers have been read."""
        cutting_off = asyncio.ensure_future(self._cut_off())
        try:
            await super().shutdown(sockets)
        finally:
            cutting_off.cancel()

    async def _drain(self) -> None:
        if self._deadline is None:
            logger.warning("draining: %d prompts are being answered", self._admission.num_prompts)
            self._deadline = time.monotonic() + self._shutdown_timeout
        if not self._admission.num_prompts:
            self.should_exit = True
        elif time.monotonic() > self._deadline:
            logger.warning("%d prompts did not end in time and are aborted", self._admission.num_prompts)
            self.should_exit = True
            aborting = asyncio.ensure_future(self._engine.abort())
            await asyncio.wait((aborting,), timeout=FORCED_CLOSE_SECONDS)

    async def _cut_off(self) -> None:
        """End the answers that do not end in time as if their clients had gone away; after a second signal all of them.

        uvicorn would cancel them, with a traceback for each in the log.
        """
        until = time.monotonic() + ANSWER_SECONDS
        while time.monotonic() < until and not self.stops_now:
            await asyncio.sleep(0.1)
        if self.stops_now:
            logger.warning("stopping at once: %d prompts are cut off", self._admission.num_prompts)
            message = "the server was stopped while it computed this answer: send the request later"
            self._engine.fail(ApiError(503, message, code="shutting_down"))
            if tasks := list(self.server_state.tasks):
                await asyncio.wait(tasks, timeout=FORCED_CLOSE_SECONDS)
        for connection in list(self.server_state.connections):
            connection.transport.abort()


class ConnectionConfig(uvicorn.Config):
    """uvicorn's configuration, from the server's settings."""

    def __init__(self, app: Any, settings: ServerSettings) -> None:
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
        _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
        self.max_connections = max(1, min(settings.max_connections, most_files - SPARE_FILES))
        self.header_timeout = settings.header_timeout


class LimitedProtocol(H11Protocol):
    """Refuses connections beyond the limit with status 503, and closes those whose header takes too long."""

    config: ConnectionConfig
    _header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) <= self.config.max_connections:
            self._wait_for_header()
            return
        message = f"the server has its {self.config.max_connections} connections: try again later"
        body = to_json(ApiError(503, message, code="too_many_connections").body)
        fields = {"Content-Type": "application/json", "Connection": "close", "Content-Length": len(body), **LATER}
        header = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        transport.write(f"HTTP/1.1 503 Service Unavailable\r\n{header}\r\n".encode() + body)
        transport.close()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE and self.conn.our_state is not h11.DONE:
            self._stop_waiting()
        elif self._header_timer is None:  # a header has begun, or an answered request still goes on
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
