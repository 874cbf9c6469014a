"""Requests and their sequences: the state that the engine keeps between steps."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import KW_ONLY, InitVar, dataclass, field
from enum import Enum

from nanovllm.engine.batch import Sample, TokenLogprobs, token_array
from nanovllm.engine.beam_search import BeamSearch
from nanovllm.engine.resolved_sampling import ResolvedSampling
from nanovllm.kvcache.prefill_plan import LayerwisePrefill
from nanovllm.outputs import RequestMetrics
from nanovllm.sampling_params import SamplingParams


class RequestStatus(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    FINISHED = "finished"


@dataclass(eq=False)
class Request:
    """A prompt, its sampling parameters, and the sequences that answer it.

    Several sequences share the prompt. The first one computes it for all; then they fork, and `forked` is true from
    there on. With `beam_search`, the sequences are the beams of the last step. `number` counts the engine's requests;
    `seq_ids` yields a unique id for every sequence of the engine. `error`: why it ended with finish_reason "error".
    `prompt_logprobs`: from the second prompt token on, as far as they are computed.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    _: KW_ONLY
    number: int
    seq_ids: Iterator[int]
    seed: int
    arrival_time: InitVar[float]
    priority: int = 0
    prompt: str | None = None
    cache_salt: bytes = b""
    sampling: ResolvedSampling = field(default_factory=ResolvedSampling)
    beam_search: BeamSearch[Sequence] | None = None
    status: RequestStatus = field(default=RequestStatus.WAITING, init=False)
    error: str | None = field(default=None, init=False)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list, init=False)

    def __post_init__(self, arrival_time: float) -> None:
        self.metrics = RequestMetrics(arrival_time=arrival_time)
        count = self.params.num_sequences if self.beam_search is None else 1
        self.sequences = [Sequence(self, next(self.seq_ids), index) for index in range(count)]
        self.forked = count == 1

    @property
    def order(self) -> tuple[int, float, int]:
        """The scheduler's sort key: priority (lower first), then arrival."""
        return (self.priority, self.metrics.arrival_time, self.number)

    @property
    def prompt_len(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    @property
    def live(self) -> list[Sequence]:
        """The sequences that have not finished."""
        return [seq for seq in self.sequences if not seq.finished]

    @property
    def computing(self) -> list[Sequence]:
        """The sequences that the next step computes: the first live one before the fork, all live ones after it."""
        return self.live if self.forked else self.live[:1]

    @property
    def num_seqs(self) -> int:
        """Sequence slots that it takes while it runs."""
        return len(self.live) if self.beam_search is None else self.beam_search.width

    @property
    def num_logprobs(self) -> int | None:
        """Log-probabilities that its samples must have: ranking the sequences can take more than the user asked for."""
        asked = self.sampling.num_logprobs
        if self.beam_search is not None:
            return max(asked or 0, self.beam_search.num_candidates)
        return (asked or 0) if self.is_ranked else asked

    @property
    def is_ranked(self) -> bool:
        """Whether the sequences to return are chosen at the end: beam search, or best_of above n."""
        return self.beam_search is not None or self.params.num_sequences > self.params.n

    @property
    def outputs(self) -> list[Sequence]:
        """The sequences to report; empty for a ranked request until it has finished."""
        return self.sequences if self.finished or not self.is_ranked else []

    def rewind(self) -> None:
        """Go back to before the fork, after all blocks are freed: the prompt is computed once for all sequences."""
        self.forked = len(self.live) == 1

    def finish(self) -> None:
        """Mark the request finished, and of ranked sequences keep the `n` best, the best one first."""
        self.status = RequestStatus.FINISHED
        if not self.is_ranked:
            return
        if self.beam_search is not None:
            self.sequences = self.beam_search.ranked(self.sequences)
        else:
            self.sequences = sorted(self.sequences, key=lambda seq: -seq.cumulative_logprob)
        del self.sequences[self.params.n :]
        for index, seq in enumerate(self.sequences):
            seq.index = index


class Sequence:
    """The tokens of a prompt and its continuation, and the KV blocks that hold them.

    K/V of positions `[0, num_computed)` is in the cache. K/V of the last token is computed in the step that samples the
    next one. `index` is the sequence's number within its request. `seed` determines its samples; the first sequence
    has the request's seed.
    """

    def __init__(self, request: Request, seq_id: int, index: int, token_ids: list[int] | None = None) -> None:
        self.request = request
        self.seq_id = seq_id
        self.index = index
        self.seed = request.seed if index == 0 else hash((request.seed, index))
        self.token_ids = list(request.prompt_token_ids if token_ids is None else token_ids)
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.cumulative_logprob = 0.0  # of the output tokens, where logprobs are computed
        self.logprobs: list[TokenLogprobs] = []  # one per output token, where logprobs are computed
        self.num_computed = 0
        self.block_table: list[int] = []
        self.layerwise: LayerwisePrefill | None = None  # the part of the prompt in layer-by-layer prefill
        self.layerwise_done = 0  # (layer, chunk) pairs of it that are computed; num_computed changes after the last one
        self.block_hashes: list[bytes] = []  # of its full blocks, as far as they were needed
        self.found_prefix: list[int] = []  # blocks that the prefix cache found, see PrefixCache.find
        self.prefix_age = -1
        grammar = request.sampling.grammar
        self.grammar = grammar.start() if grammar is not None else None  # how much of the output it has read
        self._output_array = token_array()

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def params(self) -> SamplingParams:
        return self.request.params

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def ended_by_token(self) -> bool:
        """Whether its last token is an end token."""
        return self.finish_reason == "stop" and not isinstance(self.stop_reason, str)

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def end(self) -> int:
        """Tokens to compute before the sequence samples; before the fork only those of the prompt."""
        return len(self.token_ids) if self.request.forked else self.prompt_len

    @property
    def num_remaining(self) -> int:
        """Tokens still to compute before the next one can be sampled; at least 1 while it runs."""
        return self.end - self.num_computed

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.prompt_len :]

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.prompt_len

    @property
    def num_cacheable(self) -> int:
        """Tokens that may come from the prefix cache.

        The last token must be computed to sample from it, and so must tokens whose prompt logprobs are still missing.
        """
        known = len(self.request.prompt_logprobs)
        missing = self.request.sampling.num_prompt_logprobs is not None and known < self.prompt_len - 1
        return known if missing else self.end - 1

    def output_array(self) -> array[int]:
        """The output tokens as an array that grows with the sequence; callers must not change it."""
        self._output_array.extend(self.token_ids[self.prompt_len + len(self._output_array) :])
        return self._output_array

    def num_blocks(self, block_size: int) -> int:
        """Blocks that hold all tokens up to its `end`."""
        return -(-self.end // block_size)

    def fork(self) -> Sequence:
        """A new sequence with the same tokens and no blocks."""
        child = Sequence(self.request, next(self.request.seq_ids), self.index, self.token_ids)
        child.cumulative_logprob, child.logprobs = self.cumulative_logprob, list(self.logprobs)
        return child

    def append(self, sample: Sample) -> None:
        self.token_ids.append(sample.token_id)
        if sample.logprobs is not None:
            self.logprobs.append(sample.logprobs)
            self.cumulative_logprob += sample.logprobs.logprob
