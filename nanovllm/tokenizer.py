"""Conversion between text and token ids with the checkpoint's tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

from tokenizers import Tokenizer as Backend

from nanovllm.errors import ModelError, RequestError, quoted, told
from nanovllm.model_files.gguf_side import NoTokenizerError, gguf_side, is_gguf
from nanovllm.model_files.json_fields import (
    FLAG,
    LIST,
    NULL,
    OBJECT,
    TEXT,
    Field,
    checked_fields,
    number,
    one_of,
    read_json_object,
)

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tokenizer_config.json")
READ_SUFFIXES = (".json", ".txt", ".model", ".jinja")  # of the files that a tokenizer class may read
MAX_FILE_BYTES = 256 << 20  # of each file; the largest known ones have 60 MB
_SIDE = one_of(("left", "right"))
_TOKEN = TEXT | OBJECT | NULL
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
SPECIAL_TOKEN_FIELDS: Mapping[str, Field] = MappingProxyType(dict.fromkeys(_SPECIAL_TOKENS, _TOKEN))
CONFIG_FIELDS: Mapping[str, Field] = MappingProxyType(
    {
        **SPECIAL_TOKEN_FIELDS,
        "tokenizer_class": TEXT | NULL,
        "auto_map": OBJECT | LIST | NULL,
        "model_max_length": number(0, above=True) | NULL,
        "chat_template": TEXT | OBJECT | LIST | NULL,
        "added_tokens_decoder": OBJECT,
        "additional_special_tokens": LIST | NULL,
        "extra_special_tokens": LIST | OBJECT | NULL,
        "padding_side": _SIDE,
        "truncation_side": _SIDE,
        "add_bos_token": FLAG | NULL,
        "add_eos_token": FLAG | NULL,
        "add_prefix_space": FLAG | NULL,
        "clean_up_tokenization_spaces": FLAG | NULL,
    }
)
T = TypeVar("T")


class Tokenizer(Protocol):
    """What the engine needs of a tokenizer."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def token_text(self, token_id: int) -> str: ...


class HuggingFaceTokenizer:
    """A Transformers tokenizer. By default, encoding adds special tokens and decoding leaves them out.

    `token_text` is the text of a single token, also of a special one, with U+FFFD for part of a character. `backend` is
    the object of the tokenizers library, or None for a slow tokenizer. `silent_ids` are the special tokens that the
    backend leaves out of text.
    """

    def __init__(self, model_dir: str | Path, model_type: str | None = None) -> None:
        """model_dir: a directory, or a GGUF file. model_type: the network's, in Transformers; it selects the tokenizer
        class if the directory's files name none."""
        path = Path(model_dir)
        if is_gguf(path):
            self.tokenizer = gguf_side(path).load_tokenizer(path)
        else:
            _refuse_own_code(path, _check_files(path))
            self.tokenizer = _load(path, model_type)
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        self.backend = backend if isinstance(backend, Backend) else None
        added = {} if self.backend is None else self.backend.get_added_tokens_decoder()
        self.silent_ids = frozenset(token_id for token_id, token in added.items() if token.special)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return _guarded(lambda: list(self.tokenizer.encode(text, add_special_tokens=add_special_tokens)))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        # Cleaning up spaces could change earlier text when a token is appended.
        return _guarded(
            lambda: str(
                self.tokenizer.decode(
                    list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
                )
            )
        )

    def token_text(self, token_id: int) -> str:
        return _guarded(lambda: str(self.tokenizer.decode([token_id], skip_special_tokens=False)))


def load_tokenizer(model_dir: str | Path, model_type: str | None = None) -> Tokenizer | None:
    """The tokenizer of a directory or GGUF file, or None if it has none."""
    path = Path(model_dir)
    if is_gguf(path):
        try:
            return HuggingFaceTokenizer(path)
        except NoTokenizerError:
            return None
    if not any((Path(model_dir) / name).is_file() for name in TOKENIZER_FILES):
        return None
    return HuggingFaceTokenizer(model_dir, model_type)


def _check_files(directory: Path) -> dict[str, Any]:
    """tokenizer_config.json's fields. Raises ModelError for files that are too large, and for damaged fields."""
    if not directory.is_dir():
        raise ModelError(f"the tokenizer files in {directory} cannot be read: there is no such directory")
    for path in sorted(directory.iterdir()):
        if path.suffix in READ_SUFFIXES and path.is_file() and path.stat().st_size > MAX_FILE_BYTES:
            raise ModelError(f"{path} has {path.stat().st_size} bytes; a tokenizer file has at most {MAX_FILE_BYTES}.")
    try:
        _fields(directory / "special_tokens_map.json", SPECIAL_TOKEN_FIELDS)
        return _fields(directory / "tokenizer_config.json", CONFIG_FIELDS)
    except ModelError as error:
        raise ModelError(f"the tokenizer files in {directory} cannot be read: {error}") from None


def _fields(path: Path, fields: Mapping[str, Field]) -> dict[str, Any]:
    return checked_fields(path, read_json_object(path), fields) if path.is_file() else {}


def _refuse_own_code(directory: Path, config: Mapping[str, Any]) -> None:
    """Raise ModelError for a tokenizer class that only code in the directory defines."""
    from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

    auto_map, name = config.get("auto_map"), config.get("tokenizer_class")
    has_code = "AutoTokenizer" in auto_map if isinstance(auto_map, Mapping) else bool(auto_map)
    if has_code and name and not any(tokenizer_class_from_name(known) for known in (name, f"{name}Fast")):
        raise ModelError(
            f"the tokenizer in {directory} needs code of its own (tokenizer_config.json: tokenizer_class={quoted(name)}"
            ", auto_map), which is never run; use a checkpoint whose tokenizer Transformers itself has"
        )


def _load(directory: Path, model_type: str | None) -> Any:
    """Transformers' tokenizer. It reads only the tokenizer's files, not config.json, and runs no code."""
    # Slow to import, and not needed for token-id prompts.
    from transformers import CONFIG_MAPPING, AutoTokenizer, PreTrainedConfig

    config = CONFIG_MAPPING[model_type]() if model_type is not None else PreTrainedConfig()
    try:
        return AutoTokenizer.from_pretrained(
            str(directory), config=config, local_files_only=True, trust_remote_code=False
        )
    except BaseException as error:  # the library raises many types on damaged files, also panics
        if not isinstance(error, Exception) and not _is_panic(error):
            raise
        if not (directory / "tokenizer.json").is_file():
            raise ModelError(
                f"the tokenizer files in {directory} cannot be read: there is no tokenizer.json, and none can be made "
                f"from the others ({told(error)})"
            ) from error
        raise ModelError(f"the tokenizer files in {directory} cannot be read: {told(error)}") from error


def _guarded(call: Callable[[], T]) -> T:
    """The result of `call`. A panic of the tokenizers library, which is not an Exception, raises RequestError."""
    try:
        return call()
    except BaseException as error:
        if _is_panic(error):
            raise RequestError(f"the tokenizer fails on this text: {told(error)}") from None
        raise


def _is_panic(error: BaseException) -> bool:
    return type(error).__module__ == "pyo3_runtime"
