"""The drafter of speculative decoding by n-grams, also called prompt lookup."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from nanovllm.engine.request import Sequence
from nanovllm.features.speculation.lengths import PassCosts, draft_length
from nanovllm.features.speculation.ngrams import NgramIndex

FORGET = 0.8  # weight of what was verified one step earlier
FIRST_RIGHT, FIRST_TRIED = 1.5, 2.0  # what a new sequence is taken to have seen
LONGEST_PAUSE = 128  # steps


@dataclass(slots=True)
class Drafting:
    """What the drafter keeps of one sequence.

    right, tried: drafts so far, weighted; the acceptance is their quotient. pause: how many steps with a match go
    without drafts when they do not pay, doubled each time. waits: what is left of one.
    """

    index: NgramIndex
    right: float = FIRST_RIGHT
    tried: float = FIRST_TRIED
    pause: int = 1
    waits: int = 0

    def verified(self, drafted: int, accepted: int) -> None:
        """Count the drafts of a step; none after the first wrong one was tried."""
        self.right = FORGET * self.right + accepted
        self.tried = FORGET * self.tried + accepted + (accepted < drafted)
        if accepted == drafted:
            self.pause = 1

    def is_paused(self) -> bool:
        """Whether this step has no drafts. After a pause they are tried as at the start."""
        if self.waits:
            self.waits -= 1
            if not self.waits:
                self.right, self.tried = FIRST_RIGHT, FIRST_TRIED
            return True
        return False

    def begin_pause(self) -> None:
        self.waits = self.pause
        self.pause = min(2 * self.pause, LONGEST_PAUSE)


class NgramDrafter:
    """Drafts what followed the same tokens before, in the prompt or the output. See `engine.scheduler.Drafter`."""

    def __init__(self, least: int, most: int) -> None:
        """least, most: tokens of the n-grams that are looked up."""
        self._sizes = least, most
        self._costs = PassCosts()

    def draft(self, seq: Sequence, most: int, rows: int, tokens: int) -> Seq[int]:
        state = self._state(seq)
        found = state.index.follow(seq.token_ids, most)
        if not found or state.is_paused():
            return []
        length = draft_length(state.right / state.tried, len(found), rows, tokens, self._costs.share)
        if not length:
            state.begin_pause()
        return found[:length]

    def verified(self, seq: Sequence, drafted: int, accepted: int) -> None:
        self._state(seq).verified(drafted, accepted)

    def measured(self, rows: int, seconds: float) -> None:
        self._costs.add(rows, seconds)

    def _state(self, seq: Sequence) -> Drafting:
        if not isinstance(seq.drafting, Drafting):
            seq.drafting = Drafting(NgramIndex(*self._sizes))
        return seq.drafting
