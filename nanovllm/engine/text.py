"""The text of one sequence, as its tokens come."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from nanovllm.sampling_params import SamplingParams
from nanovllm.tokenizer import IncrementalDetokenizer, Tokenizer


class SequenceText:
    """Takes a sequence's generated tokens step by step and keeps their text."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._tokenizer = tokenizer
        self._params = params
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._token_ids: list[int] = []
        self._text = ""

    @property
    def num_tokens(self) -> int:
        """Tokens taken so far."""
        return len(self._token_ids)

    def append(self, token_ids: Seq[int]) -> str | None:
        """Take the next tokens. Returns the stop string that they complete, if any: the sequence ends with it."""
        self._token_ids.extend(token_ids)
        self._text = self._detokenizer.update(self._token_ids)
        return None

    def finish(self, stop_reason: int | str | None) -> None:
        """The sequence has ended: what was held back is decided now. Safe to call again."""
        token_ids = self._token_ids
        if isinstance(stop_reason, int):  # the token that was asked to end the text is not part of it
            token_ids = token_ids[:-1]
        self._text = self._tokenizer.decode(token_ids)

    @property
    def visible(self) -> str:
        """The text so far, without what may still change."""
        return self._text
