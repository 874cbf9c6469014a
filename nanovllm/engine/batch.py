"""What passes between the engine and the runner: plain data, picklable both ways."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from nanovllm.kvcache.hybrid_manager import BlockMove
from nanovllm.kvcache.prefill_plan import SpanSlice


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """How the next token of one sequence is drawn; a pure function of these fields and the logits.

    `index` counts the tokens already generated, so that (seed, index) names one random draw of one request, whatever
    was preempted or recomputed in between. temperature 0 is greedy; top_k 0 is off.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    index: int


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """One sequence's share of a step: compute `token_ids` at positions [context_len, context_len + len(token_ids)).

    With a `span`, whose tokens these are, the step computes only those of its units; without, all layers.
    """

    seq_id: int
    token_ids: Sequence[int]
    context_len: int
    prompt_len: int
    block_table: Sequence[int]  # places, covering every position up to the last computed one
    sampling: SamplingRow | None  # None while the prompt is not yet complete
    span: SpanSlice | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """One step: first the block moves, in order, then one forward pass over all sequences.

    At most one of them is in the middle of a span; it is the last, and its units run after the others' pass.
    """

    sequences: Sequence[ScheduledSequence]
    moves: Sequence[BlockMove] = ()

    @property
    def whole(self) -> Sequence[ScheduledSequence]:
        """Those that go through all layers."""
        return self.sequences if self.span is None else self.sequences[:-1]

    @property
    def span(self) -> ScheduledSequence | None:
        """The one that goes layer by layer."""
        return self.sequences[-1] if self.sequences and self.sequences[-1].span is not None else None

    @property
    def num_tokens(self) -> int:
        """Tokens that go through all layers."""
        return sum(len(s.token_ids) for s in self.whole)


@dataclass(frozen=True, slots=True)
class StepResult:
    """Per scheduled sequence, in batch order: the sampled token (None if none was due), KV bytes moved each way."""

    token_ids: Sequence[int | None]
    h2d_bytes: Sequence[int]
    d2h_bytes: Sequence[int]


class Executor(Protocol):
    """Runs batches. The engine knows nothing else about tensors, devices or processes."""

    def execute(self, batch: Batch) -> StepResult: ...

    def close(self) -> None: ...
