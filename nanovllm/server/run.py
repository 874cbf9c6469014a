"""Runs the server: from the socket to the last answer after SIGTERM."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from types import FrameType

import uvicorn

from nanovllm.errors import ConfigError
from nanovllm.server.app import build_app
from nanovllm.server.async_llm import AsyncLLM
from nanovllm.server.connections import ConnectionConfig, usable_connections
from nanovllm.server.limits import Admission
from nanovllm.server.settings import ServerSettings

logger = logging.getLogger(__name__)

FORCED_CLOSE_SECONDS = 2.0
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
        engine.close(FORCED_CLOSE_SECONDS) if server.force_exit else engine.close()
    return 1 if server.engine_failed else 0


class Server(uvicorn.Server):
    """Drains on SIGTERM and SIGINT: refuses new requests, lets running ones end. A second signal ends it at once."""

    def __init__(self, engine: AsyncLLM, settings: ServerSettings) -> None:
        self._engine = engine
        self._admission = Admission(engine, settings.max_queue)
        self._shutdown_timeout = settings.shutdown_timeout
        self._deadline: float | None = None  # of draining
        self.engine_failed = False
        app = build_app(engine, settings, self._admission)
        config = ConnectionConfig(app, settings, usable_connections(settings.max_connections))
        config.backlog = BACKLOG
        super().__init__(config)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """uvicorn's signal handler."""
        if self._admission.draining:
            self.force_exit = self.should_exit = True
        self._admission.draining = True

    async def on_tick(self, counter: int) -> bool:
        """uvicorn's: called every 0.1 s. Returns whether to stop listening."""
        self.engine_failed = self._engine.error is not None
        if self._admission.draining:
            await self._drain()
        return self.engine_failed or await super().on_tick(counter)

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
