"""Conversion between text and token ids with the checkpoint's tokenizer."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypeVar

from tokenizers import Tokenizer as Backend
from tokenizers import pre_tokenizers

from nanovllm.errors import ModelError, RequestError, quoted, told
from nanovllm.formats.hub import is_gguf
from nanovllm.text.template_facts import TemplateFacts

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tokenizer_config.json")
READ_SUFFIXES = (".json", ".txt", ".model", ".jinja")  # of the files that a tokenizer class may read
MAX_FILE_BYTES = 256 << 20  # of each file; the largest known ones have 60 MB
MOST_TEMPLATES = 8  # whose facts are kept: a checkpoint's own, and what requests bring
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
    """The tokenizer of a directory or GGUF file, as Transformers loads it.

    By default, encoding adds special tokens and decoding leaves them out.
    """

    def __init__(self, model_dir: str | Path, model_type: str | None = None) -> None:
        """model_dir: a directory, or a GGUF file. model_type: the network's, in Transformers; it selects the tokenizer
        class if the directory's files name none. Raises ModelError for files that cannot be read."""
        self.tokenizer = _load(Path(model_dir), model_type)  # Transformers' own object
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        # The object of the tokenizers library; None for a tokenizer that is written in Python.
        self.backend = backend if isinstance(backend, Backend) else None
        added = {} if self.backend is None else self.backend.get_added_tokens_decoder()
        # The special tokens that the backend leaves out of text.
        self.silent_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._added = {token_id: token.content for token_id, token in added.items()}
        self._bytes: dict[int, bytes | None] = {}  # of tokens that were asked for
        self._facts: dict[tuple[str, str], TemplateFacts] = {}  # by a template's text and the special tokens

    @property
    def chat_template(self) -> Any:
        """The text of the template; several named ones as a mapping; None without one."""
        return self.tokenizer.chat_template

    @property
    def response_template(self) -> Mapping[str, Any] | None:
        """How Transformers reads answers; None if the files do not say it."""
        template: Mapping[str, Any] | None = getattr(self.tokenizer, "response_template", None)
        return template

    @property
    def special_tokens_map(self) -> Mapping[str, str]:
        """The texts of the named special tokens, such as "eos_token"."""
        texts: Mapping[str, str] = self.tokenizer.special_tokens_map
        return texts

    def template_facts(self, template: str) -> TemplateFacts:
        """The facts of a chat template's text. Those of the last MOST_TEMPLATES templates are kept."""
        special = dict(self.special_tokens_map)
        key = (template, repr(special))
        facts = self._facts.pop(key, None) or TemplateFacts(template, special)
        self._facts[key] = facts  # the last one used is the last to go
        while len(self._facts) > MOST_TEMPLATES:
            del self._facts[next(iter(self._facts))]
        return facts

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        # With verbose, Transformers warns of texts longer than the tokenizer's model_max_length.
        return _guarded(lambda: list(self.tokenizer.encode(text, add_special_tokens=add_special_tokens, verbose=False)))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        # Cleaning up spaces would change the text of a token, and earlier text when a token is appended.
        options = {"skip_special_tokens": skip_special_tokens, "clean_up_tokenization_spaces": False}
        return _guarded(lambda: str(self.tokenizer.decode(list(token_ids), **options)))

    def token_text(self, token_id: int) -> str:
        return self.decode([token_id], skip_special_tokens=False)

    def token_string(self, token_id: int) -> str | None:
        """The token as the vocabulary writes it, such as "Ġthe"; None for an id that the vocabulary does not have."""
        if self.backend is not None:
            return self.backend.id_to_token(token_id)
        name: str | None = self.tokenizer.convert_ids_to_tokens(token_id)
        return name

    def token_bytes(self, token_id: int) -> bytes | None:
        """The bytes that a token adds to the text before it; None if they are not known.

        A word has its space in front; a token may be part of a character. A special token has the bytes of its name.
        """
        if token_id not in self._bytes:
            self._bytes[token_id] = self._find_bytes(token_id)
        return self._bytes[token_id]

    def offsets(self, text: str, token_ids: Sequence[int]) -> list[int] | None:
        """Where each token of a text begins in it, in characters.

        A part of a character begins where the character does. A token that encoding has added begins where the token
        before it ends. None if these are not the text's tokens, and without a backend.
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
        starts = []
        end = 0
        for (first, last), is_added in zip(encoding.offsets, encoding.special_tokens_mask, strict=True):
            # Some tokenizers do not count the spaces before a word to it.
            starts.append(end if is_added else min(first, end + len(text[end:first].rstrip(" "))))
            end = max(end, last)
        return starts

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
        """What a token adds to the text of another one. Alone, it might lose its space in front."""
        before = self._another
        known, text = (self.decode(ids, skip_special_tokens=False) for ids in (before, [*before, token_id]))
        return text[len(known) :] if text.startswith(known) else self.token_text(token_id)

    @cached_property
    def _another(self) -> list[int]:
        return self.encode("a", add_special_tokens=False)[-1:]

    @cached_property
    def _byte_symbols(self) -> dict[str, int]:
        """The byte that each character of a byte-level vocabulary stands for.

        A printable character of Latin-1 stands for itself; characters from 256 on stand for the other bytes, in order.
        """
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
    has_files = any((path / name).is_file() for name in TOKENIZER_FILES)
    return HuggingFaceTokenizer(path, model_type) if has_files else None


def _load(path: Path, model_type: str | None) -> Any:
    """Transformers' tokenizer, which has encoded a text. Raises ModelError."""
    try:
        if is_gguf(path):
            from nanovllm.formats.gguf import tokenizer as gguf  # imports numpy

            tokenizer = gguf.load_tokenizer(path)
        else:
            tokenizer = _load_directory(path, model_type)
        tokenizer.decode(tokenizer.encode("a"))  # fields of a wrong type may show themselves only here
        return tokenizer
    except ModelError:
        raise
    except BaseException as error:  # the libraries raise many types on damaged files, also panics
        if not isinstance(error, Exception) and not _is_panic(error):
            raise
        missing = "" if path.is_file() or (path / "tokenizer.json").is_file() else "there is no tokenizer.json: "
        raise ModelError(f"the tokenizer in {path} cannot be read: {missing}{told(error)}") from error


def _load_directory(directory: Path, model_type: str | None) -> Any:
    """AutoTokenizer's reading of a directory: only of the tokenizer's files, not of config.json, and without code."""
    # Slow to import, and not needed for token-id prompts.
    from transformers import CONFIG_MAPPING, AutoTokenizer, PreTrainedConfig
    from transformers.models.auto.tokenization_auto import get_tokenizer_config, tokenizer_class_from_name

    if not directory.is_dir():
        raise ModelError(f"the tokenizer in {directory} cannot be read: there is no such directory")
    for path in sorted(directory.iterdir()):
        if path.suffix in READ_SUFFIXES and path.is_file() and path.stat().st_size > MAX_FILE_BYTES:
            raise ModelError(f"{path} has {path.stat().st_size} bytes; a tokenizer file has at most {MAX_FILE_BYTES}.")
    fields = get_tokenizer_config(directory, local_files_only=True)
    auto_map = fields.get("auto_map")
    has_code = "AutoTokenizer" in auto_map if isinstance(auto_map, Mapping) else bool(auto_map)
    name = fields.get("tokenizer_class")
    if has_code and name and not any(tokenizer_class_from_name(known) for known in (name, f"{name}Fast")):
        raise ModelError(
            f"the tokenizer in {directory} needs code of its own (tokenizer_config.json: tokenizer_class={quoted(name)}"
            ", auto_map), which is never run; use a checkpoint whose tokenizer Transformers itself has"
        )
    config = PreTrainedConfig() if model_type is None else CONFIG_MAPPING[model_type]()
    return AutoTokenizer.from_pretrained(str(directory), config=config, local_files_only=True, trust_remote_code=False)


def _is_panic(error: BaseException) -> bool:
    """Whether the error, which may be no Exception, is a panic of the tokenizers library."""
    return type(error).__module__ == "pyo3_runtime"


def _guarded(call: Callable[[], T]) -> T:
    """The result of `call`. A panic of the tokenizers library, which is not an Exception, raises RequestError."""
    try:
        return call()
    except BaseException as error:
        if _is_panic(error):
            raise RequestError(f"the tokenizer fails on this text: {told(error)}") from None
        raise
