"""What a request gives back: tokens, text, why it ended, and what it cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum


class RequestOutputKind(Enum):
    """What the outputs of `LLMEngine.step` hold: everything so far, what is new, or nothing before the end.

    With DELTA, text, token_ids, logprobs and prompt_logprobs hold what no earlier output of the request had, and
    sequences without news are left out; what it costs does not grow with what has been generated.
    """

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token at one position: natural log of its probability under the raw logits, and its rank from 1.

    Equally likely tokens share a rank. decoded_token: its text by itself; None where the tokenizer does not know it or
    there is none.
    """

    logprob: float
    rank: int | None
    decoded_token: str | None


@dataclass(slots=True)
class RequestMetrics:
    """Times in seconds on the `time.monotonic` clock; counts in tokens; bytes of KV cache moved over the link.

    `prefill_tokens` counts computed prompt tokens, recomputed ones after a preemption included; `cached_tokens` were
    found in the prefix cache when the request first ran. `decode_tokens` leaves out each sequence's first token.
    `preemptions` were `swaps` or recomputed. A block that several sequences share is loaded once a step and counted for
    the first of them.
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    prefill_tokens: int = 0
    decode_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    swaps: int = 0
    h2d_bytes: int = 0
    d2h_bytes: int = 0

    @property
    def queue_time(self) -> float | None:
        """Seconds from arrival to the first step that computed something."""
        return _between(self.arrival_time, self.first_scheduled_time)

    @property
    def ttft(self) -> float | None:
        """Seconds from arrival to the first generated token."""
        return _between(self.arrival_time, self.first_token_time)

    @property
    def tpot(self) -> float | None:
        """Seconds per generated token after the first, or None while there is none."""
        decode_time = _between(self.first_token_time, self.finished_time)
        if decode_time is None or self.decode_tokens == 0:
            return None
        return decode_time / self.decode_tokens


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start


@dataclass(slots=True)
class CompletionOutput:
    """One generated sequence.

    logprobs: for each token the most likely ones and the chosen one, by token id. finish_reason: "stop", "length",
    "abort", "error" (see `RequestOutput.error`), None while it runs. stop_reason: the stop string, or the id from
    stop_token_ids, that ended it; None for the model's own end token.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[Mapping[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class RequestOutput:
    """A request's state after a step, and its result once `finished`.

    `error`: one sentence that says what went wrong, where a sequence has ended with finish_reason "error".

    Lists and metrics are the engine's own, since copies of a long prompt are dear: read them, do not change them.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    num_cached_tokens: int = 0
    prompt_logprobs: list[Mapping[int, Logprob] | None] | None = None
    error: str | None = None
