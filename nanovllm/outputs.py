"""The outputs of requests: tokens, text, finish reasons and metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
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
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    prefill_tokens: int = 0  # computed prompt tokens, including those recomputed after a preemption
    first_prefill_tokens: int = 0  # of these, those computed before the first token came
    decode_tokens: int = 0  # generated tokens without the first of each sequence
    cached_tokens: int = 0  # found in the prefix cache when the request first ran
    cached_tokens_host: int = 0  # of these, in blocks on the host, of the first KV group
    cached_tokens_disk: int = 0  # of these, in kv_cache_dir
    recomputed_tokens: int = 0  # not found then, though an earlier prompt or its answer began with them
    preemptions: int = 0
    swaps: int = 0  # preemptions by swap
    drafted_tokens: int = 0  # guessed by speculative decoding
    accepted_tokens: int = 0  # of these, the right ones that the output has
    h2d_bytes: int = 0  # of KV copied to the device; a block counts for the first of the sequences that share it
    d2h_bytes: int = 0  # of KV copied to the host

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
    def prefill_time(self) -> float | None:
        """From the first step that computed something to the first token."""
        return _between(self.first_scheduled_time, self.first_token_time)

    @property
    def decode_time(self) -> float | None:
        """From the first token to the end."""
        return _between(self.first_token_time, self.finished_time)

    @property
    def inference_time(self) -> float | None:
        """From the first step that computed something to the end."""
        return _between(self.first_scheduled_time, self.finished_time)

    @property
    def e2e_latency(self) -> float | None:
        """From arrival to the end."""
        return _between(self.arrival_time, self.finished_time)

    @property
    def tpot(self) -> float | None:
        """Time per generated token after the first; None if there is none."""
        seconds = self.decode_time
        return None if seconds is None or self.decode_tokens == 0 else seconds / self.decode_tokens

    @property
    def prefill_rate(self) -> float | None:
        """Computed prompt tokens per second, from the first step to the first token."""
        seconds = self.prefill_time
        return self.first_prefill_tokens / seconds if seconds else None

    @property
    def decode_rate(self) -> float | None:
        """Generated tokens per second after the first, of all sequences of the request together."""
        return 1 / self.tpot if self.tpot else None

    def as_dict(self) -> dict[str, float | None]:
        """The fields, and what follows from them with its unit: _s seconds, _tok_s tokens per second."""
        return {
            **asdict(self),
            "cached_tokens_device": self.cached_tokens_device,
            "queue_time_s": self.queue_time,
            "ttft_s": self.ttft,
            "tpot_s": self.tpot,
            "e2e_latency_s": self.e2e_latency,
            "prefill_tok_s": self.prefill_rate,
            "decode_tok_s": self.decode_rate,
        }


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start


@dataclass(slots=True)
class CompletionOutput:
    """One generated sequence."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[Mapping[int, Logprob]] | None = None  # of each position the most likely tokens and the sampled one
    finish_reason: str | None = None  # "stop", "length", "abort" or "error"; None while the sequence runs
    stop_reason: int | str | None = None  # the stop string or stop token; None for the model's own end token


@dataclass(slots=True)
class RequestOutput:
    """The state of a request after a step, and its result once `finished`.

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
    error: str | None = None  # what went wrong, if a sequence ended with finish_reason "error"
    lora_request: Any = None  # that the request came with
    step_failed: bool = False  # the error is that of a failed step and not the request's own
