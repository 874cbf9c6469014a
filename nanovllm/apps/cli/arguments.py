"""Flags for every engine argument and sampling parameter, derived from the fields of their classes. Names are vLLM's.

A flag that is not given is left out of the result, so that the engine's default applies. The engine's seed is `--seed`,
as in vLLM, and the seed of a request is `--sampling-seed`.
"""

from __future__ import annotations

import argparse
import json
import shlex
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, field, fields, make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, Union

from nanovllm.config import EngineConfig, engine_config
from nanovllm.errors import ConfigError, quoted, unknown_name_message
from nanovllm.rules import share, with_unit
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.prompts import CONTENT_FORMAT_HELP, CONTENT_FORMATS
from nanovllm.vllm_names import ENGINE_ALIASES, ENGINE_ARGUMENTS

if TYPE_CHECKING:
    from nanovllm import LLMEngine

ENGINE = "engine"
SAMPLING = "sampling"
SERVER = "server"
NO_ENGINE_FLAGS = ("model",)  # every command defines its own --model
# output_kind follows from how the answer is shown; the others are for programs.
NO_SAMPLING_FLAGS = ("output_kind", "structured_outputs", "logits_processors", "skip_clone")
OTHER_NAMES = {(SAMPLING, "seed"): "sampling-seed"}
MOST_DIGITS = 12  # of a count
TOKENS = "such as 4096, 32K or 1M (as in vLLM k is 1,000 and K is 1,024)"
COUNTS = "Counts may be written as 32K or 1m: as in vLLM k, m and g are powers of 1,000, and K, M and G of 1,024."
DEFAULT_MODEL = "Qwen/Qwen3-0.6B"  # of vLLM's EngineArgs


def add_command(subparsers: Any, name: str, summary: str, description: str) -> argparse.ArgumentParser:
    """The parser of a command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        name, help=summary, description=description, allow_abbrev=False
    )
    return parser


def add_progress_flag(parser: argparse.ArgumentParser) -> None:
    """--progress, --no-progress and --quiet."""
    text = "show progress on standard error (default: if that is a terminal)"
    parser.add_argument("--progress", action=argparse.BooleanOptionalAction, help=text)
    parser.add_argument("--quiet", action="store_true", help="only warnings and errors on standard error")


def add_chat_flags(parser: argparse.ArgumentParser, *, prompts: bool) -> None:
    """How messages become a prompt and, if there are prompts, how these become messages."""
    add = parser.add_argument
    if prompts:
        text = "each prompt is a user's message: put it into the model's chat template"
        add("--chat", action="store_true", help=text)
    add("--system", type=text_argument, metavar="TEXT", help="a system message at the start of each conversation")
    add("--chat-template", metavar="FILE", help="a Jinja template for messages, used instead of the tokenizer's own")
    add("--chat-template-content-format", choices=CONTENT_FORMATS, default="auto", help=CONTENT_FORMAT_HELP)


def read_text(flag: str, path: str | None) -> str | None:
    """The text of the file that a flag names. Raises ConfigError."""
    if path is None:
        return None
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{flag} {path!r} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{flag} {path!r} is not UTF-8: {error.reason} at position {error.start}") from None


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """The model, a flag for every other engine argument, and hidden ones for names of `vllm_names`. Call it last."""
    add_model(parser, "a checkpoint in Hugging Face format, its name on the hub, or a GGUF file")
    add_engine_group(parser, [field.name for field in fields(EngineConfig) if field.name not in NO_ENGINE_FLAGS])
    for name, same in ENGINE_ARGUMENTS.items():
        _add_hidden(parser, name, _vllm_options(same))


def add_model(parser: argparse.ArgumentParser, text: str) -> None:
    """The model as --model or, in commands without prompts, as a positional argument; `resolve_model` takes either."""
    parser.add_argument("--model", metavar="DIR", help=f"{text}; or the first argument")
    if not any(action.dest == "prompts" for action in parser._actions):
        parser.add_argument("positional_model", nargs="?", metavar="DIR", help="the same as --model DIR")


def resolve_model(args: argparse.Namespace) -> None:
    """Set args.model from --model or the first argument. Raises ConfigError if there is none, or two that differ.

    Where prompts are arguments too, the first of them is the model unless --model is given.
    """
    first = getattr(args, "positional_model", None)
    prompts = getattr(args, "prompts", [])
    if prompts and (args.model is None or is_model_path(prompts[0])):
        first = prompts.pop(0)
    if args.model is None and first is None:
        raise ConfigError(f"no model is given: name it first, as in nanovllm {args.command} DIR, or with --model DIR")
    if None not in (args.model, first) and args.model != first:
        raise ConfigError(f"the model is given twice, as {quoted(first)} and --model {quoted(args.model)}: give one")
    args.model = first if args.model is None else args.model


def is_model_path(text: str) -> bool:
    """Whether the text names a model on this machine, so that it is no prompt."""
    with suppress(OSError, ValueError):
        return (Path(text) / "config.json").is_file() or (text.endswith(".gguf") and Path(text).is_file())
    return False


def add_engine_group(parser: argparse.ArgumentParser, names: Collection[str]) -> Any:
    """A flag for each of the engine arguments `names`; returns their group, to add others."""
    group = parser.add_argument_group("engine", f"as in LLM, with its defaults. {COUNTS}")
    _add_flags(group, ENGINE, EngineConfig, names)
    hints = typing.get_type_hints(EngineConfig)
    for alias, name in ENGINE_ALIASES.items():
        if name in names:
            _add_hidden(group, alias, _options(hints[name]))
    return group


def _add_hidden(parser: Any, name: str, options: Mapping[str, Any]) -> None:
    """A flag of vLLM's that --help leaves out. Its value is checked with those of all engine arguments."""
    with suppress(argparse.ArgumentError):  # the command has a flag of this name
        hidden = {"dest": f"{ENGINE}.{name}", "default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
        parser.add_argument(flag_name(ENGINE, name), **hidden, **options)


def add_sampling_flags(parser: argparse.ArgumentParser, leave_out: Collection[str] = (), **defaults: Any) -> None:
    """A flag for every sampling parameter but those in `leave_out`. defaults: those that this command differs in."""
    recommended = "A default of the checkpoint's generation_config.json takes the place of the one below."
    group = parser.add_argument_group("sampling", f"as in SamplingParams. {recommended} {COUNTS}")
    left_out = (*NO_SAMPLING_FLAGS, *leave_out)
    names = [field.name for field in fields(SamplingParams) if field.name not in left_out]
    _add_flags(group, SAMPLING, SamplingParams, names, defaults)


def add_server_flags(group: Any, settings: type) -> None:
    """A flag for every field of the server's settings that has a rule."""
    _add_flags(group, SERVER, settings, [field.name for field in fields(settings) if "rule" in field.metadata])


def engine_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """The engine arguments that were given."""
    return _given(args, ENGINE)


def sampling_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling parameters that were given."""
    return _given(args, SAMPLING)


def server_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """The settings of the server that were given by flags of their names."""
    return _given(args, SERVER)


def checked_config(args: argparse.Namespace, **defaults: Any) -> EngineConfig:
    """The configuration that LLM would have, without creating one. Raises ConfigError."""
    given = engine_arguments(args)
    check_offload_flags(given.get("enable_cpu_offload"), given)
    return engine_config(args.model, defaults | given)


def check_offload_flags(enable_cpu_offload: bool | None, given: Mapping[str, Any]) -> None:
    """Raise ConfigError if offload is both switched off and given memory. None: the switch is not given."""
    if enable_cpu_offload is not False:
        return
    if given.get("kv_offloading_size") is not None:
        raise ConfigError("--no-enable-cpu-offload: --kv-offloading-size is the memory of offloaded KV: leave one out")
    if share(size := given.get("kv_cache_memory_bytes")) is not None:
        raise ConfigError(f"--no-enable-cpu-offload: --kv-cache-memory-bytes {size} offloads the rest: leave one out")


def flag_name(kind: str, field: str) -> str:
    """The flag of a field of EngineConfig (ENGINE) or SamplingParams (SAMPLING)."""
    return "--" + OTHER_NAMES.get((kind, field), field.replace("_", "-"))


def as_flags(arguments: Mapping[str, Any]) -> str:
    """Engine arguments as they are written on the command line of a shell."""
    words: list[str] = []
    for name, value in arguments.items():
        flag = flag_name(ENGINE, name)
        if isinstance(value, bool):
            words.append(flag if value else f"--no-{flag[2:]}")
        else:
            words += [flag, shlex.quote(json.dumps(value) if isinstance(value, Mapping) else str(value))]
    return " ".join(words)


# ---- from fields to flags


def _add_flags(
    group: Any, kind: str, described: type, names: Collection[str], defaults: Mapping[str, Any] | None = None
) -> None:
    hints = typing.get_type_hints(described)
    for argument in fields(described):
        if argument.name not in names:
            continue
        options = _options(hints[argument.name])
        text = argument.metadata["help"].replace("%", "%%")
        default = (defaults or {}).get(argument.name, argument.default)
        if options.get("action") == "append":
            text += "; repeat it for several"
        if default not in (MISSING, None, ()):
            text += f" (default: {default})"
        dest = f"{kind}.{argument.name}"
        group.add_argument(flag_name(kind, argument.name), dest=dest, default=argparse.SUPPRESS, help=text, **options)


def _options(hint: Any) -> dict[str, Any]:
    """How argparse reads a value of this type. The engine itself checks ranges and choices."""
    kinds = set(typing.get_args(hint)) if typing.get_origin(hint) in (Union, types.UnionType) else {hint}
    origins = {typing.get_origin(kind): kind for kind in kinds}
    if Mapping in origins:
        if typing.get_args(origins[Mapping])[0] is str:
            return {"type": _json_object, "metavar": "JSON"}
        return {"type": _biases, "metavar": "JSON"}
    if Sequence in origins:
        (element,) = typing.get_args(origins[Sequence])
        return {"action": "append"} | _options(element)
    if kinds == {bool}:
        return {"action": argparse.BooleanOptionalAction}
    if bool in kinds:
        return {"type": _json_or_text, "metavar": "WORD"}
    for number, metavar in ((float, "X"), (int, "N")):
        if number in kinds:
            read = _size(number) if str in kinds else _number(number, types.NoneType in kinds)
            return {"type": read, "metavar": "SIZE" if str in kinds else metavar}
    if str in kinds or Literal in origins:
        return {"type": text_argument, "metavar": "TEXT"}
    raise TypeError(f"no flag can be made for a field of type {hint}")


def _vllm_options(same: Sequence[Any]) -> dict[str, Any]:
    """How argparse reads an argument that only vLLM has: a flag for a truth value, else JSON, else text."""
    if any(isinstance(value, bool) for value in same):
        return {"action": argparse.BooleanOptionalAction}
    return {"type": _json_or_text, "metavar": "VALUE"}


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _number(number: type[int] | type[float], optional: bool) -> Callable[[str], float | None]:
    what = ("a whole number" if number is int else "a number") + (" or none" if optional else "")

    def parse(text: str) -> float | None:
        if optional and text.lower() == "none":
            return None
        try:
            return with_unit(text) if number is int else number(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{quoted(text)} is not {what}") from None

    return parse


def _size(number: type[int] | type[float]) -> Callable[[str], float | str | None]:
    """Reads a number or none; other text is left to the rule of the argument."""

    def parse(text: str) -> float | str | None:
        with suppress(argparse.ArgumentTypeError):
            return _number(number, optional=True)(text)
        return text_argument(text)

    return parse


def _biases(text: str) -> dict[int, float]:
    try:
        return {int(token): float(bias) for token, bias in _json_object(text).items()}
    except (ValueError, TypeError):
        raise argparse.ArgumentTypeError(
            f'{quoted(text)} has no token ids and numbers, such as {{"42": -1.5}}'
        ) from None


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f'{quoted(text)} is not a JSON object, such as {{"top_p": 0.9}}')
    return value


def text_argument(text: str) -> str:
    """Valid text. Bytes that are not UTF-8 arrive as surrogates, which no tokenizer accepts."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError(f"{quoted(text)} is not valid UTF-8") from None
    return text


def positive(text: str) -> int:
    """A whole number of at least 1."""
    return not_negative(text, 1)


def not_negative(text: str, least: int = 0) -> int:
    """A whole number of at least 0, or of at least `least`."""
    if not text.isdecimal() or len(text) > MOST_DIGITS or int(text) < least:
        raise argparse.ArgumentTypeError(
            f"{quoted(text)} is not a whole number of at least {least} and at most {MOST_DIGITS} digits"
        )
    return int(text)


def positive_tokens(text: str) -> int:
    """A number of tokens of at least 1, such as 4096, 32K or 1M."""
    try:
        value = with_unit(text)
    except ValueError:
        value = 0
    if not 1 <= value < 10**MOST_DIGITS:
        raise argparse.ArgumentTypeError(f"{quoted(text)} is not a number of tokens of at least 1, {TOKENS}")
    return value


def _given(args: argparse.Namespace, kind: str) -> dict[str, Any]:
    prefix = f"{kind}."
    return {name.removeprefix(prefix): value for name, value in vars(args).items() if name.startswith(prefix)}


# ---- all of them as an object, as in vLLM

_Fields: Any = make_dataclass(
    "_Fields",
    [
        ("model", str, field(default=DEFAULT_MODEL)),
        *(
            (own.name, Any, field(default=own.default, default_factory=own.default_factory))
            for own in fields(EngineConfig)
            if own.name != "model"
        ),
        *((alias, Any, field(default=None)) for alias in ENGINE_ALIASES),
        *((name, Any, field(default=same[0])) for name, same in ENGINE_ARGUMENTS.items()),
    ],
)


class EngineArgs(_Fields):
    """Engine arguments as an object, for `from_engine_args` of LLMEngine and LLM, and for `LLM(**asdict(args))`.

    The fields are those of `nanovllm.config.EngineConfig` and the names of vLLM's in `nanovllm.vllm_names`. Values are
    checked when an engine is made. Unknown names raise ConfigError.
    """

    def __new__(cls, *args: Any, **engine_args: Any) -> Self:
        known = [field.name for field in fields(cls)]
        for name in engine_args:
            if name not in known:
                raise ConfigError(unknown_name_message("engine argument", name, known))
        return super().__new__(cls)

    def create_engine_config(self) -> EngineConfig:
        """The checked configuration. Raises ConfigError."""
        arguments = {argument.name: getattr(self, argument.name) for argument in fields(self)}
        return engine_config(arguments.pop("model"), arguments)

    def create_engine(self) -> LLMEngine:
        """For `LLMEngine.from_engine_args`. Raises ConfigError and ModelError."""
        from nanovllm import build_engine  # imports torch, which takes seconds

        return build_engine(self.create_engine_config()).engine

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add a flag for every field to the parser, under the field's name in the result. Returns the parser."""
        hints = typing.get_type_hints(EngineConfig)
        for argument in fields(EngineArgs):
            name = ENGINE_ALIASES.get(argument.name, argument.name)
            options = _options(hints[name]) if name in hints else _vllm_options(ENGINE_ARGUMENTS[name])
            default = argument.default_factory() if callable(argument.default_factory) else argument.default
            flag = f"--{argument.name.replace('_', '-')}"
            parser.add_argument(flag, dest=argument.name, default=default, **options)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """The arguments that a parser with `add_cli_args` has read."""
        given = vars(args)
        return cls(**{argument.name: given[argument.name] for argument in fields(cls) if argument.name in given})
