"""The text of one sequence, as its tokens come, and the stop strings that end it."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

from nanovllm.engine.detokenizer import make_detokenizer
from nanovllm.sampling_params import SamplingParams
from nanovllm.tokenizer import Tokenizer


class StopMatch(NamedTuple):
    """A stop string in a text: where it begins, and where it is complete."""

    start: int
    end: int
    stop: str


class SequenceText:
    """Takes a sequence's generated tokens step by step and keeps their text, which continues that of the prompt.

    Of the text, what may still become a stop string is not shown: the longest end of it that a stop string begins with.
    Where stop strings are part of the output nothing is held back for them.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, prompt_token_ids: Seq[int] = ()) -> None:
        self._params = params
        self._detokenizer = make_detokenizer(
            tokenizer, prompt_token_ids, skip_special_tokens=params.skip_special_tokens
        )
        self.num_tokens = 0  # taken so far
        self._open_end = ""  # the end of the text that may be the beginning of a stop string
        self._stop_string: str | None = None
        self._ended = False
        self._shown = ""
        self._new: list[str] = []  # shown as well, and not yet joined

    def append(self, token_ids: Seq[int], *, ends: bool = False) -> str | None:
        """Take the next tokens. Returns the stop string that they complete, if any: the sequence ends with it.

        ends: the last of them ended the sequence; its text is shown only if stop strings are.
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
        """The sequence has ended: what was held back is decided now. Returns as `append`; safe to call again."""
        if self._stop_string is None and not self._ended:
            self._read(self._detokenizer.flush())
            if not self._params.include_stop_str_in_output:
                self._new.append(self._open_end)
        self._ended, self._open_end = True, ""
        return self._stop_string

    def visible(self) -> str:
        """The text so far, without what may still change."""
        self._shown += "".join(self._new)
        self._new.clear()
        return self._shown

    def take(self) -> str:
        """What has become visible since the last call, for who joins it himself."""
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
    """The stop string that is complete first, beyond the first `num_old` characters; of several the first in order."""
    starts = [(text.find(stop, max(0, num_old - len(stop) + 1)), stop) for stop in stops]
    matches = [StopMatch(start, start + len(stop), stop) for start, stop in starts if start >= 0]
    return min(matches, key=lambda match: match.end, default=None)


def open_end(text: str, stops: Seq[str]) -> str:
    """The longest end of the text with which a stop string begins, and which is shorter than it."""
    for length in range(min(len(text), max(len(stop) for stop in stops) - 1), 0, -1):
        end = text[-length:]
        if any(len(stop) > length and stop.startswith(end) for stop in stops):
            return end
    return ""
