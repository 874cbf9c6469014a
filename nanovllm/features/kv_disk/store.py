"""The engine's half of the store: what is found on disk, what is read and what is written. The parts do it.

A record is found if every part has it, and a read has failed if it has failed in one of them.
"""

from __future__ import annotations

import logging
import struct
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Protocol

from nanovllm.data.batch import Adapter, BlockMove, StateMove
from nanovllm.data.kv_groups import HOLE, KVGroup, KVGroups
from nanovllm.device.base import Busy
from nanovllm.engine.input_processor import salt_of_content
from nanovllm.engine.request import Sequence as TokenSequence
from nanovllm.errors import EngineError
from nanovllm.features.kv_disk import messages
from nanovllm.features.kv_disk.identity import digest, file_digest
from nanovllm.features.kv_disk.messages import Command, Report, StatePlace, UnitPlace
from nanovllm.features.kv_disk.policy import UNIT, ReadOrCompute, first_read, longest_end, needed_units, wanted_units
from nanovllm.features.kv_disk.records import Name
from nanovllm.features.kv_disk.under_way import PATIENCE_SECONDS, UnderWay
from nanovllm.features.lora.adapter_files import CONFIG, WEIGHTS, stamp_of

logger = logging.getLogger(__name__)

SCAN_SECONDS = 1.0  # between two looks at the directory for a request that waits, and the most that it waits for one
CLOSE_SECONDS = 10.0  # without news of parts that end their work
CANCELLED = "it was cancelled"


class Parts(Protocol):
    """Where tensors and files are: a `StorePart` for every rank."""

    @property
    def num_parts(self) -> int: ...

    def tell(self, command: Command) -> None:
        """Let every part carry out a command after the steps and commands so far, and before later ones."""
        ...

    def reports(self, seconds: float) -> Iterable[tuple[int, Report]]:
        """What the parts have reported, each with its number. Waits at most so long for the first.

        Raises EngineError if a rank has failed.
        """
        ...


@dataclass(slots=True)
class _Chain:
    """The keys of a sequence's units, as far as they were asked for.

    root: what comes before the tokens. look: the work of the first look at the directory for it, None if there was
    none, and until when it waits for that. has_held: whether the parts hold a state of its output. reads: whether it is
    faster to read than to compute; None until something is found.
    """

    root: bytes
    keys: list[bytes]
    look: int | None = None
    waits_until: float = 0.0
    has_held: bool = False
    reads: bool | None = None


class Load:
    """What one sequence waits for. Implements `engine.request.Loading`.

    wrong: why the blocks do not hold everything.
    """

    def __init__(self, store: DiskStore, work: int) -> None:
        self.work = work
        self.wrong: str | None = None
        self._store = store

    @property
    def has_ended(self) -> bool:
        self._store.hear()
        return self._store.has_ended(self)

    def succeeds(self) -> bool:
        if self._store.is_under_way(self.work) and self.wrong is None:
            self.wrong = f"the disk has not answered for {PATIENCE_SECONDS:g} s"
        self._store.end_load(self)
        return self.wrong is None

    def cancel(self) -> None:
        """See `engine.request.Loading`. Parts cancel it before they carry out anything else."""
        self._store.cancel(self)


class DiskStore:
    """Implements `engine.stored_blocks.BlockStore` over a directory. Whatever is wrong with that is a miss.

    Used by the engine's thread, which waits for the disk after `open` only in `close`, and where nothing runs.
    """

    unit = UNIT

    def __init__(self, parts: Parts, groups: KVGroups) -> None:
        self.choice = ReadOrCompute()
        self._parts = parts
        self._groups = groups
        self._states = len(groups)  # the group of records of states
        self._numbers = count(messages.OPENING + 1)  # of work
        self._under_way = UnderWay(parts.num_parts)
        self._under_way.begin(messages.OPENING)
        self._why_not: str | None = None  # it cannot be opened
        self._loads: dict[int, Load] = {}  # by work
        self._described: dict[int, messages.Described] = {}  # by part
        self._identity = bytes(0)  # of what all parts describe, and these sums
        self._unit_bytes: Sequence[int] = ()
        self._state_bytes = 0
        self._closed = set[int]()  # parts
        self._everywhere = (1 << parts.num_parts) - 1
        self._index: dict[Name, int] = {}  # the parts that have a record, as bits
        self._chains: weakref.WeakKeyDictionary[TokenSequence, _Chain] = weakref.WeakKeyDictionary()
        self._adapters: dict[int, bytes | None] = {}  # digests by number
        self._warned = set[str]()
        self._writes = True
        self._busy = [Busy()] * parts.num_parts  # of the reads of each, as of the last report
        self._measured = list(self._busy)  # as of the last load that ended
        self._looks = 0  # the work of the last look
        self._looked_at = 0.0

    def open(self) -> str | None:
        """Wait until the parts know what the directory holds. Returns why they cannot, or None."""
        if (why := self._await(messages.OPENING)) is not None:
            return why
        described = [self._described[part] for part in range(self._parts.num_parts)]
        files = {each.files for each in described if each.files is not None}  # of machines with the same files: one
        self._identity = digest(*(each.facts for each in described), *sorted(files))
        self._unit_bytes = [sum(sizes) for sizes in zip(*(each.unit_bytes for each in described), strict=True)]
        self._state_bytes = sum(each.state_bytes for each in described)
        self._looks = self._new_work()
        self._looked_at = time.monotonic()
        self._parts.tell(messages.Begin(self._looks, self._identity))
        return self._await(self._looks)

    # ---- reports

    def hear(self, seconds: float = 0.0) -> bool:
        """Take in what the parts have reported. Waits at most so long for something; returns whether there was any."""
        has_heard = False
        for part, report in self._parts.reports(seconds):
            has_heard = True
            self._take(part, report)
        return has_heard

    def _take(self, part: int, report: Report) -> None:
        match report:
            case messages.Described():
                self._described[part] = report
            case messages.Found(added, gone):
                self._update_index(part, added, gone)
            case messages.Progressed(work):
                self._under_way.progressed(part, work)
            case messages.Ended(work, wrong, busy):
                self._under_way.ended(part, work)
                self._busy[part] = max(busy, self._busy[part], key=lambda each: each.seconds)
                if wrong is not None:
                    self._fail(work, wrong)
            case messages.Warned(what, why):
                self._warn(what, why)
            case messages.WritesNoMore(why):
                self._writes = False
                self._warn("nothing more is written by this engine", why)
            case messages.Closed():
                self._closed.add(part)

    def _update_index(self, part: int, added: Sequence[Name], gone: Sequence[Name]) -> None:
        bit = 1 << part
        for name in gone:
            if left := self._index.pop(name, 0) & ~bit:
                self._index[name] = left
        for name in added:
            self._index[name] = self._index.get(name, 0) | bit

    def _fail(self, work: int, why: str) -> None:
        if work in self._loads:
            self._loads[work].wrong = self._loads[work].wrong or why
        else:
            self._why_not = self._why_not or why

    def _new_work(self) -> int:
        work = next(self._numbers)
        self._under_way.begin(work)
        return work

    def is_under_way(self, work: int) -> bool:
        return work in self._under_way

    def _await(self, work: int) -> str | None:
        """Wait for work at the start. Returns why it has failed, or None."""
        while work in self._under_way and self._why_not is None:
            if not self.hear(0.1) and self._under_way.is_stuck:
                return f"the disk has not answered for {PATIENCE_SECONDS:g} s"
        return self._why_not

    def _warn(self, what: str, why: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            logger.warning("kv_cache_dir: %s: %s (said once)", what, why)

    # ---- reading

    def reach(self, seq: TokenSequence, begin: int) -> int:
        """Up to which token the sequence could go on if what is on disk were read; `begin` if that does not help."""
        limit = self._limit(seq)
        if (chain := self._chain_beyond(seq, begin)) is None:
            return begin
        end = self._longest(seq, chain, begin, limit)
        if end < limit:
            self._look_for(chain)
        if end > begin and chain.reads is None and not self._is_awaited(chain):
            num_bytes = sum(self._unit_bytes[group] for _, group in self._needed(begin, end))
            chain.reads = self.choice.reads(end - begin, num_bytes + self._state_bytes)
        return end if chain.reads else begin

    def is_looking(self, seq: TokenSequence, begin: int, waits: bool) -> bool:
        """Whether `reach` may soon say more: others may have written what the sequence lacks.

        So for the first look at the directory, and at most SCAN_SECONDS. waits: until it has ended.
        """
        if (chain := self._chain_beyond(seq, begin)) is None:
            return False
        if chain.look is None and self._longest(seq, chain, begin, limit := self._limit(seq)) < limit:
            self._look_for(chain)
        while waits and self._is_awaited(chain):
            self.hear(max(0.0, chain.waits_until - time.monotonic()))
        return self._is_awaited(chain)

    def _limit(self, seq: TokenSequence) -> int:
        return seq.num_cacheable // UNIT * UNIT

    def _chain_beyond(self, seq: TokenSequence, begin: int) -> _Chain | None:
        """The keys of a sequence, if it could read anything beyond its first tokens."""
        self.hear()
        return None if self._limit(seq) <= begin or self._under_way.is_stuck else self._chain(seq)

    def _look_for(self, chain: _Chain) -> None:
        """Begin to look into the directory, where others may have written since, if that is due."""
        now = time.monotonic()
        is_due = chain.look is None or now - self._looked_at > SCAN_SECONDS
        if is_due and self._looks not in self._under_way:
            self._looks = self._new_work()
            self._looked_at = now
            self._parts.tell(messages.Look(self._looks))
        if chain.look is None:
            chain.look = self._looks
            chain.waits_until = now + SCAN_SECONDS

    def _is_awaited(self, chain: _Chain) -> bool:
        return chain.look is not None and chain.look in self._under_way and time.monotonic() < chain.waits_until

    def _longest(self, seq: TokenSequence, chain: _Chain, begin: int, limit: int) -> int:
        def is_stored(unit: int, group: int) -> bool:
            return self._stored_key(seq, chain, unit, group) is not None

        end = longest_end(self._groups, begin, limit, is_stored)
        while self._state_bytes and end > begin:
            with_state = next((at for at in range(end, begin, -UNIT) if is_stored(at // UNIT - 1, self._states)), begin)
            if with_state == end:
                break
            end = longest_end(self._groups, begin, with_state, is_stored)  # a window may lack what is needed there
        return end

    def _stored_key(self, seq: TokenSequence, chain: _Chain, unit: int, group: int) -> bytes | None:
        """Under which key all parts have a unit, or as much of it as this engine's blocks take; None: neither."""
        key = self._key(seq, chain, unit)
        if self._is_everywhere((key, group)):
            return key
        begin = unit * UNIT if group == self._states else first_read(self._groups[group], unit)
        if begin > unit * UNIT and self._is_everywhere(((key := _end_key(key, begin)), group)):
            return key
        return None

    def _is_everywhere(self, name: Name) -> bool:
        return self._index.get(name) == self._everywhere

    def load(
        self,
        seq: TokenSequence,
        begin: int,
        end: int,
        tables: Sequence[Sequence[int]],
        moves: Sequence[BlockMove],
        state_slot: int | None = None,
        state_moves: Sequence[StateMove] = (),
    ) -> Load:
        """Begin to read the tokens from `begin` to `end` into the blocks of `tables`, by physical id.

        moves, state_moves: planned before, carried out first. A record that cannot be read is not found again.
        """
        chain = self._chain(seq)
        assert chain is not None, "`reach` has found something"
        records: list[tuple[bytes, UnitPlace | StatePlace]] = [
            (
                self._stored_key(seq, chain, unit, group) or self._key(seq, chain, unit),
                _place(self._groups[group], group, unit, begin, tables[group]),
            )
            for unit, group in self._needed(begin, end)
        ]
        if state_slot is not None:
            records.insert(0, (self._key(seq, chain, end // UNIT - 1), StatePlace(state_slot)))
        load = Load(self, self._new_work())
        self._loads[load.work] = load
        self._parts.tell(messages.Read(load.work, records, moves, state_moves))
        return load

    def has_ended(self, load: Load) -> bool:
        return load.wrong is not None or load.work not in self._under_way or self._under_way.is_stuck

    def end_load(self, load: Load) -> None:
        """A load has ended, in all parts or because of one of them."""
        self._give_up(load)
        read = [now - before for now, before in zip(self._busy, self._measured, strict=True)]
        self.choice.reading.add(sum(each.num_bytes for each in read), max(each.seconds for each in read))
        self._measured = list(self._busy)
        if load.wrong is not None:
            self._warn("a record cannot be read, and its tokens are computed", load.wrong)

    def cancel(self, load: Load) -> None:
        load.wrong = load.wrong or CANCELLED
        self._give_up(load)

    def _give_up(self, load: Load) -> None:
        self._loads.pop(load.work, None)
        if load.work in self._under_way:
            self._parts.tell(messages.Cancel(load.work))

    def measured(self, prompt_tokens: float, seconds: float) -> None:
        self.choice.prefill.add(prompt_tokens, seconds)

    def await_loading(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        self.hear()
        while not any(map(self.has_ended, self._loads.values())) and (left := deadline - time.monotonic()) > 0:
            self.hear(left)

    def cancel_all(self) -> None:
        for load in self._loads.values():
            load.wrong = load.wrong or CANCELLED
        self._loads.clear()
        self._under_way = UnderWay(self._parts.num_parts)  # an interrupt may have come before a part was told its work
        self._parts.tell(messages.CancelAll())

    def _needed(self, begin: int, end: int) -> Iterator[tuple[int, int]]:
        for index, group in enumerate(self._groups):
            for unit in needed_units(group, begin, end):
                yield unit, index

    # ---- writing

    def keep(
        self, seq: TokenSequence, begin: int, tables: Sequence[Sequence[int]], state_slot: int | None = None
    ) -> None:
        """Hand over what the sequence has computed since token `begin`. Never waits for the disk.

        tables: physical ids; state_slot: of the state after these tokens, if it is worth keeping. What a part has no
        room for is left out.
        """
        self.hear()
        if not self._writes or (chain := self._chain(seq)) is None:
            return
        units = []
        for index, group in enumerate(self._groups):
            for unit in wanted_units(group, seq.prompt_len, begin, seq.num_computed):
                if (record := self._lacking(self._key(seq, chain, unit), unit, index, tables[index])) is not None:
                    units.append(record)
        state = None
        if state_slot is not None and seq.num_computed % UNIT == 0:
            state = self._kept_state(seq, chain, state_slot)
        if units or state is not None:
            self._parts.tell(messages.Keep(units, state))

    def _lacking(self, key: bytes, unit: int, index: int, table: Sequence[int]) -> tuple[bytes, UnitPlace] | None:
        """The record to write of a unit: whole, or without what the group's window has released since.

        None if it is there, or if too much was released. key: of the whole unit; index: of the group.
        """
        if self._is_everywhere((key, index)):
            return None
        begin = first_read(self._groups[index], unit)
        for name, first in ((key, unit * UNIT), (_end_key(key, begin), begin)):
            place = _place(self._groups[index], index, unit, first, table)
            if HOLE not in place.blocks:
                return None if self._is_everywhere((name, index)) else (name, place)
        return None

    def _kept_state(self, seq: TokenSequence, chain: _Chain, slot: int) -> messages.KeptState | None:
        """Of a prompt its states are written; of an output the last one, when the sequence ends."""
        key = self._key(seq, chain, seq.num_computed // UNIT - 1)
        if self._is_everywhere((key, self._states)):
            return None
        is_output = seq.num_computed > seq.prompt_len
        chain.has_held |= is_output
        return messages.KeptState(key, StatePlace(slot), seq.seq_id if is_output else None)

    def release(self, seq: TokenSequence) -> None:
        """The sequence ends, or is computed anew later."""
        chain = self._chains.get(seq)
        if chain is not None and chain.has_held:
            chain.has_held = False
            self._parts.tell(messages.WriteHeld(seq.seq_id))

    def close(self) -> None:
        """End reading, and write what was handed over, as long as the parts get on with it. Safe to call twice."""
        if len(self._closed) == self._parts.num_parts:
            return
        self._parts.tell(messages.Close())
        heard = time.monotonic()
        with suppress(EngineError):  # of a rank that has failed
            while len(self._closed) < self._parts.num_parts and time.monotonic() - heard < CLOSE_SECONDS:
                if self.hear(0.1):
                    heard = time.monotonic()

    # ---- keys

    def _chain(self, seq: TokenSequence) -> _Chain | None:
        """The keys of a sequence; None if its adapter's files are not the ones that it was made with any more."""
        adapter = seq.request.adapter
        content = bytes(0)
        if adapter is not None:
            if adapter.number not in self._adapters:
                self._adapters[adapter.number] = adapter_digest(adapter)
            found = self._adapters[adapter.number]
            if found is None:
                return None
            content = found
        root = digest(self._identity, salt_of_content(seq.request.cache_salt, content))
        known = self._chains.get(seq)
        if known is None or known.root != root:  # the salt changes where a sequence outgrows its RoPE
            known = self._chains[seq] = _Chain(root, [])
        return known

    def _key(self, seq: TokenSequence, chain: _Chain, unit: int) -> bytes:
        while len(chain.keys) <= unit:
            at = len(chain.keys)
            tokens = struct.pack(f"<{UNIT}q", *seq.token_ids[at * UNIT : (at + 1) * UNIT])
            chain.keys.append(digest(chain.keys[-1] if chain.keys else chain.root, tokens))
        return chain.keys[unit]


def _place(group: KVGroup, index: int, unit: int, begin: int, table: Sequence[int]) -> UnitPlace:
    """Where a unit's tokens from position `begin` on are. index: of the group; table: physical ids."""
    first = max(unit * UNIT, begin) // group.block_size
    last = ((unit + 1) * UNIT - 1) // group.block_size
    return UnitPlace(unit, index, begin, tuple(table[first : last + 1]))


def _end_key(key: bytes, begin: int) -> bytes:
    """Of a record that has a unit's tokens from `begin` on. key: of the whole unit."""
    return digest(key, begin.to_bytes(8, "little"))


def adapter_digest(adapter: Adapter) -> bytes | None:
    """Of the bytes of an adapter's files; None if they have changed since the adapter was found."""
    try:
        found = digest(*(file_digest(adapter.directory / name) for name in (CONFIG, WEIGHTS)))
        return found if stamp_of(adapter.directory) == adapter.stamp else None
    except Exception:  # whatever is wrong with the files, the request itself will say
        return None
