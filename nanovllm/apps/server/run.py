"""Runs the server: from the socket to the last answer after SIGTERM."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from types import FrameType

import uvicorn

from nanovllm import AsyncLLM
from nanovllm.apps.server.app import build_app
from nanovllm.apps.server.connections import ConnectionConfig, usable_connections
from nanovllm.apps.server.http_errors import SERVER, ApiError
from nanovllm.apps.server.limits import RETRY_SECONDS, Admission
from nanovllm.apps.server.settings import ServerSettings
from nanovllm.errors import ConfigError

logger = logging.getLogger(__name__)

FORCED_CLOSE_SECONDS = 2.0
ANSWER_SECONDS = 5.0  # in which clients read what is left of their answers
BACKLOG = 2048


def open_socket(settings: ServerSettings) -> socket.socket:
    """A socket at the server's address, not yet listening. Raises ConfigError."""
    try:
        family = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[0][0]
        opened = socket.socket(family, socket.SOCK_STREAM)
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
        config = ConnectionConfig(app, settings, usable_connections(settings.max_connections))
        config.backlog = BACKLOG
        super().__init__(config)

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
            self._engine.fail(ApiError(503, message, kind=SERVER, code="shutting_down", retry_after=RETRY_SECONDS))
            if tasks := list(self.server_state.tasks):
                await asyncio.wait(tasks, timeout=FORCED_CLOSE_SECONDS)
        for connection in list(self.server_state.connections):
            connection.transport.abort()
