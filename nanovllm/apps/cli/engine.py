"""What the commands that run an engine share: its start, `--lora-modules`, and what they say of its KV at the end."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from tqdm import tqdm

from nanovllm import LoRARequest
from nanovllm.apps.cli.arguments import checked_config, engine_arguments
from nanovllm.apps.cli.boundary import Interrupt
from nanovllm.errors import ConfigError, RequestError, quoted, unknown_name_message
from nanovllm.features.progress_bar import MakeBar, size
from nanovllm.rules import share, share_of
from nanovllm.text.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from nanovllm import LLM, KVStats
    from nanovllm.config import EngineConfig

NAMED = "name=path; repeat it for several adapters in PEFT's format. Needs --enable-lora"


def load_llm(
    args: argparse.Namespace,
    interrupt: Interrupt,
    texts: Callable[[], Sequence[str]],
    max_tokens: int | None,
) -> LLM:
    """The engine of the arguments.

    texts: reads the prompts that are known. max_tokens: of their answers. If `kv_cache_memory_bytes` is a share, it is
    one of the KV cache of the longest prompt and its answer, unless the argument says of how many tokens.
    """
    with interrupt.allowed(), loading(args.model, progress_bar(args)):
        from nanovllm import LLM  # imports torch, which takes seconds

        arguments = engine_arguments(args)
        memory = arguments.get("kv_cache_memory_bytes")
        if max_tokens and share(memory) is not None and (longest := _longest(checked_config(args), texts())):
            arguments["kv_cache_memory_bytes"] = share_of(memory, longest + max_tokens)
        return LLM(args.model, **arguments)


def _longest(config: EngineConfig, texts: Sequence[str]) -> int:
    """Tokens of the longest text; 0 without texts or a tokenizer."""
    tokenizer = load_tokenizer(config.model if config.tokenizer is None else config.tokenizer) if texts else None
    return 0 if tokenizer is None else max(len(tokenizer.encode(text)) for text in texts)


def progress_bar(args: argparse.Namespace) -> MakeBar | None:
    """The bar that --progress and --quiet ask for: by default on a terminal."""
    is_shown = sys.stderr.isatty() if args.progress is None else args.progress
    return partial(tqdm, leave=False) if is_shown and not args.quiet else None


@contextmanager
def loading(model: str, make: MakeBar | None) -> Iterator[None]:
    """Say so while a model is loaded, where progress is shown."""
    with nullcontext() if make is None else make(desc=f"loading {model}", bar_format="{desc}"):
        yield


def kv_line(stats: KVStats, tokens: int) -> str:
    """Where the KV of so many tokens was, such as `5,789 tokens: at most 29.5 MB of KV on the device, 113 MB out, ...`.

    "At most" is the step in which requests held the most blocks.
    """
    parts = [f"at most {size(stats.most_used_device_blocks * stats.bytes_per_block)} of KV on the device"]
    moved = stats.transfers
    if moved.d2h_bytes or moved.h2d_bytes:
        parts += [f"{size(moved.d2h_bytes)} copied out to the host", f"{size(moved.h2d_bytes)} copied in"]
    if stats.loaded_weight_bytes:
        parts.append(f"{size(stats.loaded_weight_bytes)} of weights copied in")
    if stats.read_weight_bytes:
        parts.append(f"{size(stats.read_weight_bytes)} of weights read from disk")
    if moved.cpu_attention_bytes:
        parts.append(f"the CPU attended to {size(moved.cpu_attention_bytes)}")
    return f"{tokens:,} tokens: {', '.join(parts)}"


# ---- adapters


class LoRAModule(NamedTuple):
    """An adapter as a flag names it."""

    name: str
    path: str
    base_model_name: str | None = None  # its parent in the server's list of models


def add_lora_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of commands whose prompts use one adapter."""
    add = parser.add_argument
    named = f"an adapter: {NAMED}"
    add("--lora-modules", action="append", default=[], type=lora_module, metavar="NAME=PATH", help=named)
    chosen = "the adapter that prompts use; may be left out if --lora-modules names one only"
    add("--lora", metavar="NAME", help=chosen)


def lora_module(text: str) -> LoRAModule:
    """`name=path`, or vLLM's JSON with "name", "path" and optionally "base_model_name"."""
    if text.startswith("{"):
        with suppress(ValueError, TypeError, RecursionError):
            return LoRAModule(**json.loads(text))
    name, _, path = text.partition("=")
    if not name or not path or text.startswith("{"):
        raise argparse.ArgumentTypeError(f'{quoted(text)} is neither name=path nor {{"name": "a", "path": "b"}}')
    return LoRAModule(name, path)


def check_lora_modules(modules: list[LoRAModule], config: EngineConfig, others: Sequence[str] = ()) -> None:
    """Raise ConfigError for names that are given twice or are those of others, and without enable_lora."""
    names = [*(module.name for module in modules), *others]
    twice = next((module.name for module in modules if names.count(module.name) > 1), None)
    if twice is not None:
        raise ConfigError(f"--lora-modules names {quoted(twice)}, a name in use: give every adapter one of its own")
    if modules and not config.enable_lora:
        raise ConfigError("--lora-modules needs --enable-lora, which sets memory for adapters aside")


def check_chosen(args: argparse.Namespace, config: EngineConfig, may_choose: bool = False) -> None:
    """Raise ConfigError for flags of adapters that do not say which one prompts use, unless each one may say so."""
    check_lora_modules(args.lora_modules, config)
    names = [module.name for module in args.lora_modules]
    if args.lora is not None and args.lora not in names:
        raise ConfigError(
            f"--lora {quoted(args.lora)} is not one of --lora-modules: {', '.join(names) or 'none is named'}"
        )
    if args.lora is None and len(names) > 1 and not may_choose:
        raise ConfigError(f"--lora-modules names {len(names)} adapters: say with --lora NAME which one to use")


def lora_requests(llm: LLM, modules: list[LoRAModule]) -> dict[str, LoRARequest]:
    """The adapters by name. Raises ConfigError for one that does not fit the model."""
    requests: dict[str, LoRARequest] = {}
    for number, (name, path, base_model_name) in enumerate(modules, start=1):
        try:
            requests[name] = LoRARequest(name, number, path, base_model_name)
            llm.engine.check_lora_request(requests[name])
        except RequestError as error:
            raise ConfigError(f"--lora-modules {name}={path}: {error}") from None
    return requests


class ChosenAdapters:
    """Which adapter a prompt uses: the one that it names, else that of --lora, else the only one."""

    def __init__(self, llm: LLM, args: argparse.Namespace) -> None:
        self._requests = lora_requests(llm, args.lora_modules)
        (default, *others) = self._requests.values() or (None,)
        self.default = self._requests[args.lora] if args.lora is not None else None if others else default

    def named(self, name: object) -> LoRARequest | None:
        """The adapter of this name; None is the model alone. Raises RequestError."""
        if name is None:
            return None
        if not isinstance(name, str) or name not in self._requests:
            text = name if isinstance(name, str) else quoted(name)
            raise RequestError(unknown_name_message("lora", text, list(self._requests)))
        return self._requests[name]
