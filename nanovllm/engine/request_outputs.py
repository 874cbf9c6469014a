"""What the engine says of a request after a step."""

from __future__ import annotations

from nanovllm.engine.request import Request, Sequence
from nanovllm.outputs import CompletionOutput, RequestOutput


def request_output(request: Request) -> RequestOutput:
    """The state of a request, and its result once it has finished."""
    return RequestOutput(
        request_id=request.request_id,
        prompt=request.prompt,
        prompt_token_ids=request.prompt_token_ids,
        outputs=[_completion(seq) for seq in request.sequences],
        finished=request.finished,
        metrics=request.metrics,
        num_cached_tokens=request.metrics.cached_tokens,
    )


def _completion(seq: Sequence) -> CompletionOutput:
    return CompletionOutput(
        index=seq.index,
        text="" if seq.text is None else seq.text.visible,
        token_ids=seq.output_token_ids,
        finish_reason=seq.finish_reason,
        stop_reason=seq.stop_reason,
    )
