"""vLLM's EngineArgs: every engine argument as a field, this engine's own and those that only vLLM has."""

from __future__ import annotations

import argparse
from dataclasses import Field, field, fields, make_dataclass
from typing import TYPE_CHECKING, Any, Self, get_type_hints

from nanovllm.apps.cli.arguments import flag_options, vllm_flag_options
from nanovllm.config import EngineConfig, engine_config
from nanovllm.errors import ConfigError
from nanovllm.vllm_names import ENGINE_ALIASES, ENGINE_ARGUMENTS, unknown_name

if TYPE_CHECKING:
    from nanovllm import LLMEngine

DEFAULT_MODEL = "Qwen/Qwen3-0.6B"  # vLLM's


def _own(found: Field[Any]) -> tuple[str, Any, Any]:
    if found.name == "model":
        return "model", str, field(default=DEFAULT_MODEL)
    made: Any = field(default=found.default, default_factory=found.default_factory)
    return found.name, Any, made


_Fields: Any = make_dataclass(
    "_Fields",
    [
        *(_own(found) for found in fields(EngineConfig)),
        *((alias, Any, field(default=None)) for alias in ENGINE_ALIASES),
        *((name, Any, field(default=same[0])) for name, same in ENGINE_ARGUMENTS.items()),
    ],
)


class EngineArgs(_Fields):
    """Engine arguments as an object, for `from_engine_args` of LLMEngine and LLM, and for `LLM(**asdict(args))`.

    The fields are those of `nanovllm.config.EngineConfig` and all others of vLLM's; see `nanovllm.vllm_names`. Values
    are checked when an engine is made. Unknown names raise ConfigError.
    """

    def __new__(cls, *args: Any, **engine_args: Any) -> Self:
        known = [found.name for found in fields(cls)]
        for name in engine_args:
            if name not in known:
                own = [found.name for found in fields(EngineConfig)]
                raise ConfigError(unknown_name("engine argument", name, known, listed=own))
        return super().__new__(cls)

    def create_engine_config(self) -> EngineConfig:
        """The checked configuration. Raises ConfigError."""
        arguments = {found.name: getattr(self, found.name) for found in fields(self)}
        return engine_config(arguments.pop("model"), arguments)

    def create_engine(self) -> LLMEngine:
        """For `LLMEngine.from_engine_args`. Raises ConfigError and ModelError."""
        from nanovllm import build_engine  # imports torch, which takes seconds

        return build_engine(self.create_engine_config()).engine

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add a flag for every field to the parser, under the field's name in the result. Returns the parser."""
        hints = get_type_hints(EngineConfig)
        for found in fields(EngineArgs):
            name = ENGINE_ALIASES.get(found.name, found.name)
            options = flag_options(hints[name]) if name in hints else vllm_flag_options(ENGINE_ARGUMENTS[name])
            default = found.default_factory() if callable(found.default_factory) else found.default
            parser.add_argument(f"--{found.name.replace('_', '-')}", dest=found.name, default=default, **options)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """The arguments that a parser with `add_cli_args` has read."""
        return cls(**{found.name: getattr(args, found.name) for found in fields(cls) if hasattr(args, found.name)})
