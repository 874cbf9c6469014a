"""Recurrent states: which sequence goes on from which, and the snapshots that prefix hits begin from.

A *state* is what all recurrent layers of a model know of the tokens before one position. Sequences that go on from the
same position share a state, and so does the prefix cache, for which it is then a *snapshot*: a state never changes
while it is shared, because a sequence that is about to compute gets a copy of its own (`own`).
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

from nanovllm.data.batch import Batch, LayerwisePrefill, Sample, StateMove
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.branch_points import grid_interval
from nanovllm.engine.prefix_cache import PrefixHit
from nanovllm.engine.request import Sequence
from nanovllm.engine.step_hook import StepHook
from nanovllm.features.recurrent.prefixes import SnapshotPrefixes
from nanovllm.features.recurrent.slots import State, StateSlots
from nanovllm.features.recurrent.snapshots import SnapshotPlan, planned_snapshots

SHARE_OF_PROMPT = 4  # one prompt takes at most 1 / SHARE_OF_PROMPT of the slots for snapshots on its way


@dataclass(slots=True)
class HeldState:
    """A copy of a state, made before a step with drafts."""

    state: State
    begin: int  # the first token that the step computes
    end: int  # the token after the last draft


@dataclass(slots=True)
class SequenceStates:
    """What `RecurrentStates` keeps of a sequence."""

    state: State | None = None  # after num_computed tokens; None before the first
    held: HeldState | None = None  # during a step with drafts
    is_behind: bool = False  # until the next step, which begins with a replay
    is_split: bool = False  # its layers are at different positions, in a layer-by-layer prefill
    plan: SnapshotPlan = field(default_factory=SnapshotPlan)  # where the prefix cache keeps the state
    begun: dict[int, State] = field(default_factory=dict)  # by position, snapshots of the layer-by-layer prefill
    last_snapshot: bytes | None = None  # content hash of the latest snapshot of the output


class RecurrentStates(StepHook):
    """Gives sequences their states, and keeps snapshots of them by content."""

    def __init__(
        self, manager: BlockManager, num_device_slots: int, num_host_slots: int, stored_unit: int = sys.maxsize
    ) -> None:
        """stored_unit: another place keeps states too, at multiples of so many tokens."""
        self.slots = StateSlots(num_device_slots, num_host_slots, SnapshotPrefixes(manager.pool))
        self._manager = manager
        self._stored_unit = stored_unit

    def reset(self, sequences: Seq[Sequence]) -> None:
        self.slots.reset()
        for own in map(self.of, sequences):
            own.state = own.held = None
            own.is_behind = own.is_split = False
            own.begun = {}

    def of(self, seq: Sequence) -> SequenceStates:
        if self not in seq.ext:
            seq.ext[self] = SequenceStates()
        states: SequenceStates = seq.ext[self]
        return states

    @property
    def _keeps_snapshots(self) -> bool:
        return self._manager.prefix_cache.enabled

    # ---- steps

    def may_go_on_after(self, content_hash: bytes) -> bool:
        """Whether there is a snapshot: a prefix hit ends at one."""
        return content_hash in self.slots.snapshots

    def admitted(self, seq: Sequence, hit: PrefixHit) -> None:
        """Begin at the snapshot where the hit ends, or at the first token, and plan the snapshots of the rest."""
        cache = self._manager.prefix_cache
        own = self.of(seq)
        assert own.state is None
        if hit.num_tokens:
            self._join(seq, self.slots.touched(cache.hash_before(seq, hit.num_tokens)))
        if not self._keeps_snapshots:
            own.plan = SnapshotPlan()
            return
        # Where this prompt and another one part, since a third may begin like both; and where the other place keeps it.
        places = (hit.num_known, self._last_stored(seq))
        own.plan = planned_snapshots(
            hit.num_tokens,
            seq.end,
            places,
            self.snapshot_interval(seq.end),
            cache.hash_block_size,
            self._manager.capacity.chunk,
            self._stored_unit,
            any(group.window is not None for group in self._manager.groups),
        )

    def _last_stored(self, seq: Sequence) -> int:
        """Where the other place keeps the state of a prompt last; 0 if it is too short."""
        return (seq.end - 1) // self._stored_unit * self._stored_unit

    def limit(self, seq: Sequence, tokens: int) -> int:
        """A chunk ends where a snapshot is due."""
        return self.of(seq).plan.chunk(seq.num_computed, tokens)

    def built(self, batch: Batch, sequences: list[Sequence]) -> None:
        for scheduled, seq in zip(batch.sequences, sequences, strict=True):
            scheduled.state_slot = self.own(seq)
            self.of(seq).is_split = scheduled.layerwise is not None
        batch.state_moves = self.slots.take_moves()

    def computed(self, seq: Sequence, begin: int, samples: Seq[Sample]) -> None:
        if seq.num_computed > begin and not seq.num_ahead:  # else not all layers have passed, or it has seen drafts
            self._computed(seq, begin)

    def _computed(self, seq: Sequence, begin: int) -> None:
        """Let the prefix cache find the state of a sequence that has just computed its tokens from `begin` on.

        It does if a snapshot is due there. Of the output only the latest state is kept.
        """
        own = self.of(seq)
        own.is_split = False
        cache = self._manager.prefix_cache
        num_computed = seq.num_computed
        is_output = num_computed > seq.prompt_len
        self._end_snapshots(seq)
        if num_computed % cache.hash_block_size:
            return
        if is_output or num_computed == seq.prompt_len or own.plan.is_due(begin, num_computed):
            content_hash = cache.hash_before(seq, num_computed)
            self.keep(seq, is_spare=num_computed < seq.prompt_len and num_computed not in own.plan.places)
            if is_output and own.last_snapshot is not None and own.last_snapshot != content_hash:
                self.slots.forget_hash(own.last_snapshot)
            own.last_snapshot = content_hash if is_output else None

    # ---- sequences

    def own(self, seq: Sequence) -> int:
        """The device slot with the sequence's state, which a step may change: nothing else holds the state."""
        own = self.of(seq)
        own.is_behind = False
        state = own.state
        if state is not None and self.slots.on_device(state):
            if state.num_sequences == 1 and state.content_hash is not None and not self.slots.has_room:
                self.slots.forget(state)
            if state.num_sequences == 1 and state.content_hash is None:
                return state.slot
        slot = self.slots.new_device_slot()
        self.slots.plan(StateMove(None if state is None else state.slot, slot))
        self._leave(seq)
        self._join(seq, State(slot))
        return slot

    def renew(self, seq: Sequence) -> int:
        """A device slot that the sequence alone holds, into which a state will be read."""
        self._leave(seq)  # first, since the snapshot at which it would have begun may be in the only slot
        slot = self.slots.new_device_slot()
        self._join(seq, State(slot))
        return slot

    def forked(self, parent: Sequence, child: Sequence) -> None:
        """The child goes on from the parent's state."""
        if (state := self.of(parent).state) is not None:
            self._join(child, state)

    def freed(self, seq: Sequence) -> None:
        """Release the states of a sequence. What the prefix cache can find stays."""
        self.of(seq).is_split = False
        self._release_held(seq)
        self._drop_snapshots(seq)
        self._leave(seq)

    def _join(self, seq: Sequence, state: State) -> None:
        self.of(seq).state = state
        state.num_sequences += 1

    def _leave(self, seq: Sequence) -> None:
        """Take the sequence's state from it."""
        own = self.of(seq)
        state = own.state
        own.state = None
        if state is not None:
            state.num_sequences -= 1
            self.slots.release_unused(state)

    def swap_out(self, sequences: Seq[Sequence]) -> bool:
        """Move the states of sequences that will not run for a while to the host; `own` brings each back.

        Returns False, with nothing changed, if the host has too few slots, or in a layer-by-layer prefill, which then
        begins anew. A state that other sequences hold is copied.
        """
        states = [own for own in map(self.of, sequences) if own.state is not None]
        holders = Counter(own.state for own in states if own.state is not None and self.slots.on_device(own.state))
        if any(self.of(seq).is_split for seq in sequences) or len(holders) > self.slots.room_on_host:
            return False
        moved = {state: self.slots.to_host(state, count) for state, count in holders.items()}
        for own in states:
            if own.state in moved:
                own.state = moved[own.state]
        for seq in sequences:
            self._drop_snapshots(seq)
        return True

    # ---- drafts

    def hold(self, seq: Sequence, num_drafts: int) -> bool:
        """Copy the state of a sequence, which it owns, before a step with drafts, until the step has ended.

        Returns False, with nothing changed, if the device has no slot for the copy.
        """
        own = self.of(seq)
        assert own.state is not None and own.held is None and seq.num_computed
        if not self.slots.has_room:
            return False
        slot = self.slots.new_device_slot()
        self.slots.plan(StateMove(own.state.slot, slot))
        own.held = HeldState(State(slot, num_sequences=1), seq.num_computed, seq.end + num_drafts)
        return True

    def looked_ahead(self, seq: Sequence) -> None:
        """End a step with drafts. If all of them were right, the sequence keeps its state, which may be a snapshot.

        A wrong draft spoils the state. The sequence then goes back to the state from before the step, and the move that
        is planned here runs the right tokens through it before anything reads it.
        """
        own = self.of(seq)
        held = own.held
        if held is None or seq.num_computed == held.end:
            self._release_held(seq)
            self._computed(seq, seq.num_computed)
            return
        assert own.state is not None
        if seq.num_computed > held.begin:
            self.slots.plan(StateMove(own.state.slot, held.state.slot, seq.num_computed - held.begin))
        own.held = None
        self._leave(seq)
        own.state = held.state
        own.is_behind = True

    def _release_held(self, seq: Sequence) -> None:
        own = self.of(seq)
        held = own.held
        own.held = None
        if held is not None:
            self.slots.release(held.state.slot)

    # ---- snapshots

    def _hashes_before(self, seq: Sequence, position: int) -> list[bytes]:
        """Of all hash blocks of a sequence before the end of one."""
        cache = self._manager.prefix_cache
        cache.hash_before(seq, position)  # so that the sequence has them
        return seq.prefix.hashes[: position // cache.hash_block_size]

    def keep(self, seq: Sequence, is_spare: bool = False) -> None:
        """Let the prefix cache find the state of a sequence that has computed whole hash blocks.

        is_spare: it is on the grid of the prompt alone.
        """
        state = self.of(seq).state
        if not self._keeps_snapshots or state is None:
            return
        content_hash = self._manager.prefix_cache.hash_before(seq, seq.num_computed)
        if content_hash in self.slots.snapshots:
            self.slots.touched(content_hash)
        elif state.content_hash is None:
            self.slots.remember(state, self._hashes_before(seq, seq.num_computed), is_spare)

    def slot_to_store(self, seq: Sequence, begin: int) -> int | None:
        """The slot of a state that is worth storing, of a sequence that has computed its tokens from `begin` on.

        None if it is not, or if it has seen drafts.
        """
        own = self.of(seq)
        is_due = seq.num_computed >= seq.prompt_len or own.plan.is_due(begin, seq.num_computed)
        has_seen_drafts = own.held is not None or own.is_behind
        return own.state.slot if is_due and own.state is not None and not has_seen_drafts else None

    def part_end(self, seq: Sequence, begin: int) -> int:
        """Where a layer-by-layer prefill ends, as the state there is the sequence's own: at the first of two places.

        They are the last snapshot of the prompt, and the last one that the other place keeps.
        """
        last = (*self.of(seq).plan.fixed[-1:], self._last_stored(seq))
        return min((position for position in last if position > begin), default=seq.end)

    def begin_part(self, seq: Sequence, prefill: LayerwisePrefill) -> LayerwisePrefill:
        """The layer-by-layer prefill that a sequence begins, with the snapshots that it keeps on its way."""
        positions = self.of(seq).plan.within(prefill.begin, prefill.end, prefill.chunk)
        return replace(prefill, snapshots=self.begin_snapshots(seq, positions))

    def begin_snapshots(self, seq: Sequence, positions: Seq[int]) -> tuple[tuple[int, int], ...]:
        """Give a layer-by-layer prefill host slots for its snapshots. Its layers write into them one after the other.

        Returns (position, slot) for each position, or for the last positions if there are too few slots.
        """
        begun = self.of(seq).begun
        assert not begun
        room = self.slots.room_on_host if self._keeps_snapshots else 0
        for position in positions[max(0, len(positions) - room) :]:
            begun[position] = State(self.slots.new_host_slot(), num_sequences=1)
        return tuple((position, state.slot) for position, state in begun.items())

    def _end_snapshots(self, seq: Sequence) -> None:
        """Let the prefix cache find the snapshots of a layer-by-layer prefill, which all layers have written."""
        own = self.of(seq)
        for position, state in own.begun.items():
            content_hash = self._manager.prefix_cache.hash_before(seq, position)
            state.num_sequences = 0
            if content_hash in self.slots.snapshots:
                self.slots.release(state.slot)
            else:
                self.slots.remember(state, self._hashes_before(seq, position), position not in own.plan.places)
        own.begun = {}

    def _drop_snapshots(self, seq: Sequence) -> None:
        """Release the snapshots of a layer-by-layer prefill that does not go on."""
        own = self.of(seq)
        for state in own.begun.values():
            self.slots.release(state.slot)
        own.begun = {}

    def forget(self) -> None:
        for state in list(self.slots.snapshots.values()):
            self.slots.forget(state)

    def snapshot_interval(self, num_tokens: int) -> int:
        """Tokens between two snapshots on the grid of a prompt of `num_tokens` tokens."""
        return grid_interval(num_tokens, (self.slots.num_device_slots + self.slots.num_host_slots) // SHARE_OF_PROMPT)
