"""The outputs of a request after a step: text, tokens and log-probabilities as the user reads them."""

from __future__ import annotations

from collections.abc import Mapping

from nanovllm.engine.batch import TokenLogprobs
from nanovllm.engine.request import Request, Sequence
from nanovllm.outputs import CompletionOutput, Logprob, RequestOutput, RequestOutputKind
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


def request_output(request: Request, texts: TokenTexts) -> RequestOutput | None:
    """The state of a request, what is new of it, or its result, as it asked; None if it asked for nothing yet.

    Which sequences are the best of more than are returned, or of a beam search, is known only in the end: until then
    such a request has no outputs.
    """
    kind = request.params.output_kind
    if kind is RequestOutputKind.FINAL_ONLY and not request.finished:
        return None
    if kind is RequestOutputKind.DELTA:
        outputs = [_news(seq, texts) for seq in request.outputs if _has_news(seq)]
    else:
        outputs = [_completion(seq, texts) for seq in request.outputs]
    return RequestOutput(
        request_id=request.request_id,
        prompt=request.prompt,
        prompt_token_ids=request.prompt_token_ids,
        outputs=outputs,
        finished=request.finished,
        metrics=request.metrics,
        num_cached_tokens=request.metrics.cached_tokens,
        prompt_logprobs=_prompt_logprobs(request, texts),
        error=request.error,
    )


def _completion(seq: Sequence, texts: TokenTexts) -> CompletionOutput:
    report_logprobs(seq, texts)
    asked = seq.params.logprobs is not None
    summed = asked or seq.request.is_ranked
    return CompletionOutput(
        index=seq.index,
        text="" if seq.text is None else seq.text.visible(),
        token_ids=seq.output_token_ids,
        cumulative_logprob=seq.cumulative_logprob if summed else None,
        logprobs=seq.reported_logprobs if asked else None,
        finish_reason=seq.finish_reason,
        stop_reason=seq.stop_reason,
    )


def _has_news(seq: Sequence) -> bool:
    return seq.num_output_tokens > seq.num_sent_tokens or seq.finished > seq.sent_end


def _news(seq: Sequence, texts: TokenTexts) -> CompletionOutput:
    """The part of `_completion` that no output has had; made without a look at the rest."""
    report_logprobs(seq, texts)
    asked, sent = seq.params.logprobs is not None, seq.num_sent_tokens
    summed = asked or seq.request.is_ranked
    seq.num_sent_tokens, seq.sent_end = seq.num_output_tokens, seq.finished
    return CompletionOutput(
        index=seq.index,
        text="" if seq.text is None else seq.text.take(),
        token_ids=seq.token_ids[seq.prompt_len + sent :],
        cumulative_logprob=seq.cumulative_logprob if summed else None,
        logprobs=seq.reported_logprobs[sent:] if asked else None,
        finish_reason=seq.finish_reason,
        stop_reason=seq.stop_reason,
    )


def _prompt_logprobs(request: Request, texts: TokenTexts) -> list[Mapping[int, Logprob] | None] | None:
    report_prompt_logprobs(request, texts)
    if request.params.prompt_logprobs is None:
        return None
    reported = request.reported_prompt_logprobs
    if request.params.output_kind is not RequestOutputKind.DELTA:
        return reported
    sent, request.num_sent_prompt_logprobs = request.num_sent_prompt_logprobs, len(reported)
    return reported[sent:]
