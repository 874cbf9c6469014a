"""The state manager: which sequence goes on from which recurrent state, and the snapshots that prefix hits begin from.

A *state* is what all recurrent layers of a model know of the tokens before one position. It is in a *state slot*, on
the device or on the host. Sequences that go on from the same position share a state, and so does the prefix cache, for
which it is then a *snapshot*: a state never changes while it is shared, because a sequence that is about to compute
gets a copy of its own (`own`). Only the device's slots are computed with.

There is always a slot for a sequence that computes: the scheduler runs at most as many sequences as the device has
slots, and what only the prefix cache holds moves to the host, or is forgotten, the least recently used first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from math import lcm

from nanovllm.data.batch import StateMove
from nanovllm.engine.request import HeldState, Sequence, SnapshotPlan, State
from nanovllm.kvcache.hybrid_manager import IdPool

LEAST_SNAPSHOT_INTERVAL = 2048  # tokens between the snapshots of a long prompt, where there are many slots
SHARE_OF_PROMPT = 4  # one prompt takes at most 1 / SHARE_OF_PROMPT of the slots for snapshots on its way
LONG_PROMPT = 4  # chunks; snapshots on the way of longer prompts cut no chunk in two, since each chunk loads all KV


class StateManager:
    """Gives sequences their states, and keeps snapshots of them by content.

    Slots are numbered across the tiers, the device's first.
    """

    def __init__(self, num_device_slots: int, num_host_slots: int, keeps_snapshots: bool) -> None:
        """keeps_snapshots: whether there is a prefix cache."""
        self.num_device_slots = num_device_slots
        self.num_host_slots = num_host_slots
        self._keeps_snapshots = keeps_snapshots
        self.reset()

    def reset(self) -> None:
        """Forget all states. Callers must clear `state` of all sequences."""
        self._device = IdPool(0, self.num_device_slots)
        self._host = IdPool(self.num_device_slots, self.num_host_slots)
        self._snapshots: dict[bytes, State] = {}  # by content hash, the least recently used first
        self._moves: list[StateMove] = []

    @property
    def num_snapshots(self) -> int:
        return len(self._snapshots)

    # ---- sequences

    def start(self, seq: Sequence, content_hash: bytes | None) -> None:
        """Let a sequence begin at the snapshot with this hash, or at its first token if the hash is None."""
        assert seq.state is None
        if content_hash is not None:
            self._join(seq, self._touched(content_hash))

    def own(self, seq: Sequence) -> int:
        """The device slot with the sequence's state, which a step may change: nothing else holds the state."""
        state = seq.state
        if state is not None and self._on_device(state):
            if state.num_sequences == 1 and state.content_hash is not None and not self.has_room:
                self._forget(state)
            if state.num_sequences == 1 and state.content_hash is None:
                return state.slot
        slot = self._new_device_slot()
        self._moves.append(StateMove(None if state is None else state.slot, slot))
        self._leave(seq)
        self._join(seq, State(slot))
        return slot

    def renew(self, seq: Sequence) -> int:
        """A device slot that the sequence alone holds, into which a state will be read."""
        self._leave(seq)  # first, since the snapshot at which it would have begun may be in the only slot
        slot = self._new_device_slot()
        self._join(seq, State(slot))
        return slot

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """The child goes on from the parent's state."""
        if parent.state is not None:
            self._join(child, parent.state)

    def free(self, seq: Sequence) -> None:
        """Release the states of a sequence. What the prefix cache can find stays."""
        self._release_held(seq)
        self.drop_snapshots(seq)
        self._leave(seq)

    def _leave(self, seq: Sequence) -> None:
        """Take the sequence's state from it."""
        state = seq.state
        seq.state = None
        if state is not None:
            state.num_sequences -= 1
            self._release_unused(state)

    def swap_out(self, sequences: Iterable[Sequence]) -> bool:
        """Move the states of sequences that will not run for a while to the host; `own` brings each back.

        Returns False, with nothing changed, if the host has too few slots. A state that other sequences hold is copied.
        """
        holders = Counter(seq.state for seq in sequences if seq.state is not None and self._on_device(seq.state))
        if len(holders) > self._room_on_host:
            return False
        moved = {state: self._to_host(state, count) for state, count in holders.items()}
        for seq in sequences:
            if seq.state in moved:
                seq.state = moved[seq.state]
        return True

    # ---- drafts

    def hold(self, seq: Sequence, num_drafts: int) -> bool:
        """Copy the state of a sequence, which it owns, before a step with drafts, and keep the copy until `end_step`.

        Returns False, with nothing changed, if the device has no slot for the copy.
        """
        assert seq.state is not None and seq.held_state is None and seq.num_computed
        if not self.has_room:
            return False
        slot = self._new_device_slot()
        self._moves.append(StateMove(seq.state.slot, slot))
        seq.held_state = HeldState(State(slot, num_sequences=1), seq.num_computed, seq.end + num_drafts)
        return True

    def end_step(self, seq: Sequence) -> bool:
        """End a step with drafts. Returns whether all of them were right, so that the sequence keeps its state.

        A wrong draft spoils the state. The sequence then goes back to the state from before the step, and the move that
        is planned here runs the right tokens through it before anything reads it.
        """
        held = seq.held_state
        if held is None:
            return True
        if seq.num_computed == held.end:
            self._release_held(seq)
            return True
        assert seq.state is not None
        if seq.num_computed > held.begin:
            self._moves.append(StateMove(seq.state.slot, held.state.slot, seq.num_computed - held.begin))
        seq.held_state = None
        self._leave(seq)
        seq.state = held.state
        return False

    def _release_held(self, seq: Sequence) -> None:
        held = seq.held_state
        seq.held_state = None
        if held is not None:
            self._release(held.state.slot)

    # ---- snapshots

    def has_snapshot(self, content_hash: bytes) -> bool:
        return content_hash in self._snapshots

    def keep(self, seq: Sequence, content_hash: bytes) -> None:
        """Let the prefix cache find the state of a sequence that has computed the tokens of this hash."""
        if not self._keeps_snapshots or seq.state is None:
            return
        if content_hash in self._snapshots:
            self._touched(content_hash)
        elif seq.state.content_hash is None:
            seq.state.content_hash = content_hash
            self._snapshots[content_hash] = seq.state

    def begin_snapshots(self, seq: Sequence, positions: Seq[int]) -> tuple[tuple[int, int], ...]:
        """Give a layer-by-layer prefill host slots for its snapshots. Its layers write into them one after the other.

        Returns (position, slot) for each position, or for the last positions if there are too few slots.
        """
        assert not seq.begun_snapshots
        room = self._room_on_host if self._keeps_snapshots else 0
        for position in positions[max(0, len(positions) - room) :]:
            seq.begun_snapshots[position] = State(self._new_host_slot(), num_sequences=1)
        return tuple((position, state.slot) for position, state in seq.begun_snapshots.items())

    def end_snapshots(self, seq: Sequence, hash_before: Callable[[Sequence, int], bytes]) -> None:
        """Let the prefix cache find the snapshots of a layer-by-layer prefill, which all layers have written."""
        for position, state in seq.begun_snapshots.items():
            content_hash = hash_before(seq, position)
            state.num_sequences = 0
            if content_hash in self._snapshots:
                self._release(state.slot)
            else:
                state.content_hash = content_hash
                self._snapshots[content_hash] = state
        seq.begun_snapshots = {}

    def drop_snapshots(self, seq: Sequence) -> None:
        """Release the snapshots of a layer-by-layer prefill that does not go on."""
        for state in seq.begun_snapshots.values():
            self._release(state.slot)
        seq.begun_snapshots = {}

    def forget(self, content_hash: bytes) -> None:
        """Forget a snapshot, if it is there."""
        if content_hash in self._snapshots:
            self._forget(self._snapshots[content_hash])

    def forget_all(self) -> None:
        for state in list(self._snapshots.values()):
            self._forget(state)

    def snapshot_interval(self, num_tokens: int) -> int:
        """The least number of tokens between two snapshots of a prompt of `num_tokens` tokens."""
        most = max(1, (self.num_device_slots + self.num_host_slots) // SHARE_OF_PROMPT)
        return max(LEAST_SNAPSHOT_INTERVAL, -(-num_tokens // most))

    def take_moves(self) -> list[StateMove]:
        """The copies decided since the last call, in the order in which they must be carried out."""
        moves = self._moves
        self._moves = []
        return moves

    # ---- slots

    def _on_device(self, state: State) -> bool:
        return state.slot < self.num_device_slots

    def _join(self, seq: Sequence, state: State) -> None:
        seq.state = state
        state.num_sequences += 1

    def _touched(self, content_hash: bytes) -> State:
        """The snapshot, which is now the one used last."""
        state = self._snapshots.pop(content_hash)
        self._snapshots[content_hash] = state
        return state

    @property
    def has_room(self) -> bool:
        """Whether the device has a slot that no sequence holds."""
        return self._device.num_free > 0 or self._oldest(on_device=True) is not None

    def _oldest(self, on_device: bool) -> State | None:
        """The least recently used snapshot of a tier that no sequence holds."""
        held_by_cache = (snapshot for snapshot in self._snapshots.values() if not snapshot.num_sequences)
        return next((snapshot for snapshot in held_by_cache if self._on_device(snapshot) is on_device), None)

    def _new_device_slot(self) -> int:
        """A free slot; the oldest snapshot leaves the device for it if there is none."""
        if not self._device.num_free:
            leaving = self._oldest(on_device=True)
            assert leaving is not None, "more sequences run than the device has state slots"
            if not self._move_to_host(leaving):
                self._forget(leaving)
        return self._device.allocate()

    @property
    def _room_on_host(self) -> int:
        """Host slots that no sequence holds."""
        evictable = sum(
            not (self._on_device(snapshot) or snapshot.num_sequences) for snapshot in self._snapshots.values()
        )
        return self._host.num_free + evictable

    def _new_host_slot(self) -> int:
        """A free slot; the oldest snapshot on the host is forgotten for it if there is none."""
        if not self._host.num_free:
            oldest = self._oldest(on_device=False)
            assert oldest is not None
            self._forget(oldest)
        return self._host.allocate()

    def _move_to_host(self, state: State) -> bool:
        """Move a snapshot to the host, if a slot is free there or is held by an older snapshot."""
        if not self._host.num_free:
            oldest = next((snapshot for snapshot in self._snapshots.values() if not snapshot.num_sequences), None)
            if oldest is None or self._on_device(oldest):
                return False
            self._forget(oldest)
        self._move(state, self._host.allocate())
        return True

    def _to_host(self, state: State, holders: int) -> State:
        """The state on the host for `holders` of its sequences. It is moved, or copied if others hold it too."""
        slot = self._new_host_slot()
        if state.num_sequences == holders:
            self._move(state, slot)
            return state
        self._moves.append(StateMove(state.slot, slot))
        state.num_sequences -= holders
        return State(slot, holders)

    def _move(self, state: State, slot: int) -> None:
        self._moves.append(StateMove(state.slot, slot))
        self._release(state.slot)
        state.slot = slot

    def _forget(self, state: State) -> None:
        assert state.content_hash is not None
        del self._snapshots[state.content_hash]
        state.content_hash = None
        self._release_unused(state)

    def _release_unused(self, state: State) -> None:
        if not state.num_sequences and state.content_hash is None:
            self._release(state.slot)

    def _release(self, slot: int) -> None:
        (self._device if slot < self.num_device_slots else self._host).free(slot)


def planned_snapshots(
    begin: int, end: int, places: Iterable[int], interval: int, unit: int, chunk: int | None, stored_unit: int = 1
) -> SnapshotPlan:
    """Where the state of a prompt of `end` tokens is kept, of which `begin` are computed, in chunks of up to `chunk`.

    A state is kept at the last multiple of `unit` before the end, where a longer prompt will go on; at `places`; and at
    every multiple of `interval`. In a prompt of many chunks those of the interval are at the ends of chunks instead, so
    that no further chunk loads the KV before it. They are multiples of `stored_unit` too, which the block store takes,
    unless that is longer than the interval.
    """
    last = (end - 1) // unit * unit
    if (common := lcm(unit, stored_unit)) <= interval:
        unit = common
    interval = -(-interval // unit) * unit
    is_long = chunk is not None and end > LONG_PROMPT * chunk
    fixed = {last, *places, *(() if is_long else range(interval, last, interval))}
    between = tuple(sorted(position for position in fixed if begin < position < end))
    return SnapshotPlan(between, interval if is_long else 0, unit)
