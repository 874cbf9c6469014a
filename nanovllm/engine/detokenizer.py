"""Incremental detokenization with stop strings: complete characters only, at constant cost per token."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from functools import partial
from typing import NamedTuple

from nanovllm.sampling_params import SamplingParams
from nanovllm.text.prompts import open_end
from nanovllm.text.tokenizer import HuggingFaceTokenizer, Tokenizer

# The text of a token can depend on the token before it, so decoding starts with the last tokens of the prompt. These
# must not begin or end within a character. A character has at most four bytes, so one of these lengths begins at one.
CONTEXT_LENGTHS = (5, 6, 7, 8)
MAX_HELD = 8  # tokens; a character has at most four bytes, so the first of more tokens are final
PART_OF_CHARACTER = "\ufffd"


class Detokenizer:
    """Decodes tokens one by one. The pieces that it returns, joined, are the text.

    A piece is what the `_held` tokens add to the text of `_context`, the tokens of the piece before. Tokens are held
    while their text ends in U+FFFD. Tokens without text, as far as a fast tokenizer tells them, are left out.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Seq[int] = (), skip_special_tokens: bool = True) -> None:
        self._backend = tokenizer.backend if isinstance(tokenizer, HuggingFaceTokenizer) else None
        self._silent: frozenset[int] = frozenset()
        self._decode = partial(tokenizer.decode, skip_special_tokens=skip_special_tokens)
        if isinstance(tokenizer, HuggingFaceTokenizer) and tokenizer.backend is not None:
            self._silent = tokenizer.silent_ids if skip_special_tokens else frozenset()
            self._decode = partial(tokenizer.backend.decode, skip_special_tokens=False)
        self._held: list[int] = []
        self._context = self._end_of([token for token in prompt_token_ids[-2 * MAX_HELD :] if self._has_text(token)])

    def step(self, token_id: int) -> str:
        """The text that this token completes; incomplete characters are held back."""
        if not self._has_text(token_id):
            return ""
        self._held.append(token_id)
        piece = self._text(len(self._held))
        if piece.endswith(PART_OF_CHARACTER):
            return self._settle(piece) if len(self._held) % MAX_HELD == 0 else ""
        if piece:
            self._context, self._held = self._held, []
        return piece

    def flush(self) -> str:
        """The text that is still held back. Call it after the last token."""
        return self._release(len(self._held))

    def _settle(self, text: str) -> str:
        """Release held tokens, whose text is given, up to the last one that ends a character, valid or not."""
        for count in range(len(self._held) - 1, len(self._held) - 4, -1):
            piece = self._text(count)
            # Decoded alone, a token may lose its leading space.
            if text.startswith(piece) and text[len(piece) :].lstrip() == self._decode(self._held[count:]).lstrip():
                return self._release(count)
        return ""

    def _release(self, count: int) -> str:
        piece, released = self._text(count), self._held[:count] or self._context
        self._context = [] if self._decode(released).endswith(PART_OF_CHARACTER) else released
        self._held = self._held[count:]
        return piece

    def _text(self, count: int) -> str:
        """The text of the first `count` held tokens after the context."""
        known, text = self._decode(self._context), self._decode(self._context + self._held[:count])
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


class StopMatch(NamedTuple):
    """A stop string found in a text, at `[start, end)`."""

    start: int
    end: int
    stop: str


class SequenceText:
    """The text of a sequence's output tokens, cut at stop strings.

    The end of the text that may be the start of a stop string is held back, unless stop strings are included in the
    output.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, prompt_token_ids: Seq[int] = ()) -> None:
        self._params = params
        self._detokenizer = Detokenizer(tokenizer, prompt_token_ids, params.skip_special_tokens)
        self.num_tokens = 0  # decoded so far
        self._open_end = ""  # the end of the text that may be the start of a stop string
        self._stop_string: str | None = None
        self._ended = False
        self._shown = ""
        self._new: list[str] = []  # visible pieces that are not in `_shown` yet

    def append(self, token_ids: Seq[int], *, ends: bool = False) -> str | None:
        """Decode the next tokens. Returns the stop string that they complete, if any.

        ends: the last token is an end token, whose text is shown only if stop strings are included in the output.
        """
        taken, count = self.num_tokens, len(token_ids)
        num_read = count - 1 if ends and not self._params.include_stop_str_in_output else count
        for i in range(num_read):
            self.num_tokens = taken + i + 1
            self._read(self._detokenizer.step(token_ids[i]))
            if self._stop_string is not None:
                break
        self.num_tokens = taken + count
        return self._stop_string

    def finish(self) -> str | None:
        """Release the text that was held back, after the last token. Returns as `append`; safe to call again."""
        if self._stop_string is None and not self._ended:
            self._read(self._detokenizer.flush())
            if not self._params.include_stop_str_in_output:
                self._new.append(self._open_end)
        self._ended, self._open_end = True, ""
        return self._stop_string

    def visible(self) -> str:
        """All of the text so far, without what is held back."""
        self._shown += "".join(self._new)
        self._new.clear()
        return self._shown

    def take(self) -> str:
        """The text that has become visible since the last call. Use either `take` or `visible`."""
        piece = "".join(self._new)
        self._new.clear()
        return piece

    def _read(self, piece: str) -> None:
        if not piece or not self._params.stop:
            self._new.append(piece)
            return
        include, num_old = self._params.include_stop_str_in_output, len(self._open_end)
        text = self._open_end + piece
        match = find_stop(text, num_old, self._params.stop) if self.num_tokens > self._params.min_tokens else None
        if match is not None:
            self._stop_string, self._open_end = match.stop, ""
            self._new.append(text[num_old : match.end] if include else text[: match.start])
        else:
            self._open_end = open_end(text, self._params.stop)
            self._new.append(piece if include else text[: len(text) - len(self._open_end)])


def find_stop(text: str, num_old: int, stops: Seq[str]) -> StopMatch | None:
    """The stop string that ends first after the first `num_old` characters; of several, the first in the list."""
    starts = [(text.find(stop, max(0, num_old - len(stop) + 1)), stop) for stop in stops]
    matches = [StopMatch(start, start + len(stop), stop) for start, stop in starts if start >= 0]
    return min(matches, key=lambda match: match.end, default=None)
