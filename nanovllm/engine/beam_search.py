"""Beam search as Transformers does it (`GenerationMixin._beam_search`, version 5), as a pure function of scores.

A step ranks all continuations of all beams by cumulative log-probability and looks at the best `num_candidates`, so
many that `width` of them do not end. Those that end among the best `width` are finished; the best `width` of the
others go on. A finished beam scores cumulative log-probability / length ** length_penalty, where length counts the
generated tokens, the end token among them. The best `width` finished beams are kept.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, Protocol, TypeVar


class Ranked(Protocol):
    """A sequence as far as it is ranked."""

    cumulative_logprob: float

    @property
    def num_output_tokens(self) -> int: ...


T = TypeVar("T", bound=Ranked)


@dataclass(frozen=True, slots=True)
class BeamRow:
    """A beam, and its most likely next tokens, the most likely first."""

    cumulative_logprob: float
    top_token_ids: Sequence[int]
    top_logprobs: Sequence[float]


@dataclass(frozen=True, slots=True)
class Candidate:
    """One token after one beam. `rank` counts from 0, within that beam's tokens."""

    beam: int
    rank: int
    token_id: int
    logprob: float
    cumulative_logprob: float
    is_end: bool


@dataclass(frozen=True, slots=True)
class Expansion:
    """What a step makes of its beams, each list best first."""

    running: list[Candidate]
    finished: list[Candidate]


class BeamSearch(Generic[T]):
    """One request's search. `results`: the best finished beams so far, as (score, beam), the best first."""

    def __init__(
        self,
        width: int,
        max_length: int,
        end_token_ids: Collection[int],
        length_penalty: float = 1.0,
        early_stopping: bool | Literal["never"] = False,
        min_length: int = 0,
        banned_before_min_length: Collection[int] = (),
        vocab_size: int | None = None,
    ) -> None:
        """Lengths count generated tokens; `banned_before_min_length` cannot be one of the first `min_length`."""
        self.width = width
        self.max_length = max_length
        self.end_token_ids = frozenset(end_token_ids)
        self.length_penalty = length_penalty
        self.early_stopping = early_stopping
        self.min_length = min_length
        self.banned = frozenset(banned_before_min_length)
        wanted = max(2, 1 + len(self.end_token_ids | self.banned)) * width
        self.num_candidates = wanted if vocab_size is None else min(wanted, vocab_size)
        self.results: list[tuple[float, T]] = []

    def score(self, cumulative_logprob: float, length: int) -> float:
        """cumulative_logprob / length ** length_penalty."""
        try:
            return cumulative_logprob / length**self.length_penalty
        except OverflowError:  # divided by more than a float holds
            return -0.0
        except ZeroDivisionError:  # by less
            return -math.inf if cumulative_logprob else 0.0

    def expand(self, beams: Sequence[BeamRow], length: int) -> Expansion:
        """The next step, in which each beam becomes `length` tokens long."""
        banned = self.banned if length <= self.min_length else frozenset[int]()
        candidates = [
            Candidate(index, rank, token, logprob, beam.cumulative_logprob + logprob, self._ends(token, length))
            for index, beam in enumerate(beams)
            for rank, (token, logprob) in enumerate(zip(beam.top_token_ids, beam.top_logprobs, strict=True))
            if token not in banned
        ]
        best = heapq.nsmallest(self.num_candidates, candidates, key=lambda c: -c.cumulative_logprob)
        running = [candidate for candidate in best if not candidate.is_end][: self.width]
        return Expansion(running, [candidate for candidate in best[: self.width] if candidate.is_end])

    def keep(self, beam: T) -> None:
        """A beam has finished."""
        self.results.append((self.score(beam.cumulative_logprob, beam.num_output_tokens), beam))
        self.results.sort(key=lambda result: -result[0])
        del self.results[self.width :]

    def has_ended(self, running: Sequence[Candidate], length: int) -> bool:
        """Whether the search is over once the finished beams of `length` tokens are kept and `running` go on."""
        if not running:
            return True
        if len(self.results) < self.width:
            return False
        if self.early_stopping is True:
            return True
        # The best that a running beam can still score; with "never" this is a bound, otherwise a guess.
        bounded = self.early_stopping == "never" and self.length_penalty > 0
        best = self.score(running[0].cumulative_logprob, self.max_length if bounded else length)
        return best <= self.results[-1][0]

    def ranked(self, unfinished: Sequence[T]) -> list[T]:
        """The finished beams and, of a search that was cut off, its `unfinished` ones; the best first."""
        cut_off = [(self.score(beam.cumulative_logprob, max(beam.num_output_tokens, 1)), beam) for beam in unfinished]
        return [beam for _, beam in sorted([*self.results, *cut_off], key=lambda result: -result[0])]

    def _ends(self, token: int, length: int) -> bool:
        return token in self.end_token_ids or length == self.max_length
