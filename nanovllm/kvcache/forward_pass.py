"""One way of taking the sequences of a step through the layers, and what features add to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from nanovllm.data.batch import Batch, ScheduledSequence
from nanovllm.kvcache.base import StepTraffic
from nanovllm.layers.forward_context import ForwardContext
from nanovllm.ops.attention import SequenceMetadata


@dataclass(frozen=True, slots=True)
class ComputedRows:
    """Hidden states of sequences after the final norm."""

    hidden: Tensor  # [rows, hidden]
    sequences: Sequence[ScheduledSequence]
    # The first row of each sequence. `start + len(token_ids) - 1` is always its last row, from which it samples: a pass
    # that keeps only the last row of a sequence gives a start before the first row.
    starts: Sequence[int]
    # The most likely token of each row, or NOT_FINITE, faster than from the logits. Call it last, since it may
    # overwrite `hidden`.
    likeliest: Callable[[], Sequence[int]] | None = None


@dataclass(frozen=True, slots=True)
class FlatBatch:
    """The sequences of a step that go through the layers chunk by chunk, one after the other."""

    inputs: Tensor  # int64 [2, rows] on the host: token ids and positions
    sequences: tuple[SequenceMetadata, ...]
    scheduled: Sequence[ScheduledSequence]


class ForwardPass(Protocol):
    """Computes those sequences of a batch that go through the layers in this way.

    In each step the runner calls `begin_step` of its passes, then `run` of those that take part, both in one fixed
    order.
    """

    def begin_step(self, batch: Batch) -> StepTraffic | None:
        """Start the step's loads. Returns the KV bytes that each of its sequences moves, or None if it has none."""
        ...

    def run(self, on_attend: Callable[[int], None] | None) -> ComputedRows:
        """Compute the step. on_attend: called before each layer's attention, with the number of its tokens."""
        ...

    def abandon_step(self) -> None:
        """The step failed: make the pass usable for the next one."""
        ...


class PassHook:
    """What a feature adds to the passes of a step. By default each method changes nothing."""

    def begin_step(self, batch: Batch) -> Mapping[int, str]:
        """A step begins. Returns why sequences of the batch cannot be computed, by their index."""
        return {}

    def extended(self, context: ForwardContext, rows: Sequence[tuple[ScheduledSequence, int]]) -> ForwardContext:
        """The inputs of a pass with what the feature adds. rows: the sequences of the pass, each with its rows."""
        return context

    def computed(self, rows: ComputedRows) -> None:
        """A pass has computed rows, which stay valid until the next step."""


def with_hooks(
    hooks: Sequence[PassHook], context: ForwardContext, rows: Sequence[tuple[ScheduledSequence, int]]
) -> ForwardContext:
    """The inputs of a pass with what all hooks add; see `PassHook.extended`."""
    for hook in hooks:
        context = hook.extended(context, rows)
    return context
