"""Speculative decoding in the steps of the engine: guesses of what follows are computed with what is known.

A step computes a decoding sequence's last token and, after it, drafted tokens. The executor draws a token after each of
them, as long as the draws are the drafts: these were right, and the draw after the last right one follows them.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Protocol

from nanovllm.data.batch import Batch, Sample, ScheduledSequence
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.metrics import DraftStats, EngineMetrics
from nanovllm.engine.request import Request, Sequence
from nanovllm.engine.scheduling_budget import SchedulerLimits, SchedulingBudget
from nanovllm.engine.step_hook import StepHook
from nanovllm.features.recurrent.states import RecurrentStates


class Drafter(Protocol):
    """Guesses what follows. A wrong guess costs time, and changes no output."""

    def begin_step(self, wanted: Seq[tuple[Sequence, int]], most: int, rows: int, tokens: int) -> None:
        """Called once a step, before `draft` is called for these sequences, each with at most so many tokens.

        most: tokens of all of them together. rows, tokens: that the step computes and generates without drafts.
        """
        ...

    def draft(self, seq: Sequence, most: int, rows: int, tokens: int) -> Seq[int]:
        """At most `most` token ids of the model that may follow, or none.

        rows, tokens: that the step computes and generates without them.
        """
        ...

    def computed(self, seq: Sequence, begin: int, end: int) -> None:
        """A step has computed these positions of a sequence that may have drafts; right drafts count."""
        ...

    def verified(self, seq: Sequence, drafted: int, accepted: int) -> None:
        """A step has accepted the first `accepted` of `drafted` tokens."""
        ...

    def measured(self, rows: int, seconds: float) -> None:
        """A step of decoding sequences took so long."""
        ...

    def close(self) -> None:
        """Release what it holds. Safe to call twice."""
        ...


class Speculation(StepHook):
    """Adds drafts to the sequences of a step, as far as nothing else takes its tokens and blocks.

    `Request.ext` has True for a request whose logits a draft has spoiled.
    """

    def __init__(
        self,
        drafter: Drafter,
        manager: BlockManager,
        limits: SchedulerLimits,
        most: int,
        states: RecurrentStates | None = None,
    ) -> None:
        """most: drafts of a sequence in a step. states: of a model with recurrent layers."""
        self.drafter = drafter
        self.stats = DraftStats()
        self._manager = manager
        self._limits = limits
        self._most = most
        self._states = states
        self._drafts: dict[Sequence, Seq[int]] = {}  # of the step
        self._to_come: dict[Sequence, int] = {}  # samples of the step that are not yet appended

    # ---- what is drafted

    def planned(self, budget: SchedulingBudget) -> None:
        self._drafts = {}
        self._to_come = {}
        rows = sum(chunk for _, chunk in budget.chunks)
        tokens = len(budget.chunks)
        if budget.part is not None:  # it takes all that is left
            self.drafter.begin_step([], 0, rows, tokens)
            return
        left = min(budget.left, self._limits.max_num_seqs + self._most - tokens)
        if self._states is not None:  # before any is held, which takes a slot too
            for seq, _ in budget.chunks:
                self._states.own(seq)
            left = left if self._states.slots.has_room else 0
        drafting = ((seq, min(left, self._most_drafts(seq, chunk))) for seq, chunk in budget.chunks)
        wanted = [(seq, most) for seq, most in drafting if most > 0]
        self.drafter.begin_step(wanted, left, rows, tokens)
        for seq, most in wanted:
            drafted = self.drafter.draft(seq, min(left, most), rows, tokens) if left > 0 else ()
            drafted = drafted[: self._num_before_end(seq, drafted)]
            if count := self._look_ahead(seq, len(drafted)):
                self._drafts[seq] = drafted[:count]
                left -= count
                rows += count

    def _look_ahead(self, seq: Sequence, most: int) -> int:
        """Take the blocks of up to `most` drafts, and hold a copy of the state. Returns for how many there is room."""
        count = self._manager.num_ahead(seq, most)
        if count and self._states is not None and not self._states.hold(seq, count):
            return 0
        return self._manager.look_ahead(seq, count)

    def _most_drafts(self, seq: Sequence, chunk: int) -> int:
        """The most drafts that a sequence may have in a step that computes `chunk` of its tokens."""
        manager = self._manager
        if not self._takes_drafts(seq.request) or seq.num_output_tokens == 0 or not chunk == seq.num_remaining == 1:
            return 0
        most = min(self._most, self._limits.max_model_len - len(seq) - 1)
        if self._states is not None and manager.prefix_cache.enabled:  # it keeps states where hash blocks end
            most = min(most, -len(seq) % manager.prefix_cache.hash_block_size)
        return most if seq.params.max_tokens is None else min(most, seq.params.max_tokens - seq.num_output_tokens - 1)

    def _takes_drafts(self, request: Request) -> bool:
        """Whether its next tokens may be drafted. A logits processor may keep a state, and must see each token once."""
        return len(request.sequences) == 1 and not (request.sampling.processors or self in request.ext)

    def _num_before_end(self, seq: Sequence, drafts: Seq[int]) -> int:
        """How many drafts come before one that would end the sequence."""
        ends = set(seq.params.stop_token_ids)
        if not seq.params.ignore_eos:
            ends |= self._limits.eos_token_ids
        return next((count for count, token in enumerate(drafts) if token in ends), len(drafts))

    def built(self, batch: Batch, sequences: list[Sequence]) -> None:
        for scheduled, seq in zip(batch.sequences, sequences, strict=True):
            if drafts := self._drafts.get(seq):
                self._add(scheduled, seq, drafts)

    def _add(self, scheduled: ScheduledSequence, seq: Sequence, drafts: Seq[int]) -> None:
        scheduled.token_ids = [*scheduled.token_ids, *drafts]
        scheduled.num_drafts = len(drafts)
        scheduled.block_tables = self._manager.physical_ids(seq, seq.end + len(drafts))
        scheduled.samples = [seq.sampling_row(drafts[:count]) for count in range(len(drafts) + 1)]

    # ---- what was right

    def executed(self, batch: Batch, seconds: float) -> None:
        if all(len(scheduled.token_ids) == 1 + scheduled.num_drafts for scheduled in batch.sequences):
            self.drafter.measured(batch.num_tokens, seconds)

    def computed(self, seq: Sequence, begin: int, samples: Seq[Sample]) -> None:
        if seq in self._to_come:
            self._to_come[seq] -= 1
            self._count_accepted(seq, self._to_come[seq] > 0)
            return
        end = seq.num_computed
        if drafts := self._drafts.get(seq):
            if not samples:
                seq.request.ext[self] = True
            accepted = max(0, len(samples) - 1)
            end += accepted
            self._to_come[seq] = accepted
            self.drafter.verified(seq, len(drafts), accepted)
            self.stats.drafts += 1
            self.stats.drafted_tokens += len(drafts)
            seq.request.metrics.drafted_tokens += len(drafts)
            self._count_accepted(seq, accepted > 0)
        if self._takes_drafts(seq.request):
            self.drafter.computed(seq, begin, end)

    def _count_accepted(self, seq: Sequence, is_draft: bool) -> None:
        """Count the token that a sequence gets next, if it was drafted. Right drafts after the end do not count."""
        self.stats.accepted_tokens += is_draft
        seq.request.metrics.accepted_tokens += is_draft

    # ---- the end

    def count(self, metrics: EngineMetrics) -> None:
        metrics.drafts = replace(self.stats)

    def reset(self, sequences: Seq[Sequence]) -> None:
        self._drafts = {}
        self._to_come = {}

    def close(self) -> None:
        self.drafter.close()
