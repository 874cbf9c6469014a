"""Beam search in rounds: each computes one token of every beam and keeps the best continuations.

The engine knows nothing of it. A beam of a round is a request of its own that generates one token. What it shares with
the beams of earlier rounds is in the prefix cache, but for the tokens after its last whole hash block, which each round
computes again. The search is that of Transformers' `GenerationMixin`.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence as Seq
from collections.abc import Set
from dataclasses import dataclass, field, replace
from typing import Literal

from nanovllm.data.batch import TokenLogprobs
from nanovllm.engine.request import Request, RequestStatus, Sequence
from nanovllm.engine.scheduling_budget import SchedulerLimits
from nanovllm.outputs import RequestOutput, RequestOutputKind
from nanovllm.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Beam:
    """A continuation of the prompt."""

    token_ids: list[int] = field(default_factory=list)  # generated ones
    cumulative_logprob: float = 0.0
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # of each token
    is_end: bool = False  # no token follows


@dataclass(frozen=True, slots=True)
class Candidate:
    """A running beam continued by one token."""

    beam: int  # its index
    rank: int  # of the token among the beam's most likely ones, from 0
    token_id: int
    logprob: float
    cumulative_logprob: float
    is_end: bool


@dataclass
class BeamSearch:
    """The state of a search, and its rules. Lengths count generated tokens."""

    width: int
    max_length: int
    end_token_ids: Set[int]
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    min_length: int = 0  # none of the first tokens is one of banned_before_min_length
    banned_before_min_length: Set[int] = frozenset()
    vocab_size: int | None = None
    running: list[Beam] = field(default_factory=lambda: [Beam()])  # none when the search has ended
    results: list[tuple[float, Beam]] = field(default_factory=list)  # the best finished beams by score, best first

    @property
    def num_candidates(self) -> int:
        """The most likely tokens that `advance` needs of each beam: enough for `width` of them not to be ends."""
        wanted = max(2, 1 + len(self.end_token_ids | self.banned_before_min_length)) * self.width
        return wanted if self.vocab_size is None else min(wanted, self.vocab_size)

    def advance(self, tops: Seq[TokenLogprobs]) -> None:
        """Continue the search by one token. tops: the most likely next tokens of each running beam."""
        best = self._candidates(tops)
        going_on = [candidate for candidate in best if not candidate.is_end][: self.width]
        for candidate in best[: self.width]:
            if candidate.is_end:
                self._keep(self._continued(candidate, tops))
        self.running = [] if self._has_ended(going_on) else [self._continued(candidate, tops) for candidate in going_on]

    def ranked(self) -> list[Beam]:
        """The finished beams and, of a search that was cut short, the running ones; best first."""
        cut_off = [(self._score(beam.cumulative_logprob, max(len(beam.token_ids), 1)), beam) for beam in self.running]
        return [beam for _, beam in sorted([*self.results, *cut_off], key=lambda result: -result[0])]

    def _candidates(self, tops: Seq[TokenLogprobs]) -> list[Candidate]:
        """The best continuations of the running beams, best first."""
        length = len(self.running[0].token_ids) + 1
        is_last = length == self.max_length
        banned = self.banned_before_min_length if length <= self.min_length else frozenset[int]()
        candidates = [
            Candidate(
                index, rank, token, logprob, beam.cumulative_logprob + logprob, is_last or token in self.end_token_ids
            )
            for index, (beam, top) in enumerate(zip(self.running, tops, strict=True))
            for rank, (token, logprob) in enumerate(zip(top.top_token_ids, top.top_logprobs, strict=True))
            if token not in banned
        ]
        return heapq.nsmallest(self.num_candidates, candidates, key=lambda candidate: -candidate.cumulative_logprob)

    def _continued(self, candidate: Candidate, tops: Seq[TokenLogprobs]) -> Beam:
        beam = self.running[candidate.beam]
        logprobs = replace(tops[candidate.beam], logprob=candidate.logprob, rank=candidate.rank + 1)
        return Beam(
            [*beam.token_ids, candidate.token_id],
            candidate.cumulative_logprob,
            [*beam.logprobs, logprobs],
            candidate.is_end,
        )

    def _keep(self, beam: Beam) -> None:
        """Add a finished beam to the results, if it is good enough."""
        self.results.append((self._score(beam.cumulative_logprob, len(beam.token_ids)), beam))
        self.results.sort(key=lambda result: -result[0])
        del self.results[self.width :]

    def _has_ended(self, going_on: Seq[Candidate]) -> bool:
        """Whether the search ends, given the candidates that would go on."""
        if not going_on:
            return True
        if len(self.results) < self.width:
            return False
        if self.early_stopping is True:
            return True
        # The best score that a running beam can reach: a bound with "never", otherwise an estimate.
        is_bound = self.early_stopping == "never" and self.length_penalty > 0
        length = self.max_length if is_bound else len(self.running[0].token_ids) + 1
        return self._score(going_on[0].cumulative_logprob, length) <= self.results[-1][0]

    def _score(self, cumulative_logprob: float, length: int) -> float:
        """cumulative_logprob / length ** length_penalty."""
        try:
            return cumulative_logprob / length**self.length_penalty
        except OverflowError:  # length**penalty is too large for a float
            return -0.0
        except ZeroDivisionError:  # length**penalty underflows to 0
            return -math.inf if cumulative_logprob else 0.0


class SearchedRequest:
    """A request with use_beam_search: the requests of its rounds, and in the end its sequences."""

    def __init__(self, request: Request, limits: SchedulerLimits, vocab_size: int) -> None:
        params = request.params
        most_tokens = max(1, limits.max_model_len - request.prompt_len)
        ends = {token for token in limits.eos_token_ids if token < vocab_size}
        self.request = request
        self.search = BeamSearch(
            width=params.num_sequences,
            max_length=min(params.max_tokens or most_tokens, most_tokens),
            end_token_ids={*params.stop_token_ids, *(() if params.ignore_eos else ends)},
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
            min_length=params.min_tokens,
            banned_before_min_length={*params.stop_token_ids, *ends} if params.min_tokens else frozenset(),
            vocab_size=vocab_size,
        )
        self.round: list[Request] = []  # a request for each running beam
        self._num_rounds = 0

    def next_round(self) -> list[Request]:
        """The requests that compute the next token of each running beam."""
        request = self.request
        is_first = self._num_rounds == 0
        sampling = replace(
            request.sampling,
            num_logprobs=max(request.sampling.num_logprobs or 0, self.search.num_candidates),
            num_prompt_logprobs=request.sampling.num_prompt_logprobs if is_first else None,
        )
        params = SamplingParams(
            temperature=0.0, max_tokens=1, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
        )
        self.round = [
            Request(
                f"{request.request_id}, round {self._num_rounds}, beam {index}",
                [*request.prompt_token_ids, *beam.token_ids],
                params,
                number=request.number,
                seq_ids=request.seq_ids,
                seed=request.seed,
                arrival_time=request.metrics.arrival_time,
                priority=request.priority,
                cache_salt=request.cache_salt,
                sampling=sampling,
                ext=dict(request.ext),
            )
            for index, beam in enumerate(self.search.running)
        ]
        self._num_rounds += 1
        return self.round

    def end_round(self) -> None:
        """Continue the search with what the round's requests have computed. All of them have ended."""
        self._count_round()
        self.search.advance([request.sequences[0].logprobs[0] for request in self.round])
        if not self.search.running:
            self._end()

    def cut(self, reason: str, output: RequestOutput | None = None) -> None:
        """End the search early, after the round's requests. output: of the one that failed, whose error it gets."""
        self._count_round()
        if output is not None:
            self.request.error = output.error
            self.request.step_failed = output.step_failed
        self._end(reason)

    def _count_round(self) -> None:
        """Add what the round's requests took to the metrics of the request."""
        if self._num_rounds == 1:
            self.request.metrics = self.round[0].metrics
            self.request.prompt_logprobs = self.round[0].prompt_logprobs
            return
        total = self.request.metrics
        for metrics in (request.metrics for request in self.round):
            total.decode_tokens += metrics.first_token_time is not None
            total.preemptions += metrics.preemptions
            total.swaps += metrics.swaps
            total.h2d_bytes += metrics.h2d_bytes
            total.d2h_bytes += metrics.d2h_bytes
            total.finished_time = max(total.finished_time or 0.0, metrics.finished_time or 0.0)

    def _end(self, reason: str | None = None) -> None:
        """Make the best beams the sequences of the request, which ends. reason: of beams that are cut off."""
        request = self.request
        best = self.search.ranked()[: request.params.n]
        request.sequences = [self._sequence(index, beam, reason) for index, beam in enumerate(best)]
        request.status = RequestStatus.FINISHED

    def _sequence(self, index: int, beam: Beam, reason: str | None) -> Sequence:
        seq = Sequence(self.request, next(self.request.seq_ids), index)
        seq.token_ids += beam.token_ids
        seq.cumulative_logprob = beam.cumulative_logprob
        seq.logprobs = beam.logprobs
        if not beam.is_end:
            seq.finish_reason = reason
            return seq
        last = beam.token_ids[-1]
        seq.finish_reason = "stop" if last in self.search.end_token_ids else "length"
        if last in self.request.params.stop_token_ids:
            seq.stop_reason = last
        return seq
