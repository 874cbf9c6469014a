"""The drafter of speculative decoding by the model's own head for multi-token prediction.

The head has a KV cache of one layer, which is always resident. At position p of a sequence it reads the hidden state
that the model has computed there, and the token at p + 1. Its shadow of a sequence therefore begins with the second
token, and follows it from its prompt on. After the last token the head reads its own hidden state and its draft. What
it has computed of drafts it computes again from the model's hidden states.

Where the model takes tokens from a prefix cache there are no hidden states. If the head does not have the same tokens
in its own prefix cache, its shadow begins after them: it then sees less of the sequence.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence as Seq

from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.request import Sequence
from nanovllm.features.speculation.draft_model import DraftModel, Followed
from nanovllm.features.speculation.hidden_states import HiddenStates

MOST_HELD = 64  # hidden states of a sequence that wait for drafts to be wanted; then the head reads them in any case
ANY_SEQUENCE = -1  # in a salt: a shadow with all tokens is that of every sequence with them


class MTPDrafter(DraftModel):
    """Drafts with the model's head, for all sequences at once. See `hook.Drafter`."""

    def __init__(self, runner: ModelRunner, longest: int, hidden: HiddenStates) -> None:
        """runner: of the head, which reads `hidden`. longest: as of `DraftModel`."""
        super().__init__(runner, longest, runner.network.vocab_size)
        self._hidden = hidden

    def begin_step(self, wanted: Seq[tuple[Sequence, int]], most: int, rows: int, tokens: int) -> None:
        self._hidden.end_step(self._runner.device)
        super().begin_step(wanted, most, rows, tokens)

    def computed(self, seq: Sequence, begin: int, end: int) -> None:
        followed = self._followed.setdefault(seq.seq_id, Followed(seq))
        followed.can_follow &= len(seq) < self._longest
        if not followed.can_follow:
            self._let_go(followed)
        elif self._hidden.add(seq.seq_id, begin, end):
            super()._let_go(followed)

    def _behind(self, asked: Seq[Followed]) -> list[Followed]:
        others = [followed for followed in self._followed.values() if followed not in asked]
        return [other for other in others if len(self._hidden.held(other.seq.seq_id)) >= MOST_HELD]

    def _shadow(self, followed: Followed, asked: Seq[Followed]) -> Sequence | None:
        if not len(self._hidden.held(followed.seq.seq_id)):
            return None
        shadow = super()._shadow(followed, asked)
        if shadow is None:
            self._hidden.drop(followed.seq.seq_id)
        else:
            self._hidden.skip(shadow.seq_id, shadow.num_computed)  # what a new one has from the prefix cache
        return shadow

    def _advance(self, shadow: Sequence, before: int) -> None:
        super()._advance(shadow, before)
        self._hidden.skip(shadow.seq_id, shadow.num_computed)

    def _new_shadow(self, followed: Followed) -> Sequence:
        held = self._hidden.held(followed.seq.seq_id)
        followed.first = 1
        followed.salt = struct.pack("<qq", ANY_SEQUENCE, followed.seq.token_ids[0])
        shadow = super()._new_shadow(followed)
        if self._manager.num_cached_tokens(shadow) < held.start:
            followed.first = held.start + 1
            followed.salt = struct.pack("<qq", followed.seq.seq_id, held.start)
            shadow = super()._new_shadow(followed)
        self._hidden.count_from(followed.seq.seq_id, followed.first - 1)
        return shadow

    def _num_ready(self, followed: Followed, shadow: Sequence) -> int:
        return self._hidden.held(followed.seq.seq_id).stop - (followed.first - 1) - shadow.num_computed

    def _num_right(self, followed: Followed, new: Seq[int]) -> int:
        return 0

    def _let_go(self, followed: Followed) -> None:
        super()._let_go(followed)
        self._hidden.drop(followed.seq.seq_id)

    def _forget_all(self) -> None:
        super()._forget_all()
        self._hidden.clear()
