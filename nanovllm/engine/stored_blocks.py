"""What a block store keeps beyond the engine: its blocks are read for sequences that are admitted, and it is offered
what they compute.

A sequence is *loading* from its admission until its blocks are read. They count as computed, and nobody else finds
them before `end_loading`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence as Seq
from typing import Protocol

from nanovllm.data.batch import BlockMove, StateMove
from nanovllm.data.kv_groups import KVGroup
from nanovllm.engine.prefix_cache import PrefixCache
from nanovllm.engine.request import Loading, Sequence
from nanovllm.engine.state_manager import StateManager


class BlockStore(Protocol):
    """Keeps what was computed beyond this engine. Tables have physical ids. See `features/kv_disk`."""

    unit: int  # at multiples of so many tokens a sequence can go on

    def is_looking(self, seq: Sequence, begin: int) -> bool:
        """Whether the store still looks for what a waiting sequence has not computed after its first `begin` tokens."""
        ...

    def reach(self, seq: Sequence, begin: int) -> int:
        """Up to which token `load` would read, of a sequence that has `begin` tokens; `begin` if that does not help."""
        ...

    def load(
        self,
        seq: Sequence,
        begin: int,
        end: int,
        tables: Seq[Seq[int]],
        moves: Seq[BlockMove],
        state_slot: int | None = None,
        state_moves: Seq[StateMove] = (),
    ) -> Loading:
        """Carry out the moves, and begin to read tokens into the tables, and the state after them into its slot.

        state_slot, state_moves: of a model with recurrent layers.
        """
        ...

    def wait(self, seconds: float) -> None:
        """Wait until something was found or read, at most so long."""
        ...

    def keep(self, seq: Sequence, begin: int, tables: Seq[Seq[int]], state_slot: int | None = None) -> None:
        """The sequence has computed its tokens from `begin` on; state_slot: if the state after them is worth it."""
        ...

    def release(self, seq: Sequence) -> None:
        """The sequence gives up its blocks."""
        ...

    def cancel_all(self) -> None:
        """End every load: when this returns, nothing is written into blocks any more."""
        ...

    def close(self) -> None:
        """Keep what was handed over, and end. Safe to call twice."""
        ...


class NoBlockStore:
    """Implements `BlockStore`: keeps nothing."""

    def __init__(self, unit: int = sys.maxsize) -> None:
        """unit: of a store that is empty, in whose place it stands."""
        self.unit = unit

    def is_looking(self, seq: Sequence, begin: int) -> bool:
        return False

    def reach(self, seq: Sequence, begin: int) -> int:
        return begin

    def load(self, *_: object) -> Loading:
        raise NotImplementedError("nothing is stored")

    def wait(self, seconds: float) -> None: ...

    def keep(self, *_: object) -> None: ...

    def release(self, seq: Sequence) -> None: ...

    def cancel_all(self) -> None: ...

    def close(self) -> None: ...


class HeldBlocks(Protocol):
    """What is asked of the block manager, which says what the methods do."""

    prefix_cache: PrefixCache
    states: StateManager | None

    def num_cached_tokens(self, seq: Sequence) -> int: ...

    def hold_beyond(self, seq: Sequence, end: int) -> bool: ...

    def physical_ids(self, seq: Sequence, num_tokens: int) -> list[list[int]]: ...

    def take_moves(self) -> list[BlockMove]: ...

    def register_computed(self, seq: Sequence, previously_computed: int) -> None: ...


class StoredBlocks:
    """What the block manager does with its block store."""

    def __init__(self, manager: HeldBlocks, store: BlockStore) -> None:
        self.store = store
        self._manager = manager

    @property
    def unit(self) -> int:
        return self.store.unit

    # ---- reading

    def is_looking(self, seq: Sequence) -> bool:
        """Whether the store still looks for what the prefix cache does not have of a waiting sequence."""
        return self.store.is_looking(seq, self._manager.num_cached_tokens(seq))

    def num_tokens(self, seq: Sequence, begin: int) -> int:
        """Tokens that a waiting sequence could read after its first `begin`."""
        return self.store.reach(seq, begin) - begin

    def hold(self, seq: Sequence) -> None:
        """Give a sequence that is admitted blocks for what the store has of it, if there are enough of them."""
        begin = seq.num_computed
        end = self.store.reach(seq, begin)
        seq.num_stored = end - begin if end > begin and self._manager.hold_beyond(seq, end) else 0

    def begin_loading(self, seq: Sequence) -> None:
        """Read the content of these blocks."""
        manager = self._manager
        tables = manager.physical_ids(seq, seq.num_computed)
        slot = None
        state_moves: Seq[StateMove] = ()
        if manager.states is not None:
            slot = manager.states.renew(seq)
            state_moves = manager.states.take_moves()
        begin = seq.num_computed - seq.num_stored
        moves = manager.take_moves()
        seq.loading = self.store.load(seq, begin, seq.num_computed, tables, moves, slot, state_moves)

    def end_loading(self, seq: Sequence) -> bool:
        """A read has ended: what was read is in the prefix cache, and the sequence can run.

        False if the read failed: then the sequence must be freed.
        """
        assert seq.loading is not None
        loading = seq.loading
        seq.loading = None
        if not loading.succeeds():
            return False
        manager = self._manager
        manager.register_computed(seq, seq.num_computed - seq.num_stored)
        if manager.states is not None and seq.num_computed % manager.prefix_cache.hash_block_size == 0:
            manager.states.keep(seq, manager.prefix_cache.hash_before(seq, seq.num_computed))
        manager.prefix_cache.stats.count_hit(seq)
        return True

    def release(self, seq: Sequence) -> None:
        """A sequence gives up its blocks, which get another content next."""
        if seq.loading is not None:
            seq.loading.cancel()
            seq.loading = None
        self.store.release(seq)

    def wait(self, seconds: float) -> None:
        """Wait until the store has found or read something, at most so long."""
        self.store.wait(seconds)

    def cancel_all(self) -> None:
        """End every load."""
        self.store.cancel_all()

    def close(self) -> None:
        """Keep what was offered, and end. Safe to call twice."""
        self.store.close()

    # ---- what was computed

    def first_offered(self, group: KVGroup, end: int) -> int:
        """Index of the first of a group's blocks with the units that a prompt of `end` tokens reads to go on."""
        unit = self.unit
        size = group.block_size
        if (last := (end - 1) // unit * unit) == 0:
            return group.num_blocks(end)
        return group.first_visible(last) * size // unit * unit // size

    def offer(self, seq: Sequence, previously_computed: int) -> None:
        """Offer the store what was computed since then, before windows are released."""
        if previously_computed // self.unit < seq.num_computed // self.unit:
            self._keep(seq, previously_computed)

    def offer_state(self, seq: Sequence) -> None:
        """Offer the store the recurrent state, now that all drafts of the step were right."""
        if seq.block_tables and seq.num_computed % self.unit == 0:
            self._keep(seq, seq.num_computed)

    def _keep(self, seq: Sequence, previously_computed: int) -> None:
        slot = None
        is_due = seq.num_computed >= seq.prompt_len
        is_due = is_due or seq.snapshots.is_due(previously_computed, seq.num_computed)
        if is_due and seq.state is not None and seq.held_state is None:  # else the state has seen drafts
            slot = seq.state.slot
        tables = self._manager.physical_ids(seq, seq.num_computed)
        self.store.keep(seq, previously_computed, tables, slot)

    def last_snapshot(self, seq: Sequence) -> int:
        """Where the state of a prompt is stored last; 0 if it is too short."""
        return (seq.end - 1) // self.unit * self.unit
