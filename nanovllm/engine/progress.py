"""How far the requests are that run now."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from nanovllm.engine.request import Request, Sequence


@dataclass(frozen=True, slots=True)
class Progress:
    """Of running requests, in tokens. `prompt_tokens` and how many are done are of prompts not yet computed whole."""

    num_requests: int = 0
    prompt_tokens: int = 0
    prompt_tokens_done: int = 0  # in the KV cache, computed or found there; of a span, by the layers that it is through
    computed_tokens: int = 0  # prompt tokens computed
    output_tokens: int = 0

    @classmethod
    def of(cls, running: Iterable[Request], num_layers: int) -> Progress:
        requests = list(running)
        live = [seq for request in requests for seq in request.live]
        computing = [seq for request in requests for seq in request.computing]  # a prompt of several sequences once
        prefills = [seq for seq in computing if seq.num_computed < seq.prompt_len]
        return cls(
            num_requests=len(requests),
            prompt_tokens=sum(seq.prompt_len for seq in prefills),
            prompt_tokens_done=sum(seq.num_computed + _through_layers(seq, num_layers) for seq in prefills),
            computed_tokens=sum(request.metrics.prefill_tokens for request in requests),
            output_tokens=sum(seq.num_output_tokens for seq in live),
        )


def _through_layers(seq: Sequence, num_layers: int) -> int:
    """What has been done of a sequence's span, in tokens through all layers."""
    if seq.layerwise is None:
        return 0
    return (seq.layerwise.end - seq.layerwise.begin) * seq.layerwise_done // (seq.layerwise.num_chunks * num_layers)
