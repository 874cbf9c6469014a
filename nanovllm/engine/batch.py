"""What passes between the engine and the runner: plain data, picklable both ways."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from nanovllm.kvcache.hybrid_manager import BlockMove
from nanovllm.kvcache.prefill_plan import LayerwiseStep


def token_array(token_ids: Iterable[int] = ()) -> array[int]:
    """Token ids in the compact form in which they travel: pickled and joined as bytes, never looked at one by one."""
    return array("q", token_ids)


@dataclass(frozen=True, slots=True)
class LogitAdjustments:
    """What changes in a row's logits before its token is chosen; penalties of 1, 0 and 0 change nothing.

    banned: tokens that cannot be chosen. biased, biases: tokens and what is added to their logits.
    prompt_tokens: the distinct tokens of the prompt, output_tokens: all generated tokens; given as far as penalties
    need them.
    """

    banned: array[int] = field(default_factory=token_array)
    biased: array[int] = field(default_factory=token_array)
    biases: array[float] = field(default_factory=lambda: array("d"))
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    prompt_tokens: array[int] = field(default_factory=token_array)
    output_tokens: array[int] = field(default_factory=token_array)


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """How the next token of one sequence is drawn; a pure function of these fields and the logits.

    `index` counts the tokens already generated, so that (seed, index) names one random draw of one sequence, whatever
    was preempted or recomputed in between. temperature 0 is greedy; top_k 0 is off. `num_logprobs`: how many of the
    most likely tokens are reported beside the chosen one, at most the whole vocabulary; None reports nothing.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    index: int
    num_logprobs: int | None = None
    adjustments: LogitAdjustments | None = None


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
class PromptTargets:
    """Rows of a sequence's share whose next token is of the prompt and has its log-probability reported.

    Row `first_row + i` is followed by `token_ids[i]`; `num_logprobs` as in SamplingRow.
    """

    first_row: int
    token_ids: Sequence[int]
    num_logprobs: int


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """One sequence's share of a step: compute `token_ids` at positions [context_len, context_len + len(token_ids)).

    `samples`: the tokens to draw from the last row's logits; none while the prompt is not complete, several where
    sequences that share the prompt begin. With a `span`, whose tokens these are, the step computes only those of its
    units; without, all layers.
    """

    seq_id: int
    token_ids: Sequence[int]
    context_len: int
    prompt_len: int
    block_table: Sequence[int]  # places, covering every position up to the last computed one
    samples: Sequence[SamplingRow] = ()
    prompt_targets: PromptTargets | None = None
    layerwise: LayerwiseStep | None = None


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
        return self.sequences if self.layerwise is None else self.sequences[:-1]

    @property
    def layerwise(self) -> ScheduledSequence | None:
        """The one that goes layer by layer."""
        return self.sequences[-1] if self.sequences and self.sequences[-1].layerwise is not None else None

    @property
    def num_tokens(self) -> int:
        """Tokens that go through all layers."""
        return sum(len(s.token_ids) for s in self.whole)


@dataclass(frozen=True, slots=True)
class StepResult:
    """Per scheduled sequence, in batch order: what was drawn for its `samples`, KV bytes moved each way.

    prompt_logprobs: of each sequence's `prompt_targets`; empty when no sequence has any. errors: what is wrong with the
    numbers of a sequence, by its index; what was drawn for it means nothing.
    """

    samples: Sequence[Sequence[Sample]]
    h2d_bytes: Sequence[int]
    d2h_bytes: Sequence[int]
    prompt_logprobs: Sequence[Sequence[TokenLogprobs]] = ()
    errors: Mapping[int, str] = field(default_factory=dict)


class Executor(Protocol):
    """Runs batches. The engine knows nothing else about tensors, devices or processes."""

    def execute(self, batch: Batch) -> StepResult: ...

    def close(self) -> None: ...
