"""What the engine says of a request after a step."""

from __future__ import annotations

from nanovllm.engine.logprob_outputs import TokenTexts, report_logprobs, report_prompt_logprobs
from nanovllm.engine.request import Request, Sequence
from nanovllm.outputs import CompletionOutput, RequestOutput


def request_output(request: Request, texts: TokenTexts) -> RequestOutput:
    """The state of a request, and its result once it has finished.

    Which sequences are the best of more than are returned, or of a beam search, is known only then: until then such a
    request has no outputs.
    """
    report_prompt_logprobs(request, texts)
    return RequestOutput(
        request_id=request.request_id,
        prompt=request.prompt,
        prompt_token_ids=request.prompt_token_ids,
        outputs=[_completion(seq, texts) for seq in request.outputs],
        finished=request.finished,
        metrics=request.metrics,
        num_cached_tokens=request.metrics.cached_tokens,
        prompt_logprobs=None if request.params.prompt_logprobs is None else request.reported_prompt_logprobs,
    )


def _completion(seq: Sequence, texts: TokenTexts) -> CompletionOutput:
    report_logprobs(seq, texts)
    asked = seq.params.logprobs is not None
    summed = asked or seq.request.is_ranked
    return CompletionOutput(
        index=seq.index,
        text="" if seq.text is None else seq.text.visible,
        token_ids=seq.output_token_ids,
        cumulative_logprob=seq.cumulative_logprob if summed else None,
        logprobs=seq.reported_logprobs if asked else None,
        finish_reason=seq.finish_reason,
        stop_reason=seq.stop_reason,
    )
