"""The settings of the server, apart from those of the engine: plain data, checked once."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nanovllm import LoRARequest
from nanovllm.apps.tool_calls.formats import PARSER_HELP, PARSERS
from nanovllm.errors import ConfigError, quoted
from nanovllm.rules import FLAG, TEXT, TEXT_OR_NONE, Rule, argument, check_fields, number, one_of, whole
from nanovllm.text.prompts import CONTENT_FORMAT_HELP, CONTENT_FORMATS

LOOPBACK = ("127.0.0.1", "localhost", "::1")
COUNT = whole(1)
VARIABLES = Rule(lambda value: isinstance(value, Mapping), "must be an object with variables of the chat template")
SECONDS = number("must be a number of seconds above 0", lambda seconds: seconds > 0)


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """What `build_app` and `nanovllm serve` take. Times are in seconds, sizes in bytes. Fields with a rule are flags.

    served_model_names: the names that requests may use; the first one is in answers. lora_requests: adapters that
    requests use by naming them as their model. api_keys: accepted keys; none
    means that no key is asked for. allowed_origins: web pages of these origins may use the server (CORS).
    chat_template: the text of a template to use instead of the tokenizer's.
    """

    served_model_names: tuple[str, ...]
    api_keys: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    chat_template: str | None = None
    lora_requests: tuple[LoRARequest, ...] = ()
    host: str = argument("127.0.0.1", TEXT, "address to listen on; 127.0.0.1 is this machine")
    port: int = argument(8000, whole(0, most=65535), "0 takes a free one")
    chat_template_content_format: str = argument("auto", one_of(*CONTENT_FORMATS), CONTENT_FORMAT_HELP)
    default_chat_template_kwargs: Mapping[str, Any] = argument(
        {}, VARIABLES, "variables of the chat template, unless a request gives others"
    )
    trust_request_chat_template: bool = argument(False, FLAG, "let requests bring chat templates")
    tool_call_parser: str = argument("auto", one_of(*PARSERS), PARSER_HELP)
    ui: bool = argument(True, FLAG, "the page at /")
    access_log: bool = argument(False, FLAG, "log the path and status of every request")
    ssl_keyfile: str | None = argument(None, TEXT_OR_NONE, "private key for TLS, a file in PEM")
    ssl_certfile: str | None = argument(None, TEXT_OR_NONE, "certificate for TLS, a file in PEM")
    ssl_ca_certs: str | None = argument(None, TEXT_OR_NONE, "ask clients for a certificate of one of these CAs")
    ssl_keyfile_password: str | None = argument(None, TEXT_OR_NONE, "of an encrypted private key")
    max_body_bytes: int = argument(32 << 20, COUNT, "of a request's body")
    max_prompts: int = argument(256, COUNT, "prompts of a request")
    max_queue: int = argument(1024, COUNT, "prompts that wait for the engine; more are refused with status 429")
    max_connections: int = argument(1024, COUNT, "open connections; more are refused with status 503")
    idle_timeout: float = argument(30.0, SECONDS, "seconds between two requests of a connection")
    shutdown_timeout: float = argument(
        60.0,
        number("must be a number of seconds of at least 0", lambda seconds: seconds >= 0),
        "seconds for running requests after SIGTERM",
    )

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)
        if not self.served_model_names:
            raise ConfigError("served_model_names=(): must hold at least one name")
        adapters = [adapter.lora_name for adapter in self.lora_requests]
        if len({*adapters, *self.served_model_names}) < len(adapters) + len({*self.served_model_names}):
            raise ConfigError(f"lora_requests={quoted(adapters)}: each needs a name of its own")
        if any(not key.isascii() or not key or key != key.strip() for key in self.api_keys):
            raise ConfigError("an API key is empty, or has spaces around it or characters beyond ASCII: use another")
        self._check_variables()
        self._check_tls()

    def _check_variables(self) -> None:
        if not self.default_chat_template_kwargs:
            return
        from nanovllm.text.chat_template import NOT_VARIABLES  # takes a moment, which --help need not wait

        if wrong := sorted(NOT_VARIABLES & self.default_chat_template_kwargs.keys()):
            raise ConfigError(
                f"default_chat_template_kwargs={quoted(wrong[0])}: must hold variables of the template only"
            )

    def _check_tls(self) -> None:
        """Read the files, so that a wrong one is found before a model is loaded."""
        if self.ssl_certfile is None or self.ssl_keyfile is None:
            if any((self.ssl_certfile, self.ssl_keyfile, self.ssl_keyfile_password, self.ssl_ca_certs)):
                raise ConfigError("TLS needs both: give ssl_certfile and ssl_keyfile")
            return
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.ssl_certfile, self.ssl_keyfile, lambda: self.ssl_keyfile_password or "")
            if self.ssl_ca_certs is not None:
                context.load_verify_locations(self.ssl_ca_certs)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"TLS cannot use the files of ssl_certfile, ssl_keyfile and ssl_ca_certs: {error}"
            ) from None

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
