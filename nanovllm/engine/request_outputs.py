"""What the engine says of a request after a step."""

from __future__ import annotations

from collections.abc import Mapping

from nanovllm.engine.logprob_outputs import TokenTexts, report_logprobs, report_prompt_logprobs
from nanovllm.engine.request import Request, Sequence
from nanovllm.outputs import CompletionOutput, Logprob, RequestOutput, RequestOutputKind


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
