"""The engine's half of the block store: which units there are, what is read and what is written. The parts do it.

With several ranks each has files of its own. A hit is what all of them have, and a load has failed if it has in one.
"""

from __future__ import annotations

import logging
import queue
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Protocol

from nanovllm.config import EngineConfig
from nanovllm.data.batch import Adapter, BlockMove, StateMove
from nanovllm.data.kv_groups import HOLE, KVGroup, KVGroups
from nanovllm.engine.input_processor import salt_of_content
from nanovllm.engine.request import Request
from nanovllm.engine.request import Sequence as TokenSequence
from nanovllm.errors import EngineError, told
from nanovllm.features.kv_disk.identity import FileDigests, adapter_digest, code_digest, digest, model_files
from nanovllm.features.kv_disk.part import Looked, Read, Report, StorePart, Warned
from nanovllm.features.kv_disk.policy import UNIT, first_read, longest_end, needed_units, wanted_units
from nanovllm.features.kv_disk.units import Place, StatePlace, UnitPlace

LATE_SECONDS = 1.0  # without an answer of the disk: then tokens are computed until it answers
OPEN_SECONDS = 10.0  # for the directory at the start, which may be on a disk that has to wake up

logger = logging.getLogger(__name__)

Command = Callable[[StorePart], None]


class Parts(Protocol):
    """A `StorePart` for every rank."""

    @property
    def part_facts(self) -> Sequence[bytes]:
        """What decides the bits of each part."""
        ...

    def tell(self, command: Command) -> None:
        """Let every part carry out a command after the steps and commands so far, and before later ones."""
        ...

    def reports(self, seconds: float) -> Iterable[tuple[int, Report]]:
        """What the parts have reported, each with its number. Waits at most so long for the first.

        Raises EngineError if a rank has failed.
        """
        ...

    def close(self) -> None:
        """End the parts. Safe to call twice."""
        ...


AdapterOf = Callable[[Request], Adapter | None]


def open_store(
    config: EngineConfig, parts: Parts, groups: KVGroups, has_states: bool, adapter_of: AdapterOf | None
) -> DiskStore | None:
    """The store in `config.kv_cache_dir`, which is made if need be; None, with a warning, if it cannot be used."""
    assert config.kv_cache_dir is not None
    digests = FileDigests(Path(config.kv_cache_dir))
    why = _within(OPEN_SECONDS, digests.load)
    if why is None:
        try:
            identity = digest(*parts.part_facts, digests.of(model_files(config.model)), code_digest())
        except OSError as error:
            why = str(error)
    if why is not None:
        logger.warning("kv_cache_dir=%r is not used: %s", str(config.kv_cache_dir), why)
        return None
    _within(LATE_SECONDS, digests.save)
    parts.tell(partial(StorePart.open, identity=identity))
    return DiskStore(parts, groups, has_states, identity, adapter_of)


def _within(seconds: float, work: Callable[[], None]) -> str | None:
    """Let a thread do work that waits for the disk. Returns None when it has ended, else why it has not."""
    answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def run() -> None:
        try:
            work()
            answers.put(None)
        except Exception as error:
            answers.put(str(error) if isinstance(error, OSError) else told(error))

    threading.Thread(target=run, name="kv-disk-open", daemon=True).start()
    try:
        return answers.get(timeout=seconds)
    except queue.Empty:
        return f"the disk has not answered for {seconds:g} s"


class UnderWay:
    """Work that the parts have begun and not ended. They take it in order: the oldest goes on if the disk answers."""

    def __init__(self) -> None:
        self._left: dict[int, int] = {}  # answers that are missing, by work, the oldest first
        self._heard = 0.0  # when the oldest has begun, or was heard of last

    def begin(self, work: int, num_answers: int) -> None:
        if not self._left:
            self._heard = time.monotonic()
        self._left[work] = num_answers

    def answered(self, work: int) -> None:
        if work not in self._left:
            return
        if next(iter(self._left)) == work:
            self._heard = time.monotonic()
        self._left[work] -= 1
        if self._left[work] == 0:
            del self._left[work]

    def __contains__(self, work: int | None) -> bool:
        return work in self._left

    @property
    def is_late(self) -> bool:
        """Whether the oldest waits for the disk for too long. It may answer later."""
        return bool(self._left) and time.monotonic() - self._heard > LATE_SECONDS


@dataclass(slots=True)
class _Stored:
    """What is known of a sequence's units on disk."""

    root: bytes  # digest of what comes before its tokens
    keys: list[bytes] = field(default_factory=list)  # of its units, as far as they were asked for
    look: int | None = None  # the work that looks for them
    names: frozenset[str] | None = None  # that all parts have, of those that have answered; None before the first
    wrong: set[str] = field(default_factory=set)  # names of files that could not be read
    is_late: bool = False  # a load was late: nothing more is read
    has_held: bool = False  # the parts hold a state of its output

    def has(self, name: str) -> bool:
        return self.names is not None and name in self.names and name not in self.wrong


class Load:
    """What one sequence waits for. Implements `stored_blocks.Load`."""

    def __init__(self, store: DiskStore, work: int, stored: _Stored) -> None:
        self.work = work
        self.stored = stored
        self.wrong: str | None = None  # why the blocks do not hold everything
        self._store = store

    @property
    def has_ended(self) -> bool:
        self._store.hear()
        return self.wrong is not None or self.work not in self._store.reads or self._store.reads.is_late

    def succeeds(self) -> bool:
        if self.wrong is None and self.work in self._store.reads:
            self.wrong = f"the disk has not answered for {LATE_SECONDS:g} s"
            self.stored.is_late = True
            self._store.warn("a prompt is computed", self.wrong)
        self._store.end(self)
        return self.wrong is None

    def cancel(self) -> None:
        """See `stored_blocks.Load`. Parts cancel it before they carry out anything else."""
        self._store.end(self)


class DiskStore:
    """Implements `stored_blocks.BlockStore` over a directory. Whatever is wrong with that is a miss.

    Used by the engine's thread, which never waits for the disk but in `close`.
    """

    unit = UNIT

    def __init__(
        self, parts: Parts, groups: KVGroups, has_states: bool, identity: bytes, adapter_of: AdapterOf | None
    ) -> None:
        """has_states: with recurrent layers. identity: what decides the bits besides salt, adapter and tokens.

        adapter_of: the adapter of a request; None if requests have none.
        """
        self._parts = parts
        self._groups = groups
        self._has_states = has_states
        self._adapter_of = adapter_of
        self._identity = identity
        self._numbers = count()  # of work
        self._stored: weakref.WeakKeyDictionary[TokenSequence, _Stored] = weakref.WeakKeyDictionary()
        self._adapters: dict[int, bytes | None] = {}  # digests by number
        self._warned = set[str]()
        self._forget_work()

    def _forget_work(self) -> None:
        self.reads = UnderWay()
        self._looks = UnderWay()
        self._looked_for: dict[int, _Stored] = {}  # by work
        self._loads: dict[int, Load] = {}  # by work

    # ---- reports

    def hear(self, seconds: float = 0.0) -> None:
        """Take in what the parts have reported. Waits at most so long for something."""
        for _, report in self._parts.reports(seconds):
            match report:
                case Looked(work, names):
                    self._looks.answered(work)
                    if (stored := self._looked_for.get(work)) is not None:
                        stored.names = names if stored.names is None else stored.names & names
                    if work not in self._looks:
                        self._looked_for.pop(work, None)
                case Read(work, name, wrong):
                    self.reads.answered(work)
                    if wrong is not None and (load := self._loads.get(work)) is not None:
                        load.wrong = load.wrong or wrong
                        load.stored.wrong.add(name)
                case Warned(what, why):
                    self.warn(what, why)

    def warn(self, what: str, why: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            logger.warning("kv_cache_dir: %s: %s (said once)", what, why)

    def wait(self, seconds: float) -> None:
        """See `BlockStore`."""
        self.hear(seconds)

    # ---- reading

    def is_looking(self, seq: TokenSequence, begin: int) -> bool:
        """See `BlockStore`."""
        stored = self._looked(seq, begin)
        return stored is not None and stored.look in self._looks and not self._looks.is_late

    def reach(self, seq: TokenSequence, begin: int) -> int:
        """See `BlockStore`."""
        stored = self._looked(seq, begin)
        if stored is None or stored.names is None or stored.look in self._looks:
            return begin

        def is_stored(unit: int, group: int) -> bool:
            return self._found(stored, unit, group) is not None

        def has_state(unit: int) -> bool:
            return not self._has_states or stored.has(_state_name(stored.keys[unit]))

        return longest_end(self._groups, begin, self._limit(seq), is_stored, has_state)

    def _limit(self, seq: TokenSequence) -> int:
        return seq.num_cacheable // UNIT * UNIT

    def _looked(self, seq: TokenSequence, begin: int) -> _Stored | None:
        """What is known of a sequence. The parts begin to look if nothing is. None if it can read nothing."""
        self.hear()
        num_units = self._limit(seq) // UNIT
        if num_units * UNIT <= begin or self.reads.is_late:
            return None
        stored = self._known(seq)
        if stored is None or stored.is_late:
            return None
        if stored.look is None:
            keys = self._keys(seq, stored, num_units)
            names = [name for unit, key in enumerate(keys) for name in self._names(key, unit)]
            stored.look = next(self._numbers)
            self._looked_for[stored.look] = stored
            self._looks.begin(stored.look, len(self._parts.part_facts))
            self._parts.tell(partial(StorePart.look, work=stored.look, names=names))
        return stored

    def _names(self, key: bytes, unit: int) -> Iterator[str]:
        """What a unit may be stored as, of all groups; and the state after it."""
        for index, group in enumerate(self._groups):
            yield _name(key, index)
            if (begin := first_read(group, unit)) > unit * UNIT:
                yield _name(key, index, begin)
        if self._has_states:
            yield _state_name(key)

    def _found(self, stored: _Stored, unit: int, group: int) -> str | None:
        """The name under which there is a unit, or as much of it as this engine's blocks take."""
        key = stored.keys[unit]
        names = (_name(key, group), _name(key, group, first_read(self._groups[group], unit)))
        return next((name for name in names if stored.has(name)), None)

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
        """See `BlockStore`."""
        stored = self._stored[seq]
        places: list[tuple[str, Place]] = []
        if state_slot is not None:
            places.append((_state_name(stored.keys[end // UNIT - 1]), StatePlace(state_slot)))
        for index, group in enumerate(self._groups):
            for unit in needed_units(group, begin, end):
                name = self._found(stored, unit, index)
                assert name is not None, "`reach` has found it"
                places.append((name, _place(group, index, unit, begin, tables[index])))
        load = Load(self, next(self._numbers), stored)
        self._loads[load.work] = load
        self.reads.begin(load.work, len(places) * len(self._parts.part_facts))
        command = partial(StorePart.load, work=load.work, places=places, moves=moves, state_moves=state_moves)
        self._parts.tell(command)
        return load

    def end(self, load: Load) -> None:
        """Its sequence does not wait for it any more."""
        self._loads.pop(load.work, None)
        if load.work in self.reads:
            self._parts.tell(partial(StorePart.cancel, work=load.work))

    def cancel_all(self) -> None:
        """See `BlockStore`."""
        self._forget_work()  # an interrupt may have come before a part was told its work
        self._parts.tell(StorePart.cancel_all)

    # ---- writing

    def keep(
        self, seq: TokenSequence, begin: int, tables: Sequence[Sequence[int]], state_slot: int | None = None
    ) -> None:
        """See `BlockStore`. What a part has no room for is left out."""
        if (stored := self._known(seq)) is None:
            return
        keys = self._keys(seq, stored, seq.num_computed // UNIT)
        units = []
        for index, group in enumerate(self._groups):
            for unit in wanted_units(group, seq.prompt_len, begin, seq.num_computed, seq.prefix.branch_points):
                if (lacking := self._lacking(stored, unit, index, tables[index])) is not None:
                    units.append(lacking)
        state = None
        held_for = None
        if state_slot is not None and seq.num_computed % UNIT == 0:
            name = _state_name(keys[seq.num_computed // UNIT - 1])
            if not stored.has(name):
                state = (name, StatePlace(state_slot))
                # Of a prompt all states are written that are worth it; of an output the last one, when it ends.
                held_for = seq.seq_id if seq.num_computed > seq.prompt_len else None
                stored.has_held |= held_for is not None
        if units or state is not None:
            self._parts.tell(partial(StorePart.keep, units=units, state=state, held_for=held_for))

    def _lacking(self, stored: _Stored, unit: int, index: int, table: Sequence[int]) -> tuple[str, UnitPlace] | None:
        """What to write of a unit of a group: all, or what the group's window has not released since.

        None if it is there, or if too much was released.
        """
        group = self._groups[index]
        for begin in (unit * UNIT, first_read(group, unit)):
            name = _name(stored.keys[unit], index, begin if begin > unit * UNIT else None)
            place = _place(group, index, unit, begin, table)
            if stored.has(name):
                return None
            if HOLE not in place.blocks:
                return name, place
        return None

    def release(self, seq: TokenSequence) -> None:
        """See `BlockStore`."""
        if (stored := self._stored.pop(seq, None)) is None:
            return
        if stored.has_held:
            self._parts.tell(partial(StorePart.write_held, sequence=seq.seq_id))
        if stored.is_late or stored.wrong:  # when it is admitted again, it does not try the same
            self._stored[seq] = _Stored(stored.root, wrong=stored.wrong, is_late=stored.is_late)

    def close(self) -> None:
        """See `BlockStore`."""
        self._parts.close()
        with suppress(EngineError):  # several ranks say nothing any more
            self.hear()

    # ---- keys

    def _known(self, seq: TokenSequence) -> _Stored | None:
        """What is known of a sequence; None if its adapter's files are not those that it was made with any more."""
        if (stored := self._stored.get(seq)) is not None:
            return stored
        adapter = None if self._adapter_of is None else self._adapter_of(seq.request)
        content: bytes | None = b""
        if adapter is not None:
            if adapter.number not in self._adapters:
                self._adapters[adapter.number] = adapter_digest(adapter)
            content = self._adapters[adapter.number]
        if content is None:
            return None
        root = digest(self._identity, salt_of_content(seq.request.cache_salt, content))
        stored = self._stored[seq] = _Stored(root)
        return stored

    def _keys(self, seq: TokenSequence, stored: _Stored, num_units: int) -> list[bytes]:
        """The keys of the first units of a sequence. Each is of all tokens up to its end."""
        while (unit := len(stored.keys)) < num_units:
            tokens = struct.pack(f"<{UNIT}q", *seq.token_ids[unit * UNIT : (unit + 1) * UNIT])
            stored.keys.append(digest(stored.keys[-1] if stored.keys else stored.root, tokens))
        return stored.keys[:num_units]


def _name(key: bytes, group: int, begin: int | None = None) -> str:
    """Of a unit of a group; begin: of the first token that it has, if that is not the unit's first one."""
    return f"{key.hex()}-{group}" if begin is None else f"{key.hex()}-{group}-from-{begin}"


def _state_name(key: bytes) -> str:
    return f"{key.hex()}-state"


def _place(group: KVGroup, index: int, unit: int, begin: int, table: Sequence[int]) -> UnitPlace:
    """Where a unit's tokens from position `begin` on are. index: of the group; table: physical ids."""
    first = max(unit * UNIT, begin) // group.block_size
    last = ((unit + 1) * UNIT - 1) // group.block_size
    return UnitPlace(unit, index, begin, tuple(table[first : last + 1]))
