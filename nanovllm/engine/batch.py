"""What passes between the engine and the runner: plain data, picklable both ways."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from nanovllm.kvcache.hybrid_manager import BlockMove


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """How the next token of one sequence is drawn; a pure function of these fields and the logits.

    `index` counts the tokens already generated, so that (seed, index) names one random draw of one sequence, whatever
    was preempted or recomputed in between. temperature 0 is greedy; top_k 0 is off. `num_logprobs`: how many of the
    most likely tokens are reported beside the chosen one; None reports nothing.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    index: int
    num_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """One position: the chosen token's natural-log probability and rank (from 1), and the most likely tokens in order.

    Of the raw logits: before penalties, temperature and cuts.
    """

    logprob: float
    rank: int
    top_token_ids: Sequence[int]
    top_logprobs: Sequence[float]


@dataclass(frozen=True, slots=True)
class Sample:
    """A drawn token."""

    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """One sequence's share of a step: compute `token_ids` at positions [context_len, context_len + len(token_ids)).

    `samples`: the tokens to draw from the last row's logits; none while the prompt is not complete, several where
    sequences that share the prompt begin.
    """

    seq_id: int
    token_ids: Sequence[int]
    context_len: int
    prompt_len: int
    block_table: Sequence[int]  # places, covering every position up to the last computed one
    samples: Sequence[SamplingRow] = ()


@dataclass(frozen=True, slots=True)
class Batch:
    """One step: first the block moves, in order, then one forward pass over all sequences."""

    sequences: Sequence[ScheduledSequence]
    moves: Sequence[BlockMove] = ()

    @property
    def num_tokens(self) -> int:
        return sum(len(s.token_ids) for s in self.sequences)


@dataclass(frozen=True, slots=True)
class StepResult:
    """Per scheduled sequence, in batch order: what was drawn for its `samples`, KV bytes moved each way."""

    samples: Sequence[Sequence[Sample]]
    h2d_bytes: Sequence[int]
    d2h_bytes: Sequence[int]


class Executor(Protocol):
    """Runs batches. The engine knows nothing else about tensors, devices or processes."""

    def execute(self, batch: Batch) -> StepResult: ...

    def close(self) -> None: ...
