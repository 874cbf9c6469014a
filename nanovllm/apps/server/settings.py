"""The settings of the server, apart from those of the engine: plain data, checked once."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nanovllm.errors import ConfigError, quoted

if TYPE_CHECKING:  # for annotations only: torch comes with it
    from nanovllm import LoRARequest

TOOL_CALL_PARSERS = ("auto", "hermes", "llama3_json", "none")
LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """What `build_app` and `nanovllm serve` take. Times are in seconds, sizes in bytes.

    served_model_names: the names that requests may use; the first one is in answers. lora_requests: adapters that
    requests use by naming them as their model. api_keys: accepted keys; none
    means that no key is asked for. allowed_origins: web pages of these origins may use the server (CORS).
    max_body_bytes: of a request's body. max_prompts: of one request. max_queue: requests that wait for the engine;
    more are refused with status 429. max_connections: more are refused with status 503.
    header_timeout: until a request's header is complete. idle_timeout: between two parts of a request's body, and
    between two requests of a connection. shutdown_timeout: for running requests, after SIGTERM.
    chat_template: the text of a template to use instead of the tokenizer's. trust_request_chat_template: requests may
    bring templates. tool_call_parser: the format of tool calls in the model's text; "auto" reads it off the chat
    template. ui: the page at `/`. ssl_*: PEM files for TLS; with ssl_ca_certs, clients need a certificate of these CAs.
    """

    served_model_names: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    max_body_bytes: int = 32 << 20
    max_prompts: int = 256
    max_queue: int = 1024
    max_connections: int = 1024
    header_timeout: float = 10.0
    idle_timeout: float = 30.0
    shutdown_timeout: float = 60.0
    chat_template: str | None = None
    trust_request_chat_template: bool = False
    tool_call_parser: str = "auto"
    ui: bool = True
    access_log: bool = False
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    ssl_keyfile_password: str | None = None
    ssl_ca_certs: str | None = None
    lora_requests: tuple[LoRARequest, ...] = ()

    def __post_init__(self) -> None:
        _require(bool(self.served_model_names), "served_model_names", "must hold at least one name", ())
        adapters = [adapter.lora_name for adapter in self.lora_requests]
        are_distinct = len({*adapters, *self.served_model_names}) == len(adapters) + len({*self.served_model_names})
        _require(are_distinct, "lora_requests", "each needs a name of its own", adapters)
        _require(0 <= self.port <= 65535, "port", "must be from 0 to 65535; 0 takes a free one", self.port)
        for name in ("max_body_bytes", "max_prompts", "max_queue", "max_connections"):
            _require(getattr(self, name) >= 1, name, "must be at least 1", getattr(self, name))
        for name in ("header_timeout", "idle_timeout"):
            _require(getattr(self, name) > 0, name, "must be above 0", getattr(self, name))
        _require(self.shutdown_timeout >= 0, "shutdown_timeout", "must be at least 0", self.shutdown_timeout)
        rule = f"must be one of {', '.join(TOOL_CALL_PARSERS)}"
        _require(self.tool_call_parser in TOOL_CALL_PARSERS, "tool_call_parser", rule, self.tool_call_parser)
        if any(not key.isascii() or not key or key != key.strip() for key in self.api_keys):
            raise ConfigError("an API key is empty, or has spaces around it or characters beyond ASCII: use another")
        self._check_tls()

    def _check_tls(self) -> None:
        """Read the files, so that a wrong one is found before a model is loaded."""
        certificate, key = self.ssl_certfile, self.ssl_keyfile
        for name in ("ssl_certfile", "ssl_keyfile", "ssl_keyfile_password", "ssl_ca_certs"):
            if getattr(self, name) is not None and None in (certificate, key):
                raise ConfigError(f"{name} has no effect without TLS: give ssl_keyfile and ssl_certfile together")
        if certificate is None:
            return
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(certificate, key, lambda: self.ssl_keyfile_password or "")
        except (OSError, ValueError):  # OpenSSL's own words say little
            raise ConfigError(
                f"ssl_certfile={quoted(certificate)} and ssl_keyfile={quoted(key)} cannot be used together: "
                "give a certificate and its own private key as PEM, and ssl_keyfile_password for an encrypted key"
            ) from None
        try:
            context.load_verify_locations(self.ssl_ca_certs) if self.ssl_ca_certs is not None else None
        except (OSError, ValueError):
            raise ConfigError(f"ssl_ca_certs={quoted(self.ssl_ca_certs)}: must hold CA certificates as PEM") from None

    @property
    def names(self) -> tuple[str, ...]:
        """The names that requests may use, those of adapters too."""
        return (*self.served_model_names, *(adapter.lora_name for adapter in self.lora_requests))

    def adapter(self, name: str | None) -> LoRARequest | None:
        """The adapter that a request names as its model."""
        return next((adapter for adapter in self.lora_requests if adapter.lora_name == name), None)

    def answer_name(self, name: str | None) -> str:
        """The model's name in the answer to a request that names it so."""
        return name if name is not None and self.adapter(name) is not None else self.model_name

    @property
    def model_name(self) -> str:
        """The name of the model in answers."""
        return self.served_model_names[0]

    @property
    def is_public(self) -> bool:
        """Whether the server listens beyond this machine."""
        return self.host not in LOOPBACK


def _require(condition: bool, name: str, rule: str, value: object) -> None:
    if not condition:
        raise ConfigError(f"{name}={quoted(value)}: {rule}")
