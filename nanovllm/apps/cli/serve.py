"""`nanovllm serve`: an OpenAI-compatible server."""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from nanovllm.apps.cli.arguments import (
    COUNTS,
    add_command,
    add_engine_flags,
    add_server_flags,
    checked_config,
    engine_arguments,
    read_text,
    server_arguments,
)
from nanovllm.apps.cli.boundary import say
from nanovllm.apps.cli.engine import NAMED, check_lora_modules, loading, lora_module, lora_requests
from nanovllm.errors import ConfigError

KEY_VARIABLE = "NANOVLLM_API_KEY"


def add_parser(subparsers: Any, summary: str) -> argparse.ArgumentParser:
    """Add the command and its options."""
    parser = add_command(
        subparsers,
        "serve",
        summary,
        "Serves OpenAI's API: /v1/chat/completions, /v1/completions, /v1/models; also /tokenize, /detokenize, /health, "
        "/version and /metrics. SIGTERM and Ctrl-C let running requests end first.",
    )
    parser.set_defaults(run=run)
    _add_server_flags(parser.add_argument_group("server", COUNTS))
    add_engine_flags(parser)
    return parser


def _add_server_flags(group: Any) -> None:
    from nanovllm.apps.server.settings import ServerSettings

    add_server_flags(group, ServerSettings)
    key = f"ask clients for this key; repeat it for several. {KEY_VARIABLE} in the environment is one too"
    group.add_argument("--api-key", action="append", default=[], metavar="KEY", help=key)
    group.add_argument("--api-key-file", metavar="FILE", help="keys, one on each line")
    origin = "let web pages of this origin use the server (CORS); repeat it for several"
    group.add_argument("--allow-origin", action="append", default=[], metavar="ORIGIN", help=origin)
    group.add_argument("--chat-template", metavar="FILE", help="a Jinja template, used instead of the tokenizer's own")
    adapter = f"adapters that requests may name as their model: {NAMED}"
    group.add_argument(
        "--lora-modules", nargs="+", action="extend", default=[], type=lora_module, metavar="NAME=PATH", help=adapter
    )


def run(args: argparse.Namespace) -> int:
    """Run the command. Returns the exit status: 1 if the engine has failed."""
    _check_installed()
    from nanovllm.apps.server.settings import ServerSettings

    config = checked_config(args)
    names = _names(config.served_model_name, args.model)
    check_lora_modules(args.lora_modules, config, names)
    settings = ServerSettings(
        **server_arguments(args),
        chat_template=read_text("--chat-template", args.chat_template),
        allowed_origins=tuple(args.allow_origin),
        served_model_names=names,
        api_keys=_api_keys(args.api_key, args.api_key_file),
    )
    with ExitStack() as stack:
        with loading(args.model, partial(tqdm, leave=False, disable=None)):
            from nanovllm import AsyncLLM  # imports torch, which takes seconds
            from nanovllm.apps.server.run import BACKLOG, address, open_socket, serve

            opened = stack.enter_context(open_socket(settings))
            engine = AsyncLLM(args.model, **engine_arguments(args))
            if args.lora_modules:
                stack.callback(engine.close)  # if one of them is refused
                adapters = tuple(lora_requests(engine.llm, args.lora_modules).values())
                settings = replace(settings, lora_requests=adapters)
        opened.listen(BACKLOG)
        _log_accesses(settings.access_log)
        say(
            f"{settings.model_name} is served at {address(settings, opened)}, up to {engine.llm.max_model_len:,} tokens"
        )
        if settings.is_public and not settings.api_keys:
            say("everyone who reaches this address can use the server: --api-key asks clients for a key")
        return serve(engine, settings, opened)


def _check_installed() -> None:
    for name in ("prometheus_client", "pydantic", "starlette", "uvicorn"):
        if importlib.util.find_spec(name) is None:
            raise ConfigError(f"the server needs {name}: pip install 'nanovllm[server]'")


def _names(given: str | Sequence[str] | None, model: str) -> tuple[str, ...]:
    """The names in requests: those given, else the directory's, and the path as it was given, which is vLLM's."""
    if given is None:
        return tuple(dict.fromkeys([Path(model).resolve().name or model, model]))
    return (given,) if isinstance(given, str) else tuple(given)


def _api_keys(keys: list[str], path: str | None) -> tuple[str, ...]:
    given = [*keys, *([os.environ[KEY_VARIABLE]] if os.environ.get(KEY_VARIABLE) else [])]
    text = read_text("--api-key-file", path)
    if text is not None:
        given += text.split()
        if not given:
            raise ConfigError(f"--api-key-file {path!r} holds no key: give one key on each line")
    return tuple(given)


def _log_accesses(wanted: bool) -> None:
    logger = logging.getLogger("uvicorn.access")
    logger.setLevel(logging.INFO if wanted else logging.WARNING)
    if wanted:
        logger.addHandler(logging.StreamHandler(sys.stderr))
