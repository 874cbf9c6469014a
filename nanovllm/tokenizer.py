"""Text to token ids and back, through the checkpoint's own tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

from tokenizers import Tokenizer as Backend

from nanovllm.errors import ModelError, RequestError, quoted, told
from nanovllm.model_files import (
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
from nanovllm.template_process import TemplateProcess

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tokenizer_config.json")
READ_SUFFIXES = (".json", ".txt", ".model", ".jinja")  # of all files that a tokenizer class may read
MAX_FILE_BYTES = 256 << 20  # of any of them; the largest known have 60 MB
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
    """A Transformers tokenizer; special tokens are added when encoding and left out when decoding, unless asked for.

    `token_text` is the text of one token by itself, also of a special one; U+FFFD stands for part of a character.
    `backend` is the tokenizers library's object behind it; None behind a slow one. `silent_ids` are the tokens that
    the backend leaves out as special ones.
    """

    def __init__(self, model_dir: str | Path, model_type: str | None = None) -> None:
        """model_type: the network's, as Transformers names it; a tokenizer that names no class has that network's."""
        _refuse_own_code(Path(model_dir), _check_files(Path(model_dir)))
        self.tokenizer = _load(Path(model_dir), model_type)
        self.templates = TemplateProcess()
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        self.backend = backend if isinstance(backend, Backend) else None
        added = {} if self.backend is None else self.backend.get_added_tokens_decoder()
        self.silent_ids = frozenset(token_id for token_id, token in added.items() if token.special)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return _guarded(lambda: list(self.tokenizer.encode(text, add_special_tokens=add_special_tokens)))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        # Cleaning up spaces would change text that stands already when the next token comes.
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
    """The directory's tokenizer, or None if it has no tokenizer files."""
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
    """Raise ModelError for a tokenizer class that only the directory's own code has."""
    from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

    auto_map, name = config.get("auto_map"), config.get("tokenizer_class")
    has_code = "AutoTokenizer" in auto_map if isinstance(auto_map, Mapping) else bool(auto_map)
    if has_code and name and not any(tokenizer_class_from_name(known) for known in (name, f"{name}Fast")):
        raise ModelError(
            f"the tokenizer in {directory} needs code of its own (tokenizer_config.json: tokenizer_class={quoted(name)}"
            ", auto_map), which is never run; use a checkpoint whose tokenizer Transformers itself has"
        )


def _load(directory: Path, model_type: str | None) -> Any:
    """Transformers' tokenizer. It reads the tokenizer's files and neither config.json nor code."""
    # Slow to import, and not needed for token-id prompts.
    from transformers import CONFIG_MAPPING, AutoTokenizer, PreTrainedConfig

    config = CONFIG_MAPPING[model_type]() if model_type is not None else PreTrainedConfig()
    try:
        return AutoTokenizer.from_pretrained(
            str(directory), config=config, local_files_only=True, trust_remote_code=False
        )
    except BaseException as error:  # whatever the library raises on damaged files, its panics among it
        if not isinstance(error, Exception) and not _is_panic(error):
            raise
        if not (directory / "tokenizer.json").is_file():
            raise ModelError(
                f"the tokenizer files in {directory} cannot be read: there is no tokenizer.json, and none can be made "
                f"from the others ({told(error)})"
            ) from error
        raise ModelError(f"the tokenizer files in {directory} cannot be read: {told(error)}") from error


def _guarded(call: Callable[[], T]) -> T:
    """What `call` returns. A panic of the tokenizers library, which is no Exception, is the text's error."""
    try:
        return call()
    except BaseException as error:
        if _is_panic(error):
            raise RequestError(f"the tokenizer fails on this text: {told(error)}") from None
        raise


def _is_panic(error: BaseException) -> bool:
    return type(error).__module__ == "pyo3_runtime"
