"""Incremental detokenization: complete characters only, at constant cost per token."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from nanovllm.text.tokenizer import PART_OF_CHARACTER, HuggingFaceTokenizer, Tokenizer

# The text of a token can depend on the token before it, so decoding starts with the last tokens of the prompt. These
# must not begin or end within a character. A character has at most four bytes, so one of these lengths begins at one.
CONTEXT_LENGTHS = (5, 6, 7, 8)
MAX_HELD = 8  # tokens; a character has at most four bytes, so the first of more tokens are final


class Detokenizer:
    """Decodes tokens one by one. The pieces that it returns, joined, are the text.

    A token is held while the text so far ends in U+FFFD, which stands for part of a character. A piece is what the held
    tokens add to the text of the context. Tokens without text, such as special ones, are left out where the tokenizer's
    backend tells which they are.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int] = (), skip_special_tokens: bool = True
    ) -> None:
        self._backend = tokenizer.backend if isinstance(tokenizer, HuggingFaceTokenizer) else None
        self._silent: frozenset[int] = frozenset()
        self._decode = partial(tokenizer.decode, skip_special_tokens=skip_special_tokens)
        if isinstance(tokenizer, HuggingFaceTokenizer) and tokenizer.backend is not None:
            self._silent = tokenizer.silent_ids if skip_special_tokens else frozenset()
            self._decode = partial(tokenizer.backend.decode, skip_special_tokens=False)
        self._num_released = 0  # characters
        self._character = 0  # where the last character begins, in characters
        self._held: list[int] = []
        # The tokens of the last piece, at first the end of the prompt.
        self._context = self._end_of([token for token in prompt_token_ids[-2 * MAX_HELD :] if self._has_text(token)])

    def position_of(self, token_id: int, data: bytes | None) -> int:
        """How many characters of the text come before a token. Call it before the token's `step`.

        data: the token's bytes, None if they are not known. A token that continues a character begins where the
        character does.
        """
        held = self._text(len(self._held)) if self._held else ""
        if data and not 0x80 <= data[0] < 0xC0 and self._has_text(token_id):  # it begins a character
            self._character = self._num_released + len(held)
            return self._character
        return max(self._character, self._num_released + len(held.rstrip(PART_OF_CHARACTER)))

    @property
    def is_at_start(self) -> bool:
        """Whether no token comes before the next one, so that decoders drop a space in front of it."""
        return not self._context and not self._held

    def step(self, token_id: int) -> str:
        """The text that this token completes; incomplete characters are held back."""
        if not self._has_text(token_id):
            return ""
        self._held.append(token_id)
        piece = self._text(len(self._held))
        if piece.endswith(PART_OF_CHARACTER):
            return self._settle(piece) if len(self._held) % MAX_HELD == 0 else ""
        if piece:
            self._context = self._held
            self._held = []
            self._num_released += len(piece)
        return piece

    def flush(self) -> str:
        """The text that is still held back. Call it after the last token."""
        return self._release(len(self._held))

    def _settle(self, text: str) -> str:
        """Release held tokens up to the last one that ends a character, valid or not. text: of all held tokens."""
        for count in range(len(self._held) - 1, len(self._held) - 4, -1):
            piece = self._text(count)
            # Decoded alone, a token may lose its leading space.
            if text.startswith(piece) and text[len(piece) :].lstrip() == self._decode(self._held[count:]).lstrip():
                return self._release(count)
        return ""

    def _release(self, count: int) -> str:
        piece = self._text(count)
        released = self._held[:count] or self._context
        self._context = [] if self._decode(released).endswith(PART_OF_CHARACTER) else released
        self._held = self._held[count:]
        self._num_released += len(piece)
        return piece

    def _text(self, count: int) -> str:
        """The text of the first `count` held tokens after the context."""
        known = self._decode(self._context)
        text = self._decode(self._context + self._held[:count])
        # Malformed bytes can change the text of earlier tokens.
        return text[len(known) :] if text.startswith(known) else self._decode(self._held[:count])

    def _has_text(self, token_id: int) -> bool:
        if self._backend is None:
            return True
        return token_id not in self._silent and self._backend.id_to_token(token_id) is not None

    def _end_of(self, prompt: list[int]) -> list[int]:
        for length in CONTEXT_LENGTHS:
            try:
                if not self._decode(prompt[-length:]).endswith(PART_OF_CHARACTER):
                    return prompt[-length:]
            except Exception:  # a prompt of token ids may hold ids that the tokenizer does not know
                return []
        return []
