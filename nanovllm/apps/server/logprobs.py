"""Log-probabilities in the shapes of OpenAI's and of vLLM's answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from nanovllm.outputs import Logprob
from nanovllm.text.detokenizer import Detokenizer
from nanovllm.text.tokenizer import Tokenizer

LEAST = -9999.0  # stands for minus infinity, which JSON does not have
Shown = dict[str, list[Any]]


class Place(NamedTuple):
    """Where a token begins in a text, in characters. is_first: without the space that decoders drop there."""

    offset: int
    is_first: bool


def _next_place(detokenizer: Detokenizer, names: TokenNames, token_id: int) -> Place:
    """The place of the next token in the text of the detokenizer."""
    return Place(detokenizer.position_of(token_id, names.data(token_id)), detokenizer.is_at_start)


class Echo(NamedTuple):
    """A prompt that an answer begins with."""

    text: str
    token_ids: Sequence[int]
    places: Sequence[Place]


def places_of(tokenizer: Tokenizer, token_ids: Sequence[int], text: str, skip_special_tokens: bool) -> list[Place]:
    """The places of a prompt's tokens in its text as it was given, which may differ from the text of its tokens."""
    detokenizer = Detokenizer(tokenizer, (), skip_special_tokens)
    places = []
    pieces = []
    names = TokenNames(tokenizer, False)
    for token_id in token_ids:
        places.append(_next_place(detokenizer, names, token_id))
        pieces.append(detokenizer.step(token_id))
    if "".join([*pieces, detokenizer.flush()]) == text:
        return places
    offsets = tokenizer.offsets(text, token_ids) or [min(place.offset, len(text)) for place in places]
    return [place._replace(offset=offset) for place, offset in zip(places, offsets, strict=True)]


class LegacyLogprobs:
    """The `logprobs` of completions, piece by piece.

    text_offset: where the text of a token begins in the answer's, in characters, however the token is shown. Part of a
    character begins where that does, and a token without text where the next one's begins.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        num_top: int,
        as_token_ids: bool,
        prompt: Sequence[int] = (),
        skip_special_tokens: bool = True,
    ) -> None:
        self._names = TokenNames(tokenizer, as_token_ids)
        self._num_top = num_top
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer, prompt, skip_special_tokens)
        self._begin = 0  # of the generated text in the answer's
        self._length = 0  # characters of the answer so far

    def echo(self, prompt: Echo, positions: Sequence[Mapping[int, Logprob] | None]) -> Shown:
        """The tokens of the prompt, with whose text the answer begins."""
        self._begin = self._length = len(prompt.text)
        return self._shown(prompt.token_ids, positions, prompt.places)

    def piece(
        self, token_ids: Sequence[int], positions: Sequence[Mapping[int, Logprob]], text: str = "", ends: bool = False
    ) -> Shown:
        """The next tokens, and the text that comes with them.

        ends: the answer has ended, perhaps cut at a stop string. Then no token begins behind its text.
        """
        self._length += len(text)
        places = [self._place(token_id) for token_id in token_ids]
        if ends:
            places = [place._replace(offset=min(place.offset, self._length)) for place in places]
        return self._shown(token_ids, positions, places)

    def _place(self, token_id: int) -> Place:
        """The place of the next generated token."""
        detokenizer = self._detokenizer
        if detokenizer is None:
            return Place(self._begin, False)
        place = _next_place(detokenizer, self._names, token_id)
        detokenizer.step(token_id)
        return place._replace(offset=self._begin + place.offset)

    def _shown(
        self, token_ids: Sequence[int], positions: Sequence[Mapping[int, Logprob] | None], places: Sequence[Place]
    ) -> Shown:
        """A position without log-probabilities, as the first of a prompt, has None."""
        shown: Shown = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        for token_id, position, place in zip(token_ids, positions, places, strict=True):
            shown["text_offset"].append(place.offset)
            shown["tokens"].append(self._names.legacy(token_id, place.is_first))
            shown["token_logprobs"].append(None if position is None else finite(position[token_id].logprob))
            shown["top_logprobs"].append(None if position is None else self._top(position, token_id, place.is_first))
        return shown

    def _top(self, position: Mapping[int, Logprob], token_id: int, is_first: bool) -> dict[str, float]:
        """The most likely tokens, and the sampled one, which comes first among tokens of the same text."""
        ranked = {token_id: position[token_id], **dict(most_likely(position, self._num_top))}
        top: dict[str, float] = {}
        for other, entry in sorted(ranked.items(), key=lambda item: -item[1].logprob):
            top.setdefault(self._names.legacy(other, is_first), finite(entry.logprob))
        return top


class TokenNames(NamedTuple):
    """What tokens are called: by their text within a text, so that the tokens of a text join to it.

    Bytes that are no text, such as a part of a character, are escaped as OpenAI does: `\\xf0\\x9f`, in completions with
    `bytes:` in front. A token whose bytes are not known is `token_id:N`, and so is each if asked for.
    """

    tokenizer: Tokenizer | None
    as_token_ids: bool

    def chat(self, token_id: int, mark: str = "") -> str:
        data = None if self.as_token_ids else self.data(token_id)
        if data is None:
            return f"token_id:{token_id}"
        try:
            return data.decode()
        except UnicodeDecodeError:
            return mark + repr(data)[2:-1]

    def legacy(self, token_id: int, is_first: bool = False) -> str:
        """is_first: in its text, where decoders drop a space."""
        name = self.chat(token_id, "bytes:")
        if is_first and name.startswith(" ") and self.tokenizer is not None:
            return self.tokenizer.token_text(token_id)
        return name

    def data(self, token_id: int) -> bytes | None:
        try:
            return None if self.tokenizer is None else self.tokenizer.token_bytes(token_id)
        except Exception:  # some tokenizers raise for ids that only pad the model's vocabulary
            return None


def chat_logprobs(
    token_ids: Sequence[int],
    positions: Sequence[Mapping[int, Logprob]],
    num_top: int,
    as_token_ids: bool,
    tokenizer: Tokenizer | None,
) -> dict[str, Any]:
    """The `logprobs` of chat completions."""
    names = TokenNames(tokenizer, as_token_ids)

    def shown(token_id: int, entry: Logprob) -> dict[str, Any]:
        data = names.data(token_id)
        name = names.chat(token_id)
        values = None if data is None else list(data)
        return {"token": name, "logprob": finite(entry.logprob), "bytes": values}

    content = []
    for token_id, position in zip(token_ids, positions, strict=True):
        top = [shown(other, entry) for other, entry in most_likely(position, num_top)]
        content.append({**shown(token_id, position[token_id]), "top_logprobs": top})
    return {"content": content, "refusal": None}


def prompt_logprobs(positions: Sequence[Mapping[int, Logprob] | None]) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: for each position the entries by token id."""

    def shown(entry: Logprob) -> dict[str, Any]:
        return {"logprob": finite(entry.logprob), "rank": entry.rank, "decoded_token": entry.decoded_token}

    return [None if at is None else {str(token): shown(entry) for token, entry in at.items()} for at in positions]


def most_likely(position: Mapping[int, Logprob], count: int) -> list[tuple[int, Logprob]]:
    """The `count` most likely entries, the most likely first; all of them if `count` is -1."""
    ranked = sorted(position.items(), key=lambda item: -item[1].logprob)
    return ranked if count == -1 else ranked[:count]


def finite(logprob: float) -> float:
    return max(logprob, LEAST)
