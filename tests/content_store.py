"""A block store for the model of KV content: its reads take several steps, may fail, and write what was computed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from content_model import ContentExecutor, history_digest

from nanovllm.data.batch import BlockMove, StateMove
from nanovllm.data.kv_groups import HOLE
from nanovllm.engine.request import Sequence as TokenSequence

FAILS_EVERY = 3  # of the reads


class ContentStore:
    """Implements `BlockStore` of `features.kv_disk`. Units of `unit` tokens are found by the digest at their end."""

    def __init__(self, executor: ContentExecutor, unit: int) -> None:
        self.executor = executor
        self.unit = unit
        self.stored: set[tuple[bytes, int]] = set()  # digest and group; a state is that of the group -1
        self.loads: list[ContentLoad] = []
        self.num_loads = self.num_read = self.num_failed = self.num_cancelled = 0

    def digests(self, seq: TokenSequence) -> list[bytes]:
        """Of the tokens up to each one."""
        digest = b""
        found = list[bytes]()
        for token in self.executor.histories[seq.seq_id]:
            digest = history_digest(digest, token, self.executor.salts[seq.seq_id])
            found.append(digest)
        return found

    def needed(self, seq: TokenSequence, begin: int, end: int) -> Iterator[tuple[bytes, int]]:
        digests = self.digests(seq)
        for index, group in enumerate(self.executor.groups):
            first = begin if group.window is None else max(begin, group.first_visible(end) * group.block_size)
            for unit in range(first // self.unit, end // self.unit):
                yield digests[(unit + 1) * self.unit - 1], index
        if self.executor.num_device_states:
            yield digests[end - 1], -1

    def reach(self, seq: TokenSequence, begin: int) -> int:
        ends = range(seq.num_cacheable // self.unit * self.unit, begin, -self.unit)
        return next((end for end in ends if all(each in self.stored for each in self.needed(seq, begin, end))), begin)

    def is_looking(self, seq: TokenSequence, begin: int) -> bool:
        return False

    def load(
        self,
        seq: TokenSequence,
        begin: int,
        end: int,
        tables: Sequence[Sequence[int]],
        moves: Sequence[BlockMove],
        state_slot: int | None = None,
        state_moves: Sequence[StateMove] = (),
    ) -> ContentLoad:
        for move in moves:
            self.executor._move(move)
        for state_move in state_moves:
            self.executor._move_state(state_move)
        self.num_loads += 1
        load = ContentLoad(self, seq, range(begin, end), tables, state_slot, self.num_loads % FAILS_EVERY == 0)
        self.loads.append(load)
        return load

    def wait(self, seconds: float) -> None:
        self.go_on()

    def go_on(self) -> None:
        for load in self.loads:
            load.go_on()

    def cancel_all(self) -> None:
        for load in list(self.loads):
            load.cancel()

    def release(self, seq: TokenSequence) -> None:
        return

    def close(self) -> None:
        return

    def keep(
        self, seq: TokenSequence, begin: int, tables: Sequence[Sequence[int]], state_slot: int | None = None
    ) -> None:
        digests = self.digests(seq)
        size = self.unit
        if state_slot is not None and seq.num_computed % size == 0:
            assert self.executor.states[state_slot] == digests[seq.num_computed - 1], "a wrong state is stored"
            self.stored.add((digests[seq.num_computed - 1], -1))
        for index, (table, group) in enumerate(zip(tables, self.executor.groups, strict=True)):
            for unit in range(begin // size, seq.num_computed // size):
                places = [divmod(at, group.block_size) for at in range(unit * size, (unit + 1) * size)]
                if any(table[block] == HOLE for block, _ in places):
                    continue
                for at, (block, offset) in enumerate(places, unit * size):
                    entry = self.executor.entries[table[block], offset]
                    assert entry == [digests[at]] * len(group.layers), f"wrong KV is stored at position {at}"
                self.stored.add((digests[(unit + 1) * size - 1], index))


class ContentLoad:
    """A read that writes one token in each step, of all groups."""

    def __init__(
        self,
        store: ContentStore,
        seq: TokenSequence,
        tokens: range,
        tables: Sequence[Sequence[int]],
        state_slot: int | None,
        fails: bool,
    ) -> None:
        self._store = store
        self._needed = list(store.needed(seq, tokens.start, tokens.stop))
        self._digests = store.digests(seq)
        self._left = list(tokens)
        self._state = self._digests[tokens.stop - 1]
        self._tables = tables
        self._state_slot = state_slot
        self._fails = fails
        self._is_cancelled = False

    @property
    def has_ended(self) -> bool:
        return not self._left

    def go_on(self) -> None:
        assert not self._is_cancelled
        if not self._left:
            return
        position = self._left.pop()
        executor = self._store.executor
        if self._state_slot is not None:
            executor.states[self._state_slot] = b"not read" if self._fails else self._state
        for index, (table, group) in enumerate(zip(self._tables, executor.groups, strict=True)):
            block, offset = divmod(position, group.block_size)
            if table[block] != HOLE:
                executor._own(table[block], index)
                digest = b"not read" if self._fails else self._digests[position]
                executor.entries[table[block], offset] = [digest] * len(group.layers)

    def succeeds(self) -> bool:
        self._store.loads.remove(self)
        if self._fails:
            self._store.num_failed += 1
            self._store.stored.discard(self._needed[-1])
        else:
            self._store.num_read += len(self._needed)
        return not self._fails

    def cancel(self) -> None:
        self._is_cancelled = True
        self._store.loads.remove(self)
        self._store.num_cancelled += 1
