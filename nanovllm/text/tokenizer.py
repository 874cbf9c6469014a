"""Conversion between text and token ids with the checkpoint's tokenizer."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

from tokenizers import Tokenizer as Backend
from tokenizers import pre_tokenizers

from nanovllm.data import json_fields as rules
from nanovllm.data.json_fields import FLAG, LIST, NULL, OBJECT, TEXT, Field
from nanovllm.errors import ModelError, RequestError, quoted, told
from nanovllm.formats.fast_tokenizer import SPECIAL_TOKENS, FastTokenizer, is_panic, load_fast
from nanovllm.formats.hub import is_gguf
from nanovllm.text.template_facts import TemplateFacts

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tokenizer_config.json")
READ_SUFFIXES = (".json", ".txt", ".model", ".jinja")  # of the files that a tokenizer class may read
MOST_TEMPLATES = 8  # whose facts are kept: a checkpoint's own, and what requests bring
MAX_FILE_BYTES = 256 << 20  # of each file; the largest known ones have 60 MB
SPECIAL_TOKEN_FIELDS: Mapping[str, Field] = MappingProxyType(dict.fromkeys(SPECIAL_TOKENS, TEXT | OBJECT | NULL))
CONFIG_FIELDS: Mapping[str, Field] = MappingProxyType(
    {
        **SPECIAL_TOKEN_FIELDS,
        "tokenizer_class": TEXT | NULL,
        "auto_map": OBJECT | LIST | NULL,
        "model_max_length": rules.number(0, above=True) | NULL,
        "chat_template": TEXT | OBJECT | LIST | NULL,
        "response_template": OBJECT | NULL,
        "added_tokens_decoder": OBJECT,
        "additional_special_tokens": LIST | NULL,
        "extra_special_tokens": LIST | OBJECT | NULL,
        **dict.fromkeys(("padding_side", "truncation_side"), rules.one_of(("left", "right"))),
        **dict.fromkeys(("add_bos_token", "add_eos_token", "add_prefix_space"), FLAG | NULL),
        "clean_up_tokenization_spaces": FLAG | NULL,
    }
)
PART_OF_CHARACTER = "\ufffd"
BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")  # of vocabularies that have a token for each byte beside their words
T = TypeVar("T")


class Tokenizer(Protocol):
    """What the engine and the server need of a tokenizer."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def token_text(self, token_id: int) -> str: ...

    def token_string(self, token_id: int) -> str | None: ...

    def token_bytes(self, token_id: int) -> bytes | None: ...

    def offsets(self, text: str, token_ids: Sequence[int]) -> list[int] | None: ...


class HuggingFaceTokenizer:
    """The tokenizer of a directory or GGUF file. By default, encoding adds special tokens and decoding leaves them out.

    `token_text` is the text of a single token, also of a special one, with U+FFFD for part of a character. `backend` is
    the object of the tokenizers library, or None for a slow tokenizer. `silent_ids` are the special tokens that the
    backend leaves out of text. `response_template` says how Transformers reads answers, if the files have one. Where
    the library reads the files as Transformers would, Transformers is not imported before somebody asks for its
    `tokenizer`.
    """

    def __init__(self, model_dir: str | Path, model_type: str | None = None) -> None:
        """model_dir: a directory, or a GGUF file. model_type: the network's, in Transformers; it selects the tokenizer
        class if the directory's files name none."""
        self._path = Path(model_dir)
        self._model_type = model_type
        self._facts: dict[tuple[str, str], TemplateFacts] = {}  # by a template's text and the special tokens
        self.response_template: Mapping[str, Any] | None = None
        if is_gguf(self._path):
            from nanovllm.formats.gguf.tokenizer import load_tokenizer  # imports numpy

            self._fast: FastTokenizer | None = load_tokenizer(self._path)
        else:
            config = _check_files(self._path)
            _refuse_own_code(self._path, config)
            self.response_template = config.get("response_template")
            self._fast = load_fast(self._path, model_type)
        backend = self.tokenizer.backend_tokenizer if self._fast is None else self._fast.backend
        self.backend = backend if isinstance(backend, Backend) else None
        added = {} if self.backend is None else self.backend.get_added_tokens_decoder()
        self.silent_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._added = {token_id: token.content for token_id, token in added.items()}
        self._bytes: dict[int, bytes | None] = {}  # of tokens that were asked for

    @cached_property
    def tokenizer(self) -> Any:
        """Transformers' tokenizer, which is used from then on, with what the caller changes of it.

        Raises ModelError if Transformers cannot read the files.
        """
        fast = self._fast
        if fast is None or fast.as_transformers is None:
            tokenizer = _load(self._path, self._model_type)
        else:
            tokenizer = fast.as_transformers()
        if fast is not None:
            self.backend = tokenizer.backend_tokenizer
            self._fast = None
        return tokenizer

    @property
    def chat_template(self) -> Any:
        """The text of the template; several named ones as a mapping; None without one."""
        fast = self._fast
        return self.tokenizer.chat_template if fast is None else fast.chat_template

    @property
    def special_tokens_map(self) -> Mapping[str, str]:
        """The texts of the named special tokens, such as "eos_token"."""
        fast = self._fast
        found: Mapping[str, str] = self.tokenizer.special_tokens_map if fast is None else fast.special_tokens
        return found

    def template_facts(self, template: str) -> TemplateFacts:
        """The facts of a chat template's text. Those of the last few templates are kept, as far as they are found."""
        special = dict(self.special_tokens_map)
        key = (template, repr(special))
        facts = self._facts.pop(key, None) or TemplateFacts(template, special)
        self._facts[key] = facts  # the last one used is the last to go
        while len(self._facts) > MOST_TEMPLATES:
            del self._facts[next(iter(self._facts))]
        return facts

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        fast = self._fast
        if fast is None:
            return _guarded(lambda: list(self.tokenizer.encode(text, add_special_tokens=add_special_tokens)))
        return _guarded(lambda: list(fast.backend.encode(text, add_special_tokens=add_special_tokens).ids))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        fast = self._fast  # which another thread may end with `tokenizer`
        # Cleaning up spaces would change the text of a token, and earlier text when a token is appended.
        options = {"clean_up_tokenization_spaces": False} if fast is None else {}
        tokenizer = self.tokenizer if fast is None else fast.backend
        return _guarded(
            lambda: str(tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens, **options))
        )

    def token_text(self, token_id: int) -> str:
        return self.decode([token_id], skip_special_tokens=False)

    def token_string(self, token_id: int) -> str | None:
        """The token as the vocabulary writes it, such as "Ġthe"; None for an id that the vocabulary does not have."""
        if self.backend is not None:
            return self.backend.id_to_token(token_id)
        found: str | None = self.tokenizer.convert_ids_to_tokens(token_id)
        return found

    def token_bytes(self, token_id: int) -> bytes | None:
        """The bytes that a token adds to a text before it: a word's with its space, those of a part of a character.

        A special token has those of its name. None if they are not known.
        """
        if token_id not in self._bytes:
            self._bytes[token_id] = self._find_bytes(token_id)
        return self._bytes[token_id]

    def offsets(self, text: str, token_ids: Sequence[int]) -> list[int] | None:
        """Where the tokens of a text begin in it, in characters. Parts of a character begin where that does.

        A token that encoding has added begins where the token before it ends. None if these are not the text's tokens,
        and for a slow tokenizer.
        """
        backend = self.backend
        ids = list(token_ids)
        if backend is None:
            return None
        encoding = _guarded(lambda: backend.encode(text))
        if encoding.ids != ids:
            encoding = _guarded(lambda: backend.encode(text, add_special_tokens=False))
        if encoding.ids != ids:
            return None
        found = []
        end = 0
        for (first, last), is_added in zip(encoding.offsets, encoding.special_tokens_mask, strict=True):
            # Some tokenizers do not count the spaces before a word to it.
            found.append(end if is_added else min(first, end + len(text[end:first].rstrip(" "))))
            end = max(end, last)
        return found

    def _find_bytes(self, token_id: int) -> bytes | None:
        name = self.token_string(token_id)
        if name is None:
            return None
        text = self.token_text(token_id) if token_id in self.silent_ids else self._text_after_another(token_id)
        if PART_OF_CHARACTER not in text:
            return text.encode("utf-8", "replace")
        if token_id in self._added:
            return self._added[token_id].encode()
        byte = BYTE_TOKEN.fullmatch(name)
        symbols = self._byte_symbols
        candidates = [bytes.fromhex(byte[1])] if byte else [name.encode()]
        if all(symbol in symbols for symbol in name):
            candidates.append(bytes(symbols[symbol] for symbol in name))
        return next((candidate for candidate in candidates if candidate.decode("utf-8", "replace") == text), None)

    def _text_after_another(self, token_id: int) -> str:
        """What a token adds to the text of another: decoders drop the space before the first word."""
        before = self._another
        known, text = (self.decode(ids, skip_special_tokens=False) for ids in (before, [*before, token_id]))
        return text[len(known) :] if text.startswith(known) else self.token_text(token_id)

    @cached_property
    def _another(self) -> list[int]:
        return self.encode("a", add_special_tokens=False)[-1:]

    @cached_property
    def _byte_symbols(self) -> dict[str, int]:
        """The byte of each character in byte-level vocabularies: printable Latin-1 is itself, the others follow."""
        symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
        own = [ord(symbol) for symbol in symbols if ord(symbol) < 256]
        return dict(zip(symbols, [*own, *sorted(set(range(256)) - set(own))], strict=True))


def load_tokenizer(model_dir: str | Path, model_type: str | None = None) -> Tokenizer | None:
    """The tokenizer of a directory or GGUF file, or None if it has none."""
    path = Path(model_dir)
    if is_gguf(path):
        from nanovllm.formats.gguf.tokenizer import NoTokenizerError  # imports numpy

        try:
            return HuggingFaceTokenizer(path)
        except NoTokenizerError:
            return None
    found = any((path / name).is_file() for name in TOKENIZER_FILES)
    return HuggingFaceTokenizer(path, model_type) if found else None


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
    return rules.checked_fields(path, rules.read_json_object(path), fields) if path.is_file() else {}


def _refuse_own_code(directory: Path, config: Mapping[str, Any]) -> None:
    """Raise ModelError for a tokenizer class that only code in the directory defines."""
    auto_map = config.get("auto_map")
    name = config.get("tokenizer_class")
    has_code = "AutoTokenizer" in auto_map if isinstance(auto_map, Mapping) else bool(auto_map)
    if not (has_code and name):
        return
    from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

    if not any(tokenizer_class_from_name(known) for known in (name, f"{name}Fast")):
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
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        missing = "" if (directory / "tokenizer.json").is_file() else "there is no tokenizer.json: "
        raise ModelError(f"the tokenizer files in {directory} cannot be read: {missing}{told(error)}") from error


def _guarded(call: Callable[[], T]) -> T:
    """The result of `call`. A panic of the tokenizers library, which is not an Exception, raises RequestError."""
    try:
        return call()
    except BaseException as error:
        if is_panic(error):
            raise RequestError(f"the tokenizer fails on this text: {told(error)}") from None
        raise
