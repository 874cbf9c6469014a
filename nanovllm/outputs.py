"""The outputs of requests: tokens, text, finish reasons and metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any


class RequestOutputKind(Enum):
    """What each output holds: everything so far, only what is new, or nothing before the request has finished.

    With DELTA, text, token_ids, logprobs and prompt_logprobs hold only what no earlier output of the request had, and
    sequences without changes are left out. The cost of an output does not grow with the length of the sequence.
    """

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log-probability (natural log, of the raw logits) of one token at one position, and its rank from 1.

    Equally likely tokens share a rank. decoded_token: the text of this token alone; None without a tokenizer, or if the
    tokenizer does not know the token.
    """

    logprob: float
    rank: int | None
    decoded_token: str | None


@dataclass(slots=True)
class RequestMetrics:
    """When a request arrived, ran and ended, and what it took. `as_dict` has all of it.

    Times are in seconds since the epoch, as of `time.time()`; their differences are exact even if the system's clock
    is set meanwhile. Durations are in seconds, rates in tokens per second; None until they are known.
    Counts are in tokens, h2d_bytes and d2h_bytes in bytes of KV copied to the device and to the host.
    prefill_tokens: computed prompt tokens, including those recomputed after a preemption; first_prefill_tokens: of
    these, those computed before the first token came. cached_tokens: found in the
    prefix cache when the request first ran: in blocks on the device and on the host (of the first KV group), and in
    kv_cache_dir, as cached_tokens_device, _host and _disk. decode_tokens: generated tokens without the first of each
    sequence. drafted_tokens: guessed by speculative decoding; accepted_tokens: of these, the right ones that the output
    has.
    preemptions: by swap (`swaps`) or by recompute. A block that several sequences share is loaded once per step, and
    counts for the first of them.
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    prefill_tokens: int = 0
    first_prefill_tokens: int = 0
    decode_tokens: int = 0
    cached_tokens: int = 0
    cached_tokens_host: int = 0
    cached_tokens_disk: int = 0
    preemptions: int = 0
    swaps: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    h2d_bytes: int = 0
    d2h_bytes: int = 0

    @property
    def cached_tokens_device(self) -> int:
        """Of cached_tokens, those in blocks on the device."""
        return self.cached_tokens - self.cached_tokens_host - self.cached_tokens_disk

    @property
    def queue_time(self) -> float | None:
        """From arrival to the first step that computed something."""
        return _between(self.arrival_time, self.first_scheduled_time)

    @property
    def ttft(self) -> float | None:
        """Time to first token, from arrival."""
        return _between(self.arrival_time, self.first_token_time)

    @property
    def tpot(self) -> float | None:
        """Time per generated token after the first; None if there is none."""
        decode_time = _between(self.first_token_time, self.finished_time)
        if decode_time is None or self.decode_tokens == 0:
            return None
        return decode_time / self.decode_tokens

    @property
    def e2e_latency(self) -> float | None:
        """From arrival to the end."""
        return _between(self.arrival_time, self.finished_time)

    @property
    def prefill_rate(self) -> float | None:
        """Computed prompt tokens per second, from the first step to the first token."""
        seconds = _between(self.first_scheduled_time, self.first_token_time)
        return self.first_prefill_tokens / seconds if seconds else None

    @property
    def decode_rate(self) -> float | None:
        """Generated tokens per second after the first, of all sequences of the request together."""
        return 1 / self.tpot if self.tpot else None

    def as_dict(self) -> dict[str, float | None]:
        """Everything by a name with its unit, as the command line writes it: _s seconds, _tok_s tokens per second."""
        return {
            "arrival_time_s": self.arrival_time,
            "queue_time_s": self.queue_time,
            "ttft_s": self.ttft,
            "tpot_s": self.tpot,
            "e2e_latency_s": self.e2e_latency,
            "prefill_tok_s": self.prefill_rate,
            "decode_tok_s": self.decode_rate,
            "prefill_tokens": self.prefill_tokens,
            "decode_tokens": self.decode_tokens,
            "cached_tokens": self.cached_tokens,
            "cached_tokens_device": self.cached_tokens_device,
            "cached_tokens_host": self.cached_tokens_host,
            "cached_tokens_disk": self.cached_tokens_disk,
            "preemptions": self.preemptions,
            "swaps": self.swaps,
            "drafted_tokens": self.drafted_tokens,
            "accepted_tokens": self.accepted_tokens,
            "h2d_bytes": self.h2d_bytes,
            "d2h_bytes": self.d2h_bytes,
        }


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start


@dataclass(slots=True)
class CompletionOutput:
    """One generated sequence.

    logprobs: for each position, the most likely tokens and the sampled one, by token id. finish_reason: "stop",
    "length", "abort", "error" (see `RequestOutput.error`), or None while the sequence runs. stop_reason: the stop
    string or the id from stop_token_ids that ended the sequence; None for the model's own end token.
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
    """The state of a request after a step, and its result once `finished`.

    error: what went wrong, if a sequence ended with finish_reason "error". lora_request: that the request came with.
    step_failed: the error is that of a failed step and not the request's own.

    Lists and metrics belong to the engine, which does not copy long prompts: do not change them.
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
    lora_request: Any = None
    step_failed: bool = False
