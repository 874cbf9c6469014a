"""Tokens to text, piece by piece: whole characters only, at a cost that does not grow with the text."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Protocol

from tokenizers import Tokenizer as Backend
from tokenizers.decoders import DecodeStream

from nanovllm.tokenizer import HuggingFaceTokenizer, Tokenizer

# The text of a token can depend on the one before it, so the first is read after the end of the prompt. It must not
# begin or end within a character; where a byte is a token, one of these lengths begins at one.
CONTEXT_LENGTHS = (5, 6, 7, 8)
MOST_HELD = 8  # tokens; a character has at most four bytes, so of more than this the first are settled
PART_OF_CHARACTER = "\ufffd"


class Detokenizer(Protocol):
    """Pieces of a text as its tokens come; joined, they are the text."""

    def step(self, token_id: int) -> str:
        """The text that is complete with this token; what may be part of a character is held back."""

    def flush(self) -> str:
        """What is still held back: no token follows."""


def make_detokenizer(
    tokenizer: Tokenizer, prompt_token_ids: Seq[int] = (), *, skip_special_tokens: bool = True
) -> Detokenizer:
    """A detokenizer for what follows the prompt: the stream decoder, or the window where there is no fast tokenizer."""
    if isinstance(tokenizer, HuggingFaceTokenizer) and tokenizer.backend is not None:
        silent = tokenizer.silent_ids if skip_special_tokens else frozenset()
        return StreamDetokenizer(tokenizer.backend, silent, prompt_token_ids)
    return WindowDetokenizer(tokenizer, prompt_token_ids, skip_special_tokens)


class StreamDetokenizer:
    """The tokenizers library's stream decoder, and what is needed to flush and to mend it.

    The decoder holds tokens back while the text ends in U+FFFD. `_held` are those; `_context` are the tokens of the
    piece before them. Tokens without text are not given to it, as it would hold them for good.
    """

    def __init__(self, backend: Backend, silent: frozenset[int], prompt_token_ids: Seq[int] = ()) -> None:
        self._backend = backend
        self._silent = silent
        self._context: list[int] = []
        self._held: list[int] = []
        self._stream = DecodeStream(skip_special_tokens=False)
        tail = [token for token in prompt_token_ids[-2 * CONTEXT_LENGTHS[-1] :] if self._has_text(token)]
        self._restart(_context(tail, self._decode), [])

    def step(self, token_id: int) -> str:
        if not self._has_text(token_id):
            return ""
        self._held.append(token_id)
        try:
            piece = self._stream.step(self._backend, token_id)
        except Exception:  # the token changes how earlier ones are read, as malformed bytes can: it has no type
            return self._release(len(self._held))
        if piece is not None:
            self._context, self._held = self._held, []
            return str(piece)
        return self._settle() if len(self._held) % MOST_HELD == 0 else ""

    def flush(self) -> str:
        return self._release(len(self._held))

    def _settle(self) -> str:
        """Many tokens are held: those go that end a character, be it one that is no text."""
        text = self._text(len(self._held))
        for count in range(len(self._held) - 1, len(self._held) - 4, -1):
            piece = self._text(count)
            # Alone, a token may lose the space before it.
            if text.startswith(piece) and text[len(piece) :].lstrip() == self._decode(self._held[count:]).lstrip():
                return self._release(count)
        return ""

    def _release(self, count: int) -> str:
        piece, held = self._text(count), self._held[count:]
        released = self._held[:count] or self._context
        self._restart([] if self._decode(released).endswith(PART_OF_CHARACTER) else released, held)
        return piece

    def _restart(self, context: list[int], held: list[int]) -> None:
        self._context, self._held = context, held
        self._stream = DecodeStream(ids=context, skip_special_tokens=False)
        if held:
            self._stream.step(self._backend, held)

    def _text(self, count: int) -> str:
        """What the first `count` held tokens add to the context."""
        known, text = self._decode(self._context), self._decode(self._context + self._held[:count])
        return text[len(known) :] if text.startswith(known) else self._decode(self._held[:count])

    def _decode(self, token_ids: list[int]) -> str:
        return str(self._backend.decode(token_ids, skip_special_tokens=False))

    def _has_text(self, token_id: int) -> bool:
        return token_id not in self._silent and self._backend.id_to_token(token_id) is not None


class WindowDetokenizer:
    """The same for any tokenizer: text is what a window of tokens has more with the new ones than without them."""

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Seq[int] = (), skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._context = _context(prompt_token_ids, self._decode)
        self._held: list[int] = []

    def step(self, token_id: int) -> str:
        self._held.append(token_id)
        piece = self._text()
        if not piece or piece.endswith(PART_OF_CHARACTER):
            return ""
        self._context, self._held = self._held, []
        return piece

    def flush(self) -> str:
        piece = self._text()
        self._context, self._held = [], []
        return piece

    def _text(self) -> str:
        known, text = self._decode(self._context), self._decode(self._context + self._held)
        return text[len(known) :]

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)


def _context(prompt_token_ids: Seq[int], decode: Callable[[list[int]], str]) -> list[int]:
    for length in CONTEXT_LENGTHS:
        tail = list(prompt_token_ids[-length:])
        try:
            if not decode(tail).endswith(PART_OF_CHARACTER):
                return tail
        except Exception:  # a prompt may hold what its tokenizer cannot write
            return []
    return []
