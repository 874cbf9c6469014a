"""What a block store keeps beyond the engine: its blocks are read for sequences that are admitted, and it is offered
what they compute.

A sequence that reads is *pending* from its admission until its blocks are read. They count as computed, and nobody else
finds them before.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

from nanovllm.data.batch import BlockMove, Sample, StateMove
from nanovllm.data.kv_groups import KVGroup
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.prefix_cache import PrefixHit
from nanovllm.engine.request import Request, Sequence
from nanovllm.engine.step_hook import StepHook
from nanovllm.features.recurrent.states import RecurrentStates


class Load(Protocol):
    """Blocks of a sequence that are being read."""

    @property
    def has_ended(self) -> bool: ...

    def succeeds(self) -> bool:
        """Of a read that has ended: whether the blocks hold everything."""
        ...

    def cancel(self) -> None:
        """End the read: when this returns, nothing is written into the blocks any more."""
        ...


class BlockStore(Protocol):
    """Keeps what was computed beyond this engine. Tables have physical ids. See `store`."""

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
    ) -> Load:
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


class StoredRead:
    """What a sequence waits for. Implements `engine.request.Pending`."""

    def __init__(self, blocks: StoredBlocks, seq: Sequence, num_tokens: int, load: Load) -> None:
        self.num_tokens = num_tokens
        self.load = load
        self._blocks = blocks
        self._seq = seq

    @property
    def has_ended(self) -> bool:
        return self.load.has_ended

    def succeeds(self) -> bool:
        if not self.load.succeeds():
            return False
        self._blocks.count_read(self._seq, self.num_tokens)
        return True

    def cancel(self) -> None:
        self.load.cancel()


class StoredBlocks(StepHook):
    """Reads the blocks of prompts from a block store, and offers it what is computed."""

    def __init__(self, manager: BlockManager, store: BlockStore, states: RecurrentStates | None) -> None:
        """states: of a model with recurrent layers."""
        self.store = store
        self._manager = manager
        self._states = states

    # ---- reading

    def is_ready(self, request: Request) -> bool:
        """False while the store still looks for what the prefix cache does not have."""
        seq = request.computing[0]
        return not self.store.is_looking(seq, self._manager.num_cached_tokens(seq))

    def reach(self, seq: Sequence, begin: int) -> int:
        return self.store.reach(seq, begin)

    def admitted(self, seq: Sequence, hit: PrefixHit) -> None:
        """Begin to read what the sequence has blocks for beyond the hit."""
        begin = hit.num_tokens
        end = seq.num_computed
        if end == begin:
            return
        manager = self._manager
        tables = manager.physical_ids(seq, end)
        slot = None
        state_moves: Seq[StateMove] = ()
        if self._states is not None:
            slot = self._states.renew(seq)
            state_moves = self._states.slots.take_moves()
        load = self.store.load(seq, begin, end, tables, manager.pool.take_moves(), slot, state_moves)
        seq.pending = StoredRead(self, seq, end - begin, load)

    def count_read(self, seq: Sequence, num_tokens: int) -> None:
        """A sequence has what it has read."""
        if self._states is not None and seq.num_computed % self._manager.prefix_cache.hash_block_size == 0:
            self._states.keep(seq)
        self._manager.stats.hit_tokens_on_disk += num_tokens
        if seq.request.metrics.first_scheduled_time is None:
            seq.request.metrics.cached_tokens_disk = num_tokens

    def wait(self, seconds: float) -> None:
        self.store.wait(seconds)

    # ---- what was computed

    def computed(self, seq: Sequence, begin: int, samples: Seq[Sample]) -> None:
        """Offer the store what was computed, before windows are released."""
        if begin // self.store.unit < seq.num_computed // self.store.unit:
            slot = None if self._states is None else self._states.slot_to_store(seq, begin)
            self._keep(seq, begin, slot)

    def looked_ahead(self, seq: Sequence) -> None:
        """Offer the store the recurrent state, if all drafts of the step were right."""
        if self._states is None or not seq.block_tables or seq.num_computed % self.store.unit:
            return
        if (slot := self._states.slot_to_store(seq, seq.num_computed)) is not None:
            self._keep(seq, seq.num_computed, slot)

    def _keep(self, seq: Sequence, begin: int, slot: int | None) -> None:
        self.store.keep(seq, begin, self._manager.physical_ids(seq, seq.num_computed), slot)

    def first_kept(self, group: KVGroup, end: int) -> int:
        """Index of the first of a group's blocks with the units that a prompt of `end` tokens reads to go on."""
        unit = self.store.unit
        size = group.block_size
        if (last := (end - 1) // unit * unit) == 0:
            return group.num_blocks(end)
        return group.first_visible(last) * size // unit * unit // size

    # ---- the end

    def freed(self, seq: Sequence) -> None:
        self.store.release(seq)

    def reset(self, sequences: Seq[Sequence]) -> None:
        self.store.cancel_all()

    def close(self) -> None:
        """Let the store keep what it was offered."""
        self.store.close()
