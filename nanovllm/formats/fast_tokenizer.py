"""Tokenizers that the tokenizers library reads by itself, without Transformers, whose import takes over half a second.

A directory qualifies if Transformers would do no more than load its tokenizer.json, or if its class builds the same
tokenizer (`tokenizer_classes`). All else, damaged files too, is left to Transformers: classes that change the
tokenizer, tokens that the configuration adds, or fields not known here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE

from nanovllm.formats.tokenizer_classes import GENERIC, built_by, class_name

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Files beside tokenizer.json from which Transformers takes more.
OTHER_FILES = ("added_tokens.json", "special_tokens_map.json", "tekken.json", "additional_chat_templates")
PATCHED_SIZE = 100_000  # above, Transformers looks for an error of Mistral's vocabularies
# Fields of tokenizer_config.json without effect on ids and texts, where tokenizer.json is there.
WITHOUT_EFFECT = frozenset(
    {
        *("add_bos_token", "add_eos_token", "backend", "errors", "is_local", "legacy", "local_files_only"),
        *("model_input_names", "model_max_length", "name_or_path", "padding_side", "processor_class"),
        *("sp_model_kwargs", "spaces_between_special_tokens", "tokenizer_class", "truncation_side"),
        "use_default_system_prompt",
    }
)
OFF_FIELDS = ("add_prefix_space", "split_special_tokens", "merges_file", "vocab_file")
READ_FIELDS = frozenset(
    {
        *("added_tokens_decoder", "additional_special_tokens", "chat_template", "clean_up_tokenization_spaces"),
        *("extra_special_tokens", *SPECIAL_TOKENS),
    }
)


@dataclass(frozen=True, slots=True)
class FastTokenizer:
    """A tokenizer of the tokenizers library, with what else an engine asks of one.

    chat_template: as `HuggingFaceTokenizer.chat_template`. special_tokens: the texts of named special tokens.
    as_transformers: makes the same tokenizer of Transformers, where its own reader cannot.
    """

    backend: Tokenizer
    chat_template: Any
    special_tokens: Mapping[str, str]
    as_transformers: Callable[[], Any] | None = None


def load_fast(directory: Path, model_type: str | None) -> FastTokenizer | None:
    """The tokenizer of a directory whose tokenizer_config.json has been checked; None if Transformers must read it."""
    file = directory / "tokenizer.json"
    config_file = directory / "tokenizer_config.json"
    config = json.loads(config_file.read_text(encoding="utf-8")) if config_file.is_file() else {}
    if not file.is_file() or not _is_plain(directory, config):
        return None
    try:
        text = file.read_text(encoding="utf-8")
        name = class_name(config, model_type, text)
        built = None if name is None else built_by(name, config)
        if name != GENERIC and built is None:
            return None
        backend = Tokenizer.from_str(text)
        backend.no_truncation()
        backend.no_padding()
        special = _special_tokens({**({} if built is None else built.special), **config})
        complete = _holds_all(backend, config, special.values())
        same = built is None or (built.builds(backend) and _builds_tokens(backend, config, special.values(), text))
        chat_template = _chat_template(directory, config)
    except BaseException as error:  # damaged files: Transformers says what is wrong; the library may panic
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        return None
    size = backend.get_vocab_size()
    cleans = config.get("clean_up_tokenization_spaces") and not isinstance(backend.model, BPE)
    if not (complete and same) or cleans or (size > PATCHED_SIZE and model_type in (None, "mistral")):
        return None
    return FastTokenizer(backend, chat_template, special)


def is_panic(error: BaseException) -> bool:
    """Whether the error, which may be no Exception, is a panic of the tokenizers library."""
    return type(error).__module__ == "pyo3_runtime"


def _is_plain(directory: Path, config: Mapping[str, Any]) -> bool:
    """Whether no field and no file has an effect that is not known here."""
    known = WITHOUT_EFFECT | READ_FIELDS | {"auto_map"}
    off = {name for name in OFF_FIELDS if not config.get(name)}
    others = [name for name in config if name not in known | off and not _is_named_token(name, config[name])]
    tokens = [config[name] for name in SPECIAL_TOKENS if isinstance(config.get(name), dict)]
    if not all(token.get("__type") == "AddedToken" for token in tokens):
        return False
    if not isinstance(config.get("model_input_names", []), list):
        return False
    # With added_tokens_decoder, Transformers leaves these files out.
    files = OTHER_FILES if "added_tokens_decoder" not in config else OTHER_FILES[2:]
    return not others and not any((directory / name).exists() for name in files)


def _holds_all(backend: Tokenizer, config: Mapping[str, Any], special: Any) -> bool:
    """Whether the file has all tokens that the configuration would add, with the same properties."""
    found = backend.get_added_tokens_decoder()
    known = {repr(token) for token in found.values()}
    texts = {token.content for token in found.values()}
    listed = {int(token_id): AddedToken(**token) for token_id, token in config.get("added_tokens_decoder", {}).items()}
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    unnamed = extra if isinstance(extra, list) else []
    return all(repr(token) in known for token in listed.values()) and {*special, *map(_text, unnamed)} <= texts


def _builds_tokens(backend: Tokenizer, config: Mapping[str, Any], special: Iterable[str], text: str) -> bool:
    """Whether a class that adds the listed tokens to the vocabulary, by their ids, gets those that the file has."""
    found = backend.get_added_tokens_decoder()
    listed = config.get("added_tokens_decoder")
    if listed is None:
        start = text.index('"added_tokens"')
        tokens, _ = json.JSONDecoder().raw_decode(text, text.index("[", start))
        listed = {token.pop("id"): token for token in tokens}
    as_listed = {int(token_id): repr(AddedToken(**token)) for token_id, token in listed.items()}
    first = backend.get_vocab_size(with_added_tokens=False)
    new = sorted(token_id for token_id in found if token_id >= first)
    return (
        as_listed == {token_id: repr(token) for token_id, token in found.items()}
        and new == list(range(first, first + len(new)))
        and {*special} <= {token.content for token in found.values() if token.special}
    )


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """The texts of the named special tokens: those that all tokenizers may have, and a model's own."""
    extra = config.get("extra_special_tokens")
    own = {name: token for name, token in config.items() if _is_named_token(name, token)}
    if isinstance(extra, dict):
        own |= extra
    return {name: _text(config[name]) for name in SPECIAL_TOKENS if config.get(name) is not None} | {
        name: _text(token) for name, token in own.items() if name not in SPECIAL_TOKENS
    }


def _is_named_token(name: str, value: Any) -> bool:
    return name.endswith("_token") and isinstance(value, str)


def _text(token: Any) -> str:
    """The text of a special token, which files have as text or as an object. Raises KeyError and TypeError."""
    if isinstance(token, str):
        return token
    return str(AddedToken(**{name: value for name, value in token.items() if name != "__type"}).content)


def _chat_template(directory: Path, config: Mapping[str, Any]) -> Any:
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    own = config.get("chat_template")
    return {each["name"]: each["template"] for each in own} if isinstance(own, list) else own
