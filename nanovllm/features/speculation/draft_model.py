"""The drafter of speculative decoding by a second, small network, which has its own resident KV cache.

It follows each sequence by a *shadow*, a sequence of its own block manager with the same tokens.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from nanovllm.data.batch import Batch, SamplingRow, ScheduledSequence
from nanovllm.engine.block_manager import AllocStatus, BlockManager
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.request import Request, Sequence
from nanovllm.features.speculation.acceptance import Acceptance
from nanovllm.features.speculation.lengths import PassCosts, draft_length, shared_out
from nanovllm.sampling_params import SamplingParams

FORGET = 0.8  # weight of what a pass took one pass earlier


@dataclass(slots=True, eq=False)
class Followed:
    """A sequence, and its shadow while it has one."""

    seq: Sequence
    acceptance: Acceptance = field(default_factory=Acceptance)
    shadow: Sequence | None = None
    first: int = 0  # index of the sequence's token with which the shadow begins
    salt: bytes = b""  # added to the request's cache salt for the shadow's blocks
    drafts: list[int] = field(default_factory=list)  # of this step
    ahead: Seq[int] = ()  # the latest drafts whose KV is in the shadow's blocks, after its own tokens
    can_follow: bool = True  # False once the sequence is too long, or has a token that the draft model does not know
    num_read: int = 0  # tokens that were checked to be in the draft model's vocabulary


class DraftModel:
    """Drafts what a second network would generate, for all sequences at once. See `hook.Drafter`.

    It draws as the request does, with the same seed and index, so that both networks choose the same token wherever
    they give it similar probabilities, at any temperature.
    """

    def __init__(self, runner: ModelRunner, longest: int, vocab_size: int) -> None:
        """runner: of the draft model, with all of its blocks on the device. longest: tokens of a sequence that has
        drafts; vocab_size: of the other model.
        """
        config = runner.sizing.config
        plan = runner.plan
        groups = runner.sizing.layout.groups
        caching = config.enable_prefix_caching
        self._chunk = config.chunk
        self._manager = BlockManager(plan.split.resident_blocks, 0, groups, caching, chunk=self._chunk)
        self._runner = runner
        self._longest = min(longest, plan.max_model_len)
        self._vocab_sizes = runner.network.vocab_size, vocab_size  # of the draft model, and of the other
        self._costs = PassCosts()
        self._pass_seconds = 0.0  # of drafting one token of each sequence
        self._followed: dict[int, Followed] = {}  # by seq_id

    def begin_step(self, wanted: Seq[tuple[Sequence, int]], most: int, rows: int, tokens: int) -> None:
        for followed in [followed for followed in self._followed.values() if followed.seq.finished]:
            self._let_go(followed)
            del self._followed[followed.seq.seq_id]
        asked = []
        for seq, longest in wanted:
            followed = self._followed.setdefault(seq.seq_id, Followed(seq))
            followed.drafts = []
            sharing = min(len(wanted), most)  # a pass
            if length := self._length(followed, min(longest, self._longest - len(seq)), sharing, rows, tokens):
                asked.append((followed, length))
        lengths = shared_out([length for _, length in asked], most)
        asked = [(followed, length) for (followed, _), length in zip(asked, lengths, strict=True) if length]
        try:
            self._draft_all(
                [*asked, *((followed, 0) for followed in self._behind([followed for followed, _ in asked]))]
            )
        except BaseException:  # what the shadows' blocks hold is not known
            self._forget_all()
            raise

    def draft(self, seq: Sequence, most: int, rows: int, tokens: int) -> Seq[int]:
        return self._followed[seq.seq_id].drafts[:most]

    def computed(self, seq: Sequence, begin: int, end: int) -> None:
        """The draft model reads tokens alone."""

    def verified(self, seq: Sequence, drafted: int, accepted: int) -> None:
        self._followed[seq.seq_id].acceptance.verified(drafted, accepted)

    def measured(self, rows: int, seconds: float) -> None:
        self._costs.add(rows, seconds)

    def close(self) -> None:
        self._forget_all()
        self._runner.close()

    # ---- which sequences have drafts

    def _length(self, followed: Followed, most: int, sequences: int, rows: int, tokens: int) -> int:
        """How many tokens of a sequence to draft; a pass of the draft model is shared by all of them."""
        new = followed.seq.token_ids[followed.num_read :]
        followed.num_read = len(followed.seq)
        if most < 1 or max(new, default=0) >= self._vocab_sizes[0]:
            followed.can_follow = False  # it only grows
            self._let_go(followed)
        if not followed.can_follow or followed.acceptance.is_paused():
            return 0
        cost = self._pass_seconds / sequences / self._costs.fixed if self._costs.fixed else 0.0
        length = draft_length(followed.acceptance.share, most, rows, tokens, self._costs.share, cost)
        if not length:
            followed.acceptance.begin_pause()
        return length

    def _behind(self, asked: Seq[Followed]) -> Seq[Followed]:
        """Sequences besides those asked for, of which something must be computed though no drafts are wanted."""
        return ()

    def _shadow(self, followed: Followed, asked: Seq[Followed]) -> Sequence | None:
        """The shadow of a sequence, with its tokens and their blocks; None if there is no room for it now."""
        shadow = followed.shadow
        if shadow is None:
            shadow = self._new_shadow(followed)
            if not self._make_room(shadow, asked):
                followed.can_follow = self._manager.can_allocate(shadow) is not AllocStatus.NEVER
                followed.acceptance.begin_pause()  # looking for room takes the longer, the longer the sequence is
                return None
            self._manager.allocate(shadow)
            followed.shadow = shadow
            return shadow
        before = shadow.num_computed
        self._extend(followed, shadow)
        self._advance(shadow, before)
        if self._manager.num_to_grow([shadow]) > self._manager.pool.num_allocatable:
            self._let_go(followed)
            followed.acceptance.begin_pause()
            return None
        self._manager.grow([shadow])
        return shadow

    def _new_shadow(self, followed: Followed) -> Sequence:
        request = followed.seq.request
        (shadow,) = Request(
            request.request_id,
            followed.seq.token_ids[followed.first :],
            SamplingParams(temperature=0.0),
            number=request.number,
            seq_ids=iter([followed.seq.seq_id]),
            seed=0,
            arrival_time=0.0,
            cache_salt=request.cache_salt + followed.salt,
        ).sequences
        return shadow

    def _extend(self, followed: Followed, shadow: Sequence) -> None:
        """Append what the sequence has generated since. Right drafts are computed, but for the last token."""
        new = followed.seq.token_ids[followed.first + len(shadow) :]
        shadow.num_computed += self._num_right(followed, new)
        shadow.token_ids += new
        shadow.num_computed = min(shadow.num_computed, shadow.end - 1)
        followed.ahead = ()
        self._manager.end_look_ahead(shadow)

    def _num_right(self, followed: Followed, new: Seq[int]) -> int:
        """How many drafts the new tokens begin with whose KV is there, without the last new token."""
        right = 0
        while right < min(len(followed.ahead), len(new) - 1) and followed.ahead[right] == new[right]:
            right += 1
        return right

    def _num_ready(self, followed: Followed, shadow: Sequence) -> int:
        """How many tokens of the shadow can be computed next."""
        return shadow.num_remaining

    def _advance(self, shadow: Sequence, before: int) -> None:
        """More of a shadow's tokens are computed than `before`."""
        self._manager.register_computed(shadow, before)
        self._manager.release_hidden(shadow)

    def _make_room(self, shadow: Sequence, asked: Seq[Followed]) -> bool:
        """Whether a shadow can be allocated; shadows of sequences that have no drafts in this step give way to it."""
        idle = [
            followed for followed in self._followed.values() if followed not in asked and followed.shadow is not None
        ]
        while (status := self._manager.can_allocate(shadow)) is AllocStatus.LATER and idle:
            self._let_go(idle.pop(0))
        return status is AllocStatus.OK

    def _let_go(self, followed: Followed) -> None:
        if followed.shadow is not None:
            self._manager.free(followed.shadow)
            followed.shadow = None
            followed.ahead = ()

    def _forget_all(self) -> None:
        self._manager.reset()
        self._followed = {}

    # ---- passes of the draft model

    def _draft_all(self, asked: Seq[tuple[Followed, int]]) -> None:
        """Compute what is new of all sequences, as far as a pass goes, then token by token their drafts.

        asked: how many drafts of each sequence are wanted, which may be none.
        """
        left = self._chunk
        sequences = [followed for followed, _ in asked]
        drafting: list[tuple[Followed, int]] = []
        scheduled: list[tuple[Followed, ScheduledSequence]] = []
        for followed, length in asked:
            shadow = self._shadow(followed, sequences) if left else None
            chunk = 0 if shadow is None else min(left, self._num_ready(followed, shadow))
            if shadow is None or chunk < 1:
                continue
            left -= chunk
            samples = length > 0 and chunk == shadow.num_remaining
            begin = shadow.num_computed
            scheduled.append((followed, self._part(followed, shadow.token_ids[begin : begin + chunk], begin, samples)))
            if samples:
                drafting.append((followed, length))
        self._run(scheduled)
        for followed, part in scheduled:
            assert followed.shadow is not None
            followed.shadow.num_computed += len(part.token_ids)
            self._advance(followed.shadow, part.context_len)
        self._draft_on(drafting)

    def _draft_on(self, drafting: Seq[tuple[Followed, int]]) -> None:
        """Draft what follows the first drafts, as far as there are blocks."""
        lengths = []
        for followed, length in drafting:
            assert followed.shadow is not None
            lengths.append(
                (followed, 1 + self._manager.look_ahead(followed.shadow, length - 1) if followed.drafts else 0)
            )
        for place in range(1, max((length for _, length in lengths), default=0)):
            going = [followed for followed, length in lengths if length > place == len(followed.drafts)]
            if not going:
                break
            begin = time.monotonic()
            self._run([(followed, self._draft_part(followed, place)) for followed in going])
            seconds = time.monotonic() - begin
            self._pass_seconds = FORGET * (self._pass_seconds or seconds) + (1 - FORGET) * seconds
        for followed, _ in drafting:
            followed.ahead = followed.drafts[:-1]

    def _draft_part(self, followed: Followed, place: int) -> ScheduledSequence:
        """Compute the latest draft of a sequence, which is its `place`th."""
        assert followed.shadow is not None
        return self._part(followed, followed.drafts[-1:], len(followed.shadow) + place - 1, True)

    def _part(self, followed: Followed, token_ids: Seq[int], begin: int, samples: bool) -> ScheduledSequence:
        """Compute tokens of a shadow or of its drafts, and draw what follows if `samples`."""
        shadow = followed.shadow
        seq = followed.seq
        assert shadow is not None
        row = SamplingRow(
            **seq.request.sampling.draw, seed=seq.seed, index=seq.num_output_tokens + len(followed.drafts)
        )
        return ScheduledSequence(
            seq_id=shadow.seq_id,
            token_ids=token_ids,
            context_len=begin,
            prompt_len=shadow.prompt_len,
            block_tables=self._manager.physical_ids(shadow, begin + len(token_ids)),
            samples=(row,) if samples else (),
        )

    def _run(self, parts: Seq[tuple[Followed, ScheduledSequence]]) -> None:
        """Run a pass, and append what it draws to the drafts; a token that is none of the other model's ends them."""
        if not parts:
            return
        result = self._runner.execute(Batch([part for _, part in parts], self._manager.pool.take_moves()))
        for index, (followed, _) in enumerate(parts):
            for sample in result.samples[index] if index not in result.errors else ():
                if sample.token_id < self._vocab_sizes[1]:
                    followed.drafts.append(sample.token_id)
