"""Log-probabilities as the user reads them: by token id, with the text of each token."""

from __future__ import annotations

from nanovllm.engine.batch import TokenLogprobs
from nanovllm.engine.request import Request, Sequence
from nanovllm.outputs import Logprob
from nanovllm.tokenizer import Tokenizer


class TokenTexts:
    """The text of single tokens, each made once; None without a tokenizer, and for tokens that it does not know."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str | None] = {}

    def __getitem__(self, token_id: int) -> str | None:
        if token_id not in self._texts:
            self._texts[token_id] = self._text(token_id)
        return self._texts[token_id]

    def _text(self, token_id: int) -> str | None:
        if self._tokenizer is None:
            return None
        try:
            return self._tokenizer.token_text(token_id)
        except Exception:  # some tokenizers raise for the ids that only pad the model's vocabulary
            return None


def report_logprobs(seq: Sequence, texts: TokenTexts) -> None:
    """Bring `reported_logprobs` up to the sequence's last token."""
    count, reported = seq.request.sampling.num_logprobs, seq.reported_logprobs
    if count is not None:
        token_ids = seq.token_ids[seq.prompt_len + len(reported) :]
        for token_id, found in zip(token_ids, seq.logprobs[len(reported) :], strict=True):
            reported.append(_by_token(token_id, found, count, texts))


def report_prompt_logprobs(request: Request, texts: TokenTexts) -> None:
    """Bring `reported_prompt_logprobs` up to the last computed row."""
    count, reported = request.sampling.num_prompt_logprobs, request.reported_prompt_logprobs
    if count is not None:
        new = request.prompt_logprobs[len(reported) - 1 :]
        for token_id, found in zip(request.prompt_token_ids[len(reported) :], new, strict=False):
            reported.append(_by_token(token_id, found, count, texts))


def _by_token(token_id: int, found: TokenLogprobs, count: int, texts: TokenTexts) -> dict[int, Logprob]:
    """The token that stands there, then the `count` most likely ones: one entry more than asked for if it is none."""
    entries = {token_id: Logprob(found.logprob, found.rank, texts[token_id])}
    rank, last = 0, float("nan")
    for place, (other, logprob) in enumerate(zip(found.top_token_ids[:count], found.top_logprobs, strict=False), 1):
        rank, last = (rank if logprob == last else place), logprob  # equal ones share the first one's rank
        entries[other] = Logprob(logprob, rank, texts[other])
    return entries
