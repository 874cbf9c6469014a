"""The drafter of speculative decoding by n-grams, also called prompt lookup."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from nanovllm.engine.request import Sequence
from nanovllm.features.speculation.acceptance import Acceptance
from nanovllm.features.speculation.lengths import PassCosts, draft_length
from nanovllm.features.speculation.ngrams import NgramIndex


@dataclass(slots=True)
class Drafting:
    """What the drafter keeps of one sequence."""

    index: NgramIndex
    acceptance: Acceptance = field(default_factory=Acceptance)


class NgramDrafter:
    """Drafts what followed the same tokens before, in the prompt or the output. See `hook.Drafter`."""

    def __init__(self, least: int, most: int) -> None:
        """least, most: tokens of the n-grams that are looked up."""
        self._sizes = least, most
        self._costs = PassCosts()

    def begin_step(self, wanted: Seq[tuple[Sequence, int]], most: int, rows: int, tokens: int) -> None:
        """Each sequence is drafted by itself."""

    def draft(self, seq: Sequence, most: int, rows: int, tokens: int) -> Seq[int]:
        state = self._state(seq)
        guesses = state.index.follow(seq.token_ids, most)
        if not guesses or state.acceptance.is_paused():
            return []
        length = draft_length(state.acceptance.share, len(guesses), rows, tokens, self._costs.share)
        if not length:
            state.acceptance.begin_pause()
        return guesses[:length]

    def computed(self, seq: Sequence, begin: int, end: int) -> None:
        """What is drafted depends on tokens alone."""

    def verified(self, seq: Sequence, drafted: int, accepted: int) -> None:
        state = self._state(seq)
        state.acceptance.verified(drafted, accepted)
        state.index.verified(accepted)

    def measured(self, rows: int, seconds: float) -> None:
        self._costs.add(rows, seconds)

    def close(self) -> None:
        """It holds nothing but memory."""

    def _state(self, seq: Sequence) -> Drafting:
        if self not in seq.ext:
            seq.ext[self] = Drafting(NgramIndex(*self._sizes))
        state: Drafting = seq.ext[self]
        return state
