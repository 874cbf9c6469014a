"""Text to token ids and back, through the checkpoint's own tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from nanovllm.errors import ModelError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tokenizer_config.json")


class Tokenizer(Protocol):
    """What the engine needs of a tokenizer."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...

    def token_text(self, token_id: int) -> str: ...


class HuggingFaceTokenizer:
    """A Transformers tokenizer; special tokens are added when encoding and left out when decoding.

    `token_text` is the text of one token by itself, also of a special one; U+FFFD stands for part of a character.
    """

    def __init__(self, model_dir: str | Path) -> None:
        from transformers import AutoTokenizer  # slow to import, and not needed for token-id prompts

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(str(model_dir), local_files_only=True)
        except Exception as error:  # whatever the library raises on damaged files
            raise ModelError(f"the tokenizer files in {model_dir} cannot be read: {error}") from error

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def token_text(self, token_id: int) -> str:
        return str(self._tokenizer.decode([token_id], skip_special_tokens=False))


def load_tokenizer(model_dir: str | Path) -> Tokenizer | None:
    """The directory's tokenizer, or None if it has no tokenizer files."""
    if not any((Path(model_dir) / name).is_file() for name in TOKENIZER_FILES):
        return None
    return HuggingFaceTokenizer(model_dir)


class IncrementalDetokenizer:
    """Text of a growing sequence, each token decoded in the context of a few before it.

    A token can be part of a character, and its text can depend on its neighbours, so text is taken as the difference
    between the decoded window with and without the new tokens, and only once the window ends in a whole character.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window_start = 0
        self._read_end = 0
        self.text = ""

    def update(self, token_ids: Sequence[int]) -> str:
        """The text after all of `token_ids`, as far as it is complete."""
        known = self._tokenizer.decode(token_ids[self._window_start : self._read_end])
        window = self._tokenizer.decode(token_ids[self._window_start :])
        if len(window) > len(known) and not window.endswith("\ufffd"):
            self.text += window[len(known) :]
            self._window_start, self._read_end = self._read_end, len(token_ids)
        return self.text
