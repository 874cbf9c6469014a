"""How far the requests of an engine are: plain data for displays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

# As of `LLM.watch_steps`: sets the function that is called before every layer, and returns the one before.
WatchSteps = Callable[[Callable[[float], None] | None], Callable[[float], None] | None]


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of the unfinished requests, in tokens.

    num_requests: of the running ones. prompt_tokens: of running prompts that are not yet computed, and
    prompt_tokens_done: what of these is computed or found in the prefix cache; layer by layer, in proportion.
    prefilled_tokens: of running prompts that are computed; waiting_tokens: of waiting prompts. computed_tokens: prompt
    tokens computed for all running requests, without those found. output_tokens: generated tokens of all of them;
    drafted_tokens and accepted_tokens: of speculative decoding, guessed and right.
    """

    num_requests: int = 0
    prompt_tokens: int = 0
    prompt_tokens_done: float = 0
    prefilled_tokens: int = 0
    waiting_tokens: int = 0
    computed_tokens: float = 0
    output_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    def plus(self, tokens: float) -> Progress:
        """The progress after so many more prompt tokens are computed."""
        done = self.prompt_tokens_done + tokens
        computed = self.computed_tokens + tokens
        return replace(self, prompt_tokens_done=done, computed_tokens=computed)
