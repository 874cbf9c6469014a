"""The text of a sequence: what its tokens are decoded to, cut at stop strings."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

from nanovllm.sampling_params import SamplingParams
from nanovllm.text.detokenizer import Detokenizer
from nanovllm.text.prompts import open_end
from nanovllm.text.tokenizer import Tokenizer


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
        taken = self.num_tokens
        count = len(token_ids)
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
        self._ended = True
        self._open_end = ""
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
        include = self._params.include_stop_str_in_output
        num_old = len(self._open_end)
        text = self._open_end + piece
        match = find_stop(text, num_old, self._params.stop) if self.num_tokens > self._params.min_tokens else None
        if match is not None:
            self._stop_string = match.stop
            self._open_end = ""
            self._new.append(text[num_old : match.end] if include else text[: match.start])
        else:
            self._open_end = open_end(text, self._params.stop)
            self._new.append(piece if include else text[: len(text) - len(self._open_end)])


def find_stop(text: str, num_old: int, stops: Seq[str]) -> StopMatch | None:
    """The stop string that ends first after the first `num_old` characters; of several, the first in the list."""
    starts = [(text.find(stop, max(0, num_old - len(stop) + 1)), stop) for stop in stops]
    matches = [StopMatch(start, start + len(stop), stop) for start, stop in starts if start >= 0]
    return min(matches, key=lambda match: match.end, default=None)
