"""How far the requests are that run now."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from nanovllm.engine.request import Request


@dataclass(frozen=True, slots=True)
class Progress:
    """Of running requests, in tokens. `prompt_tokens` and how many are done are of prompts not yet computed whole."""

    num_requests: int = 0
    prompt_tokens: int = 0
    prompt_tokens_done: int = 0  # in the KV cache, computed or found there
    computed_tokens: int = 0  # prompt tokens computed
    output_tokens: int = 0

    @classmethod
    def of(cls, running: Iterable[Request]) -> Progress:
        requests = list(running)
        live = [seq for request in requests for seq in request.live]
        prefills = [seq for seq in live if seq.num_computed < seq.prompt_len]
        return cls(
            num_requests=len(requests),
            prompt_tokens=sum(seq.prompt_len for seq in prefills),
            prompt_tokens_done=sum(seq.num_computed for seq in prefills),
            computed_tokens=sum(request.metrics.prefill_tokens for request in requests),
            output_tokens=sum(seq.num_output_tokens for seq in live),
        )
