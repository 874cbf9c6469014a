"""Requests and their sequences: the state that the engine keeps between steps.

A `Request` has one sequence, or several that share a prompt (n, best_of). The first one computes the prompt for all;
then they fork, and from there on sample in the same steps.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import KW_ONLY, InitVar, dataclass, field, replace
from enum import Enum
from typing import Any, Protocol

from nanovllm.data.batch import (
    LogitAdjustments,
    LogitsProcessors,
    PromptTargets,
    Sample,
    SamplingRow,
    TokenLogprobs,
    token_array,
)
from nanovllm.data.kv_groups import HOLE, KVCapacity
from nanovllm.engine.branch_points import BranchPoints
from nanovllm.engine.resolved_sampling import ResolvedSampling
from nanovllm.errors import RequestError
from nanovllm.outputs import RequestMetrics
from nanovllm.sampling_params import SamplingParams, derived_seed


class RequestStatus(Enum):
    WAITING = "waiting"
    PENDING = "pending"  # it has its blocks, and waits for what they will hold
    RUNNING = "running"
    SWAPPED = "swapped"
    FINISHED = "finished"


class Pending(Protocol):
    """What a sequence that is admitted waits for: a hook fills its blocks beyond the prefix cache."""

    @property
    def num_tokens(self) -> int:
        """The last of its `num_computed` tokens, whose blocks are being filled."""
        ...

    @property
    def has_ended(self) -> bool: ...

    def succeeds(self) -> bool:
        """Asked once, when it has ended: whether the blocks hold everything."""
        ...

    def cancel(self) -> None:
        """End it: when this returns, nothing is written into the blocks any more."""
        ...


@dataclass(eq=False)
class Request:
    """A prompt, its sampling parameters, and the sequences that answer it."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    _: KW_ONLY
    number: int  # of the engine's requests, in the order in which they were made
    seq_ids: Iterator[int]  # yields a unique id for every sequence of the engine
    seed: int
    arrival_time: InitVar[float]
    priority: int = 0
    prompt: str | None = None
    cache_salt: bytes = b""
    sampling: ResolvedSampling = field(default_factory=ResolvedSampling)
    lora_request: object | None = None  # as it was given
    ext: dict[object, Any] = field(default_factory=dict)  # what step hooks keep of it, by hook
    status: RequestStatus = field(default=RequestStatus.WAITING, init=False)
    error: str | None = field(default=None, init=False)  # why it ended with finish_reason "error"
    step_failed: bool = field(default=False, init=False)  # a failed step ended it
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list, init=False)  # from the second prompt token on

    def __post_init__(self, arrival_time: float) -> None:
        self.metrics = RequestMetrics(arrival_time=arrival_time)
        # A search runs requests of its own, and makes the sequences in the end: see `features.beam_search`.
        count = 0 if self.params.use_beam_search else self.params.num_sequences
        self.sequences = [Sequence(self, next(self.seq_ids), index) for index in range(count)]
        # Each sequence has blocks of its own. Before that, the first one computes the prompt for all.
        self.forked = len(self.sequences) == 1

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
    def is_prefill(self) -> bool:
        """Whether any sequence has more to compute than the one token that it samples from."""
        return any(seq.num_remaining > 1 for seq in self.computing)

    # ---- what the scheduler asks

    @property
    def computing(self) -> list[Sequence]:
        """The sequences that the next step computes: the first live one before the fork, all live ones after it."""
        return self.live if self.forked else self.live[:1]

    @property
    def num_seqs(self) -> int:
        """Sequence slots that it takes while it runs."""
        return len(self.live)

    def chunks(
        self, tokens: int, longest: int, edge: int, limit: Callable[[Sequence, int], int]
    ) -> list[tuple[Sequence, int]]:
        """The sequences to compute in a step that has `tokens` tokens left, and how many tokens of each.

        Returns an empty list if the request does not fit the step. After a recompute each of several sequences stops
        before its last token until all of them have caught up.

        longest: most tokens of one sequence. edge: if the step computes a part of a prompt, the part ends at a multiple
        of it. limit: cuts a chunk of a sequence where it has to end.
        """
        sequences = self.computing
        if len(sequences) > 1 and not self.is_prefill:
            return [(seq, 1) for seq in sequences] if len(sequences) <= tokens else []
        held_back = len(sequences) > 1
        chunks: list[tuple[Sequence, int]] = []
        for seq in sequences:
            chunk = seq.num_remaining - held_back
            if min(tokens, longest) < chunk:
                chunk = min(tokens, longest)
                chunk = max(0, chunk - (seq.num_computed + chunk) % edge)
            chunk = limit(seq, chunk) if chunk > 1 else chunk
            if chunk > 0:
                chunks.append((seq, chunk))
                tokens -= chunk
        return chunks

    def num_extra_blocks(self, capacity: KVCapacity) -> int:
        """Blocks that a waiting request needs in addition to those of `computing[0]`.

        A new request needs no others. After a recompute it needs those of what each sequence has generated.
        """
        if self.forked:
            return 0
        generated = [len(seq) for seq in self.live if seq.num_output_tokens]
        held = capacity.most_shared_blocks(self.prompt_len, generated)
        return max(0, held - capacity.most_blocks(self.prompt_len))

    def check_fits(self, max_model_len: int, capacity: KVCapacity) -> None:
        """Raise RequestError if the cache cannot hold its sequences until they end.

        A single sequence always fits, since the scheduler refuses a max_model_len that does not.
        """
        count = self.params.num_sequences
        max_tokens = self.params.max_tokens
        longest = max_model_len if max_tokens is None else min(self.prompt_len + max_tokens, max_model_len)
        if count == 1 or (needed := self.most_blocks(longest, capacity)) <= capacity.available:
            return
        lengths = range(self.prompt_len + 2, longest)
        held = bisect_right(lengths, capacity.available, key=lambda length: self.most_blocks(length, capacity))
        raise RequestError(
            f"request {self.request_id!r} asks for {count} sequences of up to {longest} tokens, which can need "
            f"{needed} KV blocks of {capacity.groups.block_sizes} tokens; the cache has {capacity.num_blocks} and "
            f"keeps {capacity.watermark} free: lower max_tokens to {held + 1}, or n or best_of, or raise "
            "num_gpu_blocks or num_cpu_blocks"
        )

    def most_blocks(self, length: int, capacity: KVCapacity) -> int:
        """The most KV blocks that its sequences hold at once when each has `length` tokens, the prompt included.

        They share the full blocks of the prompt.
        """
        computed = max(length - 1, self.prompt_len)  # the K/V of a sequence's last token is never computed
        if computed == self.prompt_len:  # one token each: the sequences end before they fork
            return capacity.most_blocks(computed)
        return capacity.most_shared_blocks(self.prompt_len, [computed] * self.params.num_sequences)

    # ---- sampling

    @property
    def num_logprobs(self) -> int | None:
        """Log-probabilities that its samples must have. Ranking the sequences needs those of their tokens."""
        asked = self.sampling.num_logprobs
        return (asked or 0) if self.is_ranked else asked

    def sampled_from(self, seq: Sequence) -> Seq[Sequence]:
        """The sequences that sample their next token from the last row of `seq`.

        Before the fork these are all sequences, unless they have sampled before a preemption.
        """
        if self.params.max_tokens == 0:
            return []
        if self.forked:
            return [seq]
        return [] if seq.num_output_tokens else self.live

    def append_samples(self, samples: Seq[Sample], fork: Callable[[Sequence, Sequence], None]) -> None:
        """Append the samples of a step: none, or one per live sequence.

        fork: shares the blocks of its first argument with the second one. It is called once the prompt is computed.
        """
        if not self.forked and self.computing[0].num_remaining == 0:
            first, *others = self.live
            for seq in others:
                fork(first, seq)
            self.forked = True
        if samples:
            for seq, sample in zip(self.live, samples, strict=True):
                seq.append(sample)

    # ---- preemption and end

    def rewind(self) -> None:
        """Recompute from the beginning, the prompt once for all sequences, after all blocks have been freed."""
        self.forked = len(self.live) == 1

    @property
    def is_ranked(self) -> bool:
        """Whether the sequences to return are chosen at the end."""
        return self.params.use_beam_search or self.params.num_sequences > self.params.n

    @property
    def outputs(self) -> list[Sequence]:
        """The sequences to report now; none of a ranked request until it has finished."""
        return self.sequences if self.finished or not self.is_ranked else []

    def finish(self) -> None:
        """Mark the request finished, and of ranked sequences keep the `n` best, the best one first."""
        self.status = RequestStatus.FINISHED
        if self.is_ranked:
            ranked = sorted(self.sequences, key=lambda seq: -seq.cumulative_logprob)
            self.sequences = ranked[: self.params.n]
            for index, seq in enumerate(self.sequences):
                seq.index = index


@dataclass(slots=True)
class KnownPrefix:
    """What the prefix cache knows of a sequence, so that it does not look for the same again."""

    hashes: list[bytes] = field(default_factory=list)  # of the sequence's hash blocks, as far as they were needed
    blocks: list[list[int]] = field(default_factory=list)  # of each KV group the full blocks that were found last
    age: int = -1  # how many blocks the prefix cache had removed when it found them
    num_on_host: int = 0  # tokens that it had on the host when the sequence was admitted last
    branch_points: BranchPoints = field(default_factory=BranchPoints)  # before which it keeps windows
    lingering: list[tuple[Any, int]] = field(default_factory=list)  # see `KeptWindows`: blocks, and their index


class Sequence:
    """The tokens of a prompt and its continuation, and the KV blocks that hold them.

    The K/V of positions `[0, num_computed)` is in the cache. The K/V of the last token is computed in the step that
    samples the next one.
    """

    def __init__(self, request: Request, seq_id: int, index: int = 0) -> None:
        self.request = request
        self.seq_id = seq_id
        self.index = index  # within its request
        # It determines the samples. The first sequence has the request's seed.
        self.seed = derived_seed(request.seed, "sequence", index) if index else request.seed
        self.token_ids = list(request.prompt_token_ids)
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.cumulative_logprob = 0.0  # of the output tokens, where logprobs are computed
        self.logprobs: list[TokenLogprobs] = []  # one per output token, where logprobs are computed
        self.num_computed = 0
        self.num_ahead = 0  # tokens after its own that this step computes
        self.block_tables: list[list[int]] = []  # of each KV group, with HOLE for blocks not held; empty: no blocks
        self.first_held: list[int] = []  # of each KV group: all before this index are holes
        self.part_end = 0  # the end of the part of its prompt that a hook computes; 0: it is computed chunk by chunk
        self.prefix = KnownPrefix()
        self.pending: Pending | None = None  # what it waits for; num_computed counts it already
        self._output_array = token_array()
        self.ext: dict[object, Any] = {}  # what step hooks keep of it, by hook

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

    @property
    def blocks(self) -> list[int]:
        """The ids of the blocks that it holds."""
        return [block_id for table in self.block_tables for block_id in table if block_id != HOLE]

    def append(self, sample: Sample) -> None:
        self.token_ids.append(sample.token_id)
        if sample.logprobs is not None:
            self.logprobs.append(sample.logprobs)
            self.cumulative_logprob += sample.logprobs.logprob

    # ---- what the executor needs to sample its next token, and to score its prompt

    def sampling_row(self, ahead: Seq[int] = ()) -> SamplingRow:
        """How to sample the token after the tokens `ahead`, with which its output may go on."""
        sampling = self.request.sampling
        processors = None
        if sampling.processors:
            processors = LogitsProcessors(sampling.processors, self.request.prompt_token_ids, self.output_token_ids)
        return SamplingRow(
            **sampling.draw,
            seed=self.seed,
            index=self.num_output_tokens + len(ahead),
            num_logprobs=self.request.num_logprobs,
            adjustments=self._adjustments(ahead),
            mask=sampling.allowed,
            processors=processors,
        )

    def prompt_targets(self, chunk: int) -> PromptTargets | None:
        """The rows of its next `chunk` tokens that give missing prompt log-probabilities; None for none."""
        count = self.request.sampling.num_prompt_logprobs
        first = max(len(self.request.prompt_logprobs), self.num_computed)
        end = min(self.num_computed + chunk, self.prompt_len - 1)
        if count is None or first >= end:
            return None
        return PromptTargets(first - self.num_computed, self.token_ids[first + 1 : end + 1], count)

    def _adjustments(self, ahead: Seq[int]) -> LogitAdjustments | None:
        """Changes to the logits of the token after the tokens `ahead`; None for no change."""
        sampling = self.request.sampling
        banned = token_array()
        if self.num_output_tokens + len(ahead) < self.params.min_tokens:
            banned.extend(sampling.end_tokens)
        if sampling.bad_words:
            longest = max(map(len, sampling.bad_words))
            end_of_output = self.token_ids[max(self.prompt_len, len(self) - longest + 1) :]
            banned.extend(banned_tokens(sampling.bad_words, [*end_of_output, *ahead]))
        always = sampling.adjustments
        if not banned and not always.biased and not always.penalizes:
            return None
        output = self.output_array() + token_array(ahead) if always.penalizes else token_array()
        return replace(always, banned=banned, output_tokens=output)


def banned_tokens(bad_words: Seq[Seq[int]], output: Seq[int]) -> list[int]:
    """The last token of each bad word whose other tokens the output ends with. As in vLLM, the prompt is ignored."""
    banned = []
    for *beginning, last in bad_words:
        if len(beginning) <= len(output) and list(output[len(output) - len(beginning) :]) == beginning:
            banned.append(last)
    return banned
