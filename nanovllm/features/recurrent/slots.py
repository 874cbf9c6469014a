"""State slots: where recurrent states are, on the device or on the host.

Only the device's slots are computed with. There is always one for a sequence that computes: the scheduler runs at most
as many sequences as the device has slots, and what only the prefix cache holds moves to the host, or is forgotten, the
least recently used first. A prompt with one answer leaves at most six snapshots that are not on its grid.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from nanovllm.data.batch import StateMove
from nanovllm.features.recurrent.prefixes import SnapshotPrefixes
from nanovllm.kvcache.hybrid_manager import IdPool


@dataclass(slots=True, eq=False)
class State:
    """A recurrent state, in a state slot of either tier."""

    slot: int
    num_sequences: int = 0  # that go on from it
    hashes: Seq[bytes] = ()  # of all hash blocks before it, if the prefix cache can find it
    is_parting: bool = False  # as a snapshot: several prompts have gone on from it, and the next one may
    is_spare: bool = False  # as a snapshot: on the grid of a prompt, and not used yet; these are forgotten first

    @property
    def content_hash(self) -> bytes | None:
        """Of all tokens before it; None if the prefix cache cannot find it."""
        return self.hashes[-1] if self.hashes else None


class StateSlots:
    """Slots are numbered across the tiers, the device's first."""

    def __init__(self, num_device_slots: int, num_host_slots: int, prefixes: SnapshotPrefixes) -> None:
        """prefixes: of the snapshots in these slots."""
        self.num_device_slots = num_device_slots
        self.num_host_slots = num_host_slots
        self.prefixes = prefixes
        self.reset()

    def reset(self) -> None:
        """Forget all states."""
        self._device = IdPool(0, self.num_device_slots)
        self._host = IdPool(self.num_device_slots, self.num_host_slots)
        self.snapshots: dict[bytes, State] = {}  # by content hash, the least recently used first
        self._moves: list[StateMove] = []
        self.prefixes.clear()

    def plan(self, move: StateMove) -> None:
        """Copy or replay a state before the next step."""
        self._moves.append(move)

    def take_moves(self) -> list[StateMove]:
        """The copies decided since the last call, in the order in which they must be carried out."""
        moves = self._moves
        self._moves = []
        return moves

    def on_device(self, state: State) -> bool:
        return state.slot < self.num_device_slots

    def remember(self, state: State, hashes: Seq[bytes], is_spare: bool) -> None:
        """A state becomes the snapshot after these hash blocks, which have none."""
        state.hashes = hashes
        state.is_spare = is_spare
        state.is_parting = hashes[-1] in self.prefixes
        self.snapshots[hashes[-1]] = state
        self.prefixes.add(hashes)

    def touched(self, content_hash: bytes) -> State:
        """The snapshot, which is now the one used last, after those before it at which prompts have parted."""
        state = self.snapshots[content_hash]
        state.is_spare = False
        state.is_parting |= self.prefixes.goes_on(content_hash)
        for before in state.hashes:
            used = self.snapshots.get(before)
            if used is not None and (used is state or used.is_parting):
                self.snapshots[before] = self.snapshots.pop(before)
        return state

    @property
    def has_room(self) -> bool:
        """Whether the device has a slot that no sequence holds."""
        return self._device.num_free > 0 or self._oldest(on_device=True) is not None

    def _oldest(self, on_device: bool) -> State | None:
        """The first snapshot of a tier to be given up."""
        return next((snapshot for snapshot in self._in_turn() if self.on_device(snapshot) is on_device), None)

    def _in_turn(self) -> Iterator[State]:
        """The snapshots that no sequence holds, in the order in which they are given up: spare ones before the others,
        and of both the least recently used first."""
        for is_spare in (True, False):
            for snapshot in self.snapshots.values():
                if snapshot.is_spare is is_spare and not snapshot.num_sequences:
                    yield snapshot

    def new_device_slot(self) -> int:
        """A free slot; a snapshot leaves the device for it if there is none."""
        if not self._device.num_free:
            leaving = self._oldest(on_device=True)
            assert leaving is not None, "more sequences run than the device has state slots"
            if not self._move_to_host(leaving):
                self.forget(leaving)
        return self._device.allocate()

    @property
    def room_on_host(self) -> int:
        """Host slots that no sequence holds."""
        evictable = sum(
            not (self.on_device(snapshot) or snapshot.num_sequences) for snapshot in self.snapshots.values()
        )
        return self._host.num_free + evictable

    def new_host_slot(self) -> int:
        """A free slot; the oldest snapshot on the host is forgotten for it if there is none."""
        if not self._host.num_free:
            oldest = self._oldest(on_device=False)
            assert oldest is not None
            self.forget(oldest)
        return self._host.allocate()

    def _move_to_host(self, state: State) -> bool:
        """Move a snapshot to the host, if a slot is free there or is held by an older snapshot."""
        if not self._host.num_free:
            oldest = next(self._in_turn(), None)
            if oldest is None or self.on_device(oldest):
                return False
            self.forget(oldest)
        self._move(state, self._host.allocate())
        return True

    def to_host(self, state: State, holders: int) -> State:
        """The state on the host for `holders` of its sequences. It is moved, or copied if others hold it too."""
        slot = self.new_host_slot()
        if state.num_sequences == holders:
            self._move(state, slot)
            return state
        self._moves.append(StateMove(state.slot, slot))
        state.num_sequences -= holders
        return State(slot, holders)

    def _move(self, state: State, slot: int) -> None:
        self._moves.append(StateMove(state.slot, slot))
        self.release(state.slot)
        state.slot = slot

    def forget_hash(self, content_hash: bytes) -> None:
        """Forget a snapshot, if it is there."""
        if content_hash in self.snapshots:
            self.forget(self.snapshots[content_hash])

    def forget(self, state: State) -> None:
        """Forget a snapshot. Sequences that hold the state keep it."""
        del self.snapshots[state.hashes[-1]]
        self.prefixes.remove(state.hashes)
        state.hashes = ()
        self.release_unused(state)

    def release_unused(self, state: State) -> None:
        if not state.num_sequences and state.content_hash is None:
            self.release(state.slot)

    def release(self, slot: int) -> None:
        (self._device if slot < self.num_device_slots else self._host).free(slot)
