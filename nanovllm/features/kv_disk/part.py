"""The store's part in the process of one rank: tensors and files. It carries out commands, and reports what happens.

Only threads of its own wait for the disk, and `close`, for a while.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from nanovllm.data.memory_checks import gib
from nanovllm.errors import told
from nanovllm.features.kv_disk import messages
from nanovllm.features.kv_disk.identity import FileDigests, code_files, digest, digest_of_fields, model_files
from nanovllm.features.kv_disk.loading import DiskThreads, Reads, Record, RunningRead
from nanovllm.features.kv_disk.messages import Command, Report, StatePlace
from nanovllm.features.kv_disk.records import Name
from nanovllm.features.kv_disk.segments import SegmentReader, SegmentWriter, all_segments
from nanovllm.features.kv_disk.units import UnitCopier
from nanovllm.features.kv_disk.writing import WriterThread

logger = logging.getLogger(__name__)

PULSE_SECONDS = 1.0  # between two reports that some work goes on


@dataclass(frozen=True)
class PartSetup:
    """What a part is of.

    facts: all that bits depend on besides files and tokens. model_path: None leaves the files to another rank of the
    machine. space: bytes that the directory may take; None: half of what is free and taken.
    """

    root: Path
    model_name: str
    model_path: Path | None
    facts: Mapping[str, Any]
    space: int | None
    rank: int
    num_ranks: int


class Pulse:
    """Reports now and then that some work goes on."""

    def __init__(self, work: int, report: Callable[[Report], None]) -> None:
        self._work = work
        self._report = report
        self._last = time.monotonic()

    def __call__(self) -> None:
        if time.monotonic() - self._last > PULSE_SECONDS:
            self._last = time.monotonic()
            self._report(messages.Progressed(self._work))


class StorePart:
    """Commands come from the thread that runs the steps, between them; `report` is called by any thread.

    Names in commands and reports are those of the engine, which are the same for all ranks. On disk every rank has its
    own, so that a segment in the wrong directory is one with unknown records.
    """

    def __init__(self, setup: PartSetup, copier: UnitCopier, report: Callable[[Report], None]) -> None:
        self._setup = setup
        self._copier = copier
        self._report = report
        self._states = len(copier.pools.layout.groups)  # the group of records of states
        self._reads = Reads(self._read, copier)
        self._directory = DiskThreads("kv-disk-directory", 1)  # a look does not wait for records that are being read
        self._running: dict[int, RunningRead] = {}
        self._held: dict[int, tuple[Name, Tensor]] = {}  # states, by sequence
        self._space = 0
        self._mask = 0
        self._reader = SegmentReader(setup.root)  # until it has a directory
        self._writer: WriterThread | None = None
        self._submit(messages.OPENING, self._open)

    def handle(self, command: Command) -> None:
        match command:
            case messages.Begin():
                self._begin(command)
            case messages.Look(work):
                self._submit(work, self._look)
            case messages.Read():
                self._start(command)
            case messages.Cancel(work):
                if (read := self._running.get(work)) is not None:
                    read.cancel()
            case messages.CancelAll():
                self._cancel_all()
            case messages.Keep():
                self._keep(command)
            case messages.WriteHeld(sequence):
                if (held := self._held.pop(sequence, None)) is not None and self._has_room:
                    self._put(*held)
            case messages.Close():
                self.close()

    def close(self) -> None:
        """End reading, write what was handed over, and end the threads. Safe to call twice."""
        self._cancel_all()
        self._directory.close()
        self._reads.close()
        left = 0 if self._writer is None else self._writer.close()
        if left:
            self._report(messages.Warned(f"{left} bytes are not written", "the disk is too slow"))
        self._report(messages.Closed())

    # ---- the directory, in a thread of its own

    def _submit(self, work: int, do: Callable[[Pulse], None]) -> None:
        """Let that thread do it, and report the end."""

        def run() -> None:
            wrong = None
            try:
                do(Pulse(work, self._report))
            except Exception as error:  # of the disk, most likely
                wrong = str(error) if isinstance(error, OSError) else told(error)
            self._report(messages.Ended(work, wrong))

        self._directory.submit(run)

    def _open(self, goes_on: Pulse) -> None:
        """Describe this rank. The first engine of a model reads all its weights for their digest."""
        setup = self._setup
        copier = self._copier
        setup.root.mkdir(0o700, parents=True, exist_ok=True)
        files = None
        digests = FileDigests(setup.root, goes_on)
        if setup.model_path is not None:
            files = digest(digests.of(model_files(setup.model_path)), digests.of(code_files()))
        self._space = _space(setup.root, setup.space)
        unit_bytes = [copier.num_bytes(group) for group in range(self._states)]
        self._report(messages.Described(digest_of_fields(setup.facts), files, unit_bytes, copier.state_bytes))

    def _begin(self, command: messages.Begin) -> None:
        setup = self._setup
        own = digest(command.identity, setup.rank.to_bytes(4, "little"))
        directory = setup.root / own.hex()
        self._mask = int.from_bytes(own, "little")
        self._reader = SegmentReader(directory)
        self._writer = WriterThread(
            SegmentWriter(directory, self._space, setup.num_ranks),
            self._reader,
            {"model": setup.model_name, "rank": setup.rank, "ranks": setup.num_ranks},
            lambda written: self._report(messages.Found(self._renamed(written))),
            lambda error: self._report(messages.WritesNoMore(str(error))),
        )

        def begin(goes_on: Pulse) -> None:
            directory.mkdir(0o700, parents=True, exist_ok=True)
            self._look(goes_on)

        self._submit(command.work, begin)

    def _look(self, goes_on: Pulse) -> None:
        try:
            added, gone, unreadable = self._reader.scan(goes_on)
        except OSError as error:
            added = []
            gone = []
            unreadable = [error]
        for each in unreadable:
            where = each.filename or self._reader.directory
            self._report(messages.Warned("the directory cannot be read, or not all of it", f"{where}: {each.strerror}"))
        if added or gone:
            self._report(messages.Found(self._renamed(added), self._renamed(gone)))

    def _own(self, name: Name) -> Name:
        """The name on disk of a record, or the engine's name of one on disk."""
        key, group = name
        return (int.from_bytes(key, "little") ^ self._mask).to_bytes(len(key), "little"), group

    def _renamed(self, names: Sequence[Name]) -> list[Name]:
        return [self._own(name) for name in names]

    # ---- reading

    def _start(self, command: messages.Read) -> None:
        settled = self._copier.begin(command.moves, command.state_moves)
        records = []
        for key, place in command.records:
            group = self._states if isinstance(place, StatePlace) else place.group
            records.append(Record((key, group), place, settled))
        pulse = Pulse(command.work, self._report)
        at_end = partial(self._end_read, command.work)
        read = self._running[command.work] = RunningRead(records, self._reads, pulse, at_end)
        self._reads.start(read)

    def _read(self, name: Name, into: memoryview) -> str | None:
        return self._reader.read(self._own(name), into)

    def _end_read(self, work: int, read: RunningRead) -> None:
        """Called by a reader's thread. A record that cannot be read is not found again."""
        self._running.pop(work, None)
        why = None
        if read.wrong is not None:
            record, why = read.wrong
            self._reader.discard(self._own(record.name))
            self._report(messages.Found(gone=[record.name]))
        self._report(messages.Ended(work, why, self._reads.busy()))
        if why is None:
            self._reader.used(self._own(record.name) for record in read.records)

    def _cancel_all(self) -> None:
        for read in list(self._running.values()):
            read.cancel()
        self._held.clear()

    # ---- writing

    def _keep(self, command: messages.Keep) -> None:
        settled = None
        for key, place in command.units:
            name = (key, place.group)
            if self._is_wanted(name):
                settled = settled or self._copier.begin()
                self._put(name, self._copier.copy_out(place, settled))
        if command.state is not None:
            self._keep_state(command.state)

    def _keep_state(self, state: messages.KeptState) -> None:
        name = (state.key, self._states)
        if not self._is_wanted(name):
            return
        content = self._copier.copy_out(state.place, self._copier.begin())
        if state.held_for is None:
            self._put(name, content)
        else:
            self._held[state.held_for] = (name, content)

    @property
    def _has_room(self) -> bool:
        return self._writer is not None and self._writer.has_room

    def _is_wanted(self, name: Name) -> bool:
        """Whether a record is to be written. What is there is reported: the engine seems not to know."""
        if self._own(name) in self._reader:
            self._report(messages.Found([name]))
            return False
        return self._has_room

    def _put(self, name: Name, content: Tensor) -> None:
        assert self._writer is not None, "`Begin` comes first"
        self._writer.put(self._own(name), content)


def _space(root: Path, asked: int | None) -> int:
    """Bytes that the directory may take; asked: None for half of what is free and taken already."""
    if asked is not None:
        return asked
    taken = sum(found.st_size for _, found in all_segments(root))
    space = (shutil.disk_usage(root).free + taken) // 2
    logger.info("kv_cache_dir_space: %s, half of what is free in %s", gib(space), root)
    return space
