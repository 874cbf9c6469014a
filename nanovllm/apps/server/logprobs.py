"""Log-probabilities in OpenAI's shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nanovllm.outputs import Logprob
from nanovllm.text.tokenizer import Tokenizer

LEAST = -9999.0  # stands for minus infinity, which JSON does not have


class LegacyLogprobs:
    """The `logprobs` of completions, piece by piece: `text_offset` goes on where the last piece ended."""

    def __init__(self, tokenizer: Tokenizer | None, num_top: int, as_token_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._as_token_ids = as_token_ids
        self._offset = 0

    def piece(
        self, token_ids: Sequence[int], positions: Sequence[Mapping[int, Logprob] | None]
    ) -> dict[str, list[Any]]:
        """The next tokens. A position without log-probabilities, as the first of a prompt, has None."""
        found: dict[str, list[Any]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        for token_id, position in zip(token_ids, positions, strict=True):
            text = self._first(token_id) if position is None else self._text(token_id, position[token_id])
            found["text_offset"].append(self._offset)
            found["tokens"].append(text)
            found["token_logprobs"].append(None if position is None else finite(position[token_id].logprob))
            found["top_logprobs"].append(None if position is None else self._top(position, token_id))
            self._offset += len(text)
        return found

    def _top(self, position: Mapping[int, Logprob], token_id: int) -> dict[str, float]:
        """The most likely tokens, and the sampled one, which comes first among tokens of the same text."""
        ranked = {token_id: position[token_id], **dict(most_likely(position, self._num_top))}
        top: dict[str, float] = {}
        for other, entry in sorted(ranked.items(), key=lambda item: -item[1].logprob):
            top.setdefault(self._text(other, entry), finite(entry.logprob))
        return top

    def _text(self, token_id: int, entry: Logprob) -> str:
        return token_text(token_id, entry.decoded_token, self._as_token_ids)

    def _first(self, token_id: int) -> str:
        text = None if self._tokenizer is None else self._tokenizer.token_text(token_id)
        return token_text(token_id, text, self._as_token_ids)


def chat_logprobs(
    token_ids: Sequence[int], positions: Sequence[Mapping[int, Logprob]], num_top: int, as_token_ids: bool
) -> dict[str, Any]:
    """The `logprobs` of chat completions."""
    content = []
    for token_id, position in zip(token_ids, positions, strict=True):
        top = [_entry(other, entry, as_token_ids) for other, entry in most_likely(position, num_top)]
        content.append({**_entry(token_id, position[token_id], as_token_ids), "top_logprobs": top})
    return {"content": content, "refusal": None}


def prompt_logprobs(positions: Sequence[Mapping[int, Logprob] | None]) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: for each position the entries by token id."""
    return [
        None
        if position is None
        else {
            str(token_id): {
                "logprob": finite(entry.logprob),
                "rank": entry.rank,
                "decoded_token": entry.decoded_token,
            }
            for token_id, entry in position.items()
        }
        for position in positions
    ]


def most_likely(position: Mapping[int, Logprob], count: int) -> list[tuple[int, Logprob]]:
    """The `count` most likely entries, the most likely first; all of them if `count` is -1."""
    ranked = sorted(position.items(), key=lambda item: -item[1].logprob)
    return ranked if count == -1 else ranked[:count]


def token_text(token_id: int, text: str | None, as_token_id: bool) -> str:
    """The text of a token, or `token_id:N` if asked for or if it has none."""
    return f"token_id:{token_id}" if as_token_id or text is None else text


def finite(logprob: float) -> float:
    return max(logprob, LEAST)


def _entry(token_id: int, entry: Logprob, as_token_id: bool) -> dict[str, Any]:
    text = token_text(token_id, entry.decoded_token, as_token_id)
    return {"token": text, "logprob": finite(entry.logprob), "bytes": list(text.encode("utf-8", "replace"))}
