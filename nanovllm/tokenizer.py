"""Text to token ids and back, through the checkpoint's own tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from tokenizers import Tokenizer as Backend

from nanovllm.errors import ModelError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tokenizer_config.json")


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

    def __init__(self, model_dir: str | Path) -> None:
        from transformers import AutoTokenizer  # slow to import, and not needed for token-id prompts

        try:
            self.tokenizer: Any = AutoTokenizer.from_pretrained(str(model_dir), local_files_only=True)
        except Exception as error:  # whatever the library raises on damaged files
            raise ModelError(f"the tokenizer files in {model_dir} cannot be read: {error}") from error
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        self.backend = backend if isinstance(backend, Backend) else None
        added = {} if self.backend is None else self.backend.get_added_tokens_decoder()
        self.silent_ids = frozenset(token_id for token_id, token in added.items() if token.special)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        # Cleaning up spaces would change text that stands already when the next token comes.
        text = self.tokenizer.decode(
            list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return str(text)

    def token_text(self, token_id: int) -> str:
        return str(self.tokenizer.decode([token_id], skip_special_tokens=False))


def load_tokenizer(model_dir: str | Path) -> Tokenizer | None:
    """The directory's tokenizer, or None if it has no tokenizer files."""
    if not any((Path(model_dir) / name).is_file() for name in TOKENIZER_FILES):
        return None
    return HuggingFaceTokenizer(model_dir)
