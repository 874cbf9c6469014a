"""Runs the server: from the socket to the last answer after SIGTERM."""

from __future__ import annotations

import asyncio
import logging
import math
import resource
import socket
import ssl
from types import FrameType
from typing import Any

import uvicorn

from nanovllm import AsyncLLM
from nanovllm.apps.server.admission import Admission
from nanovllm.apps.server.app import build_app
from nanovllm.apps.server.settings import ServerSettings
from nanovllm.errors import ConfigError

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 2.0  # most time for a running step after a second signal
ANSWER_SECONDS = 5.0  # for clients to read what is left of aborted answers
BACKLOG = 2048  # uvicorn's


def open_socket(settings: ServerSettings) -> socket.socket:
    """A socket at the server's address, not yet listening. Raises ConfigError."""
    try:
        family = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[0][0]
        # Its connections send at once (TCP_NODELAY): asyncio sees to it for sockets whose protocol is named.
        opened = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind((settings.host, settings.port))
    except (OSError, ValueError) as error:  # ValueError: no name of a host
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"the server cannot listen on {settings.host}:{settings.port}: {reason}; name another --host or --port"
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
        return 0 if engine.error is None else 1
    finally:
        engine.close(CLOSE_SECONDS) if server.force_exit else engine.close()


class Server(uvicorn.Server):
    """uvicorn's server, which also ends with the engine, and which aborts the requests that are left when it stops."""

    def __init__(self, engine: AsyncLLM, settings: ServerSettings) -> None:
        self._engine = engine
        self._admission = Admission(engine, settings.max_queue)
        self._shutdown_timeout = settings.shutdown_timeout
        super().__init__(_config(build_app(engine, settings, self._admission), settings))

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """uvicorn's signal handler. Its own raises the signal again, which would end the process before the engine.

        A second signal cuts all connections off.
        """
        if self.should_exit:
            self.force_exit = True
            for connection in list(self.server_state.connections):
                connection.transport.abort()
        self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        """uvicorn's: called every 0.1 s. Returns whether to stop."""
        return await super().on_tick(counter) or self._engine.error is not None

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """uvicorn's: stop listening, and wait until what runs has been answered."""
        self._admission.is_closing = True
        aborting = asyncio.ensure_future(self._abort_at_timeout())
        try:
            await super().shutdown(sockets)
        finally:
            aborting.cancel()

    async def _abort_at_timeout(self) -> None:
        logger.warning("stopping: %d prompts are being answered", self._admission.num_prompts)
        await asyncio.sleep(self._shutdown_timeout)
        logger.warning("%d prompts did not end in time and are aborted", self._admission.num_prompts)
        await self._engine.abort()


def _config(app: Any, settings: ServerSettings) -> uvicorn.Config:
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))  # a connection is an open file
    return uvicorn.Config(
        app,
        http="h11",  # which limits the size of a header
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",  # every broken request would be a warning
        access_log=settings.access_log,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=settings.max_connections + 1,  # uvicorn refuses the one that reaches it
        timeout_keep_alive=math.ceil(settings.idle_timeout),
        timeout_graceful_shutdown=math.ceil(settings.shutdown_timeout + ANSWER_SECONDS),
        ssl_keyfile=settings.ssl_keyfile,
        ssl_certfile=settings.ssl_certfile,
        ssl_keyfile_password=settings.ssl_keyfile_password,
        ssl_ca_certs=settings.ssl_ca_certs,
        ssl_cert_reqs=ssl.CERT_NONE if settings.ssl_ca_certs is None else ssl.CERT_REQUIRED,
    )
