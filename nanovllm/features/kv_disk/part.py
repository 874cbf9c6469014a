"""The store's part in the process of a rank, where its tensors are and its files: it looks, reads and writes.

The engine calls it between steps (`Command`), and hears from it what has happened (`Report`). Only threads of the part
wait for the disk. A file is read into a buffer and then copied into its blocks, so a call that hangs holds no blocks.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import Tensor

from nanovllm.config import EngineConfig
from nanovllm.data.batch import BlockMove, StateMove
from nanovllm.device import Event
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.errors import told
from nanovllm.features.kv_disk import files
from nanovllm.features.kv_disk.files import DamagedFile, Space
from nanovllm.features.kv_disk.identity import digest_of_facts, facts_of
from nanovllm.features.kv_disk.units import Place, StatePlace, UnitCopier, UnitPlace, bytes_of

READERS = 4  # threads, each with one file under way, of some MiB
QUEUE_BYTES = 256 << 20  # copied out of the KV cache and not written yet: more is left out
PAUSE_SECONDS = 60.0  # without writing, after a file could not be written
CLOSE_SECONDS = 1.0  # for a file that is being written at the end, and for threads that read
NICENESS = 19  # of the thread that writes: on a busy CPU it takes the time that steps leave


# ---- what a part reports, from any thread


@dataclass(frozen=True, slots=True)
class Looked:
    """Which of the names of a `look` the rank has."""

    work: int
    names: frozenset[str]


@dataclass(frozen=True, slots=True)
class Read:
    """A file of a `load` is in its blocks, or not: then `wrong` says why."""

    work: int
    name: str
    wrong: str | None


@dataclass(frozen=True, slots=True)
class Warned:
    """What people should know, once. what: the same words each time it happens."""

    what: str
    why: str


Report = Looked | Read | Warned


# ---- threads


class DiskThreads:
    """Threads that wait for the disk, up to `most` of them. They start with the first work for them."""

    def __init__(self, name: str, most: int, begin_thread: Callable[[], None] = lambda: None) -> None:
        """begin_thread: called in each thread."""
        self._name = name
        self._most = most
        self._begin_thread = begin_thread
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def submit(self, work: Callable[[], None]) -> None:
        """Let a thread do work that raises nothing."""
        if len(self._threads) < self._most:
            # A daemon: a disk that does not answer must not keep the process from ending.
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            with suppress(RuntimeError):  # the system gives no more threads: those that there are do the work
                thread.start()
                self._threads.append(thread)
        if self._threads:
            self._queue.put(work)
        else:
            work()

    def end(self) -> None:
        """Let the threads end after the work so far."""
        for _ in self._threads:
            self._queue.put(None)

    def join(self, seconds: float) -> bool:
        """Wait until they have ended, at most so long. Returns whether they have."""
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        self._begin_thread()
        while (work := self._queue.get()) is not None:
            work()


def _yield_to_steps() -> None:
    with suppress(OSError):  # where a thread has no priority of its own
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


class _Load:
    """What one sequence reads."""

    def __init__(self, num_files: int) -> None:
        self.num_left = num_files
        self.is_wanted = True
        self.lock = threading.Lock()  # held while blocks are written

    def end(self) -> None:
        """When this returns, nothing is written into blocks any more. Waits for a copy in memory, not for the disk."""
        with self.lock:
            self.is_wanted = False


# ---- the part


class StorePart:
    """Looks, reads and writes for one rank. Names are those of units and states, the same in all ranks."""

    def __init__(self, config: EngineConfig, runner: ModelRunner, rank: int, report: Callable[[Report], None]) -> None:
        assert config.kv_cache_dir is not None
        self.facts = digest_of_facts(facts_of(config, runner))  # what decides this rank's bits
        self._root = Path(config.kv_cache_dir)
        self._directory = self._root  # until `open`
        self._model_name = config.model_name
        self._rank = rank
        self._report = report
        self._copier = UnitCopier(runner.device, runner.kv_cache.pools)
        self._space = Space(self._root, config.num_bytes("kv_cache_dir_space"), config.tensor_parallel_size)
        self._looks = DiskThreads("kv-disk-look", 1)
        self._readers = DiskThreads("kv-disk-reader", READERS, self._copier.begin_thread)
        self._writer = DiskThreads("kv-disk-writer", 1, _yield_to_steps)
        self._loads: dict[int, _Load] = {}  # by work, those with files that are not read yet
        self._held: dict[int, tuple[str, Tensor]] = {}  # names and states by sequence, see `keep`
        self.unwritten_bytes = 0  # bytes that wait for the writer
        self._lock = threading.Lock()
        self._resumes_at = 0.0  # it does not write before this time, after a write has failed

    def open(self, identity: bytes) -> None:
        """identity: what decides the bits of all ranks."""
        self._directory = self._root / identity.hex()

    def _path(self, name: str) -> Path:
        return self._directory / f"{name}-{self._rank}{files.SUFFIX}"

    # ---- reading

    def look(self, work: int, names: Sequence[str]) -> None:
        """Report which of the names are there."""
        self._looks.submit(partial(self._look, work, names))

    def _look(self, work: int, names: Sequence[str]) -> None:
        present = set[str]()
        try:
            for name in names:
                with suppress(FileNotFoundError):
                    self._path(name).stat()
                    present.add(name)
        except OSError as error:
            self._report(Warned("the directory cannot be read", str(error)))
        self._report(Looked(work, frozenset(present)))

    def load(
        self,
        work: int,
        places: Sequence[tuple[str, Place]],
        moves: Sequence[BlockMove],
        state_moves: Sequence[StateMove],
    ) -> None:
        """Carry out the moves, begin to read what has these names into its places, and report each."""
        settled = self._copier.begin(moves, state_moves)
        load = self._loads[work] = _Load(len(places))
        for name, place in places:
            self._readers.submit(partial(self._read, work, load, name, place, settled))

    def _read(self, work: int, load: _Load, name: str, place: Place, settled: Event) -> None:
        wrong = None
        try:
            if load.is_wanted:
                self._read_file(load, self._path(name), place, settled)
        except FileNotFoundError:
            wrong = "it was deleted meanwhile"
        except Exception as error:
            wrong = str(error) if isinstance(error, OSError | DamagedFile) else told(error)
            self._report(Warned("a file cannot be read, and its tokens are computed", wrong))
        if wrong is not None:
            load.end()  # the rest is of no use
        with load.lock:
            load.num_left -= 1
            if load.num_left == 0:
                self._loads.pop(work, None)
        self._report(Read(work, name, wrong))

    def _read_file(self, load: _Load, path: Path, place: Place, settled: Event) -> None:
        buffer = self._copier.new_buffer(place)
        try:
            files.read(path, bytes_of(buffer))
        except DamagedFile:
            with suppress(OSError):  # a read-only file system: the next one finds it damaged too
                path.unlink()
            raise
        with load.lock:
            if load.is_wanted:
                self._copier.copy_in(buffer, place, settled)
        with suppress(OSError):  # a file system that cannot be written: it is deleted earlier
            os.utime(path)

    def cancel(self, work: int) -> None:
        """Write nothing more of a load into its blocks."""
        if (load := self._loads.get(work)) is not None:
            load.end()

    def cancel_all(self) -> None:
        """Cancel every load, and forget the states that are held."""
        for load in list(self._loads.values()):
            load.end()
        self._held.clear()

    # ---- writing

    def keep(
        self, units: Sequence[tuple[str, UnitPlace]], state: tuple[str, StatePlace] | None, held_for: int | None
    ) -> None:
        """Copy what has been computed, as far as there is room, and write it behind the steps.

        held_for: the sequence at whose end its last state is written; None: the state is written at once.
        """
        if not self._has_room:
            return
        settled = self._copier.begin()
        for name, place in units:
            if self._has_room:
                self._put(name, self._copier.copy_out(place, settled))
        if state is not None and self._has_room:
            name, slot = state
            content = self._copier.copy_out(slot, settled)
            if held_for is None:
                self._put(name, content)
            else:
                self._held[held_for] = (name, content)

    def write_held(self, sequence: int) -> None:
        """Write the state that is held for a sequence."""
        if (held := self._held.pop(sequence, None)) is not None:
            self._put(*held)

    @property
    def _has_room(self) -> bool:
        return self.unwritten_bytes < QUEUE_BYTES and time.monotonic() >= self._resumes_at

    def _put(self, name: str, content: Tensor) -> None:
        with self._lock:
            self.unwritten_bytes += content.nbytes
        self._writer.submit(partial(self._write, name, content))

    def _write(self, name: str, content: Tensor) -> None:
        try:
            if time.monotonic() >= self._resumes_at:
                self._write_file(self._path(name), bytes_of(content))
        except Exception as error:
            self._resumes_at = time.monotonic() + PAUSE_SECONDS
            wrong = str(error) if isinstance(error, OSError) else told(error)
            self._report(Warned(f"nothing is written for {PAUSE_SECONDS:g} s", wrong))
        with self._lock:
            self.unwritten_bytes -= content.nbytes

    def _write_file(self, path: Path, content: memoryview) -> None:
        """Write what is not there yet and fits into the space. Raises OSError."""
        self._root.mkdir(0o700, parents=True, exist_ok=True)
        if path.exists() or not self._space.make_room(len(content) + files.HEADER.size):
            return
        files.write(path, content)
        about = path.with_name(files.MODEL)
        if not about.exists():
            files.replace(about, self._model_name.encode())

    def close(self) -> None:
        """End reading, and write what was handed over, as long as the disk gets on with it. Safe to call twice."""
        self.cancel_all()
        for threads in (self._looks, self._readers, self._writer):
            threads.end()
        before = -1
        while not self._writer.join(CLOSE_SECONDS) and self.unwritten_bytes != before:
            before = self.unwritten_bytes
        if self.unwritten_bytes:
            self._report(Warned(f"{self.unwritten_bytes} bytes are not written", "the disk is too slow"))
        for threads in (self._looks, self._readers):
            threads.join(CLOSE_SECONDS)


class OwnPart:
    """Implements `store.Parts` for the one rank that runs in the engine's process."""

    def __init__(self, config: EngineConfig, runner: ModelRunner) -> None:
        self._reports: queue.SimpleQueue[Report] = queue.SimpleQueue()
        self._part = StorePart(config, runner, 0, self._reports.put)
        self.part_facts = [self._part.facts]

    def tell(self, command: Callable[[StorePart], None]) -> None:
        command(self._part)

    def reports(self, seconds: float) -> Iterator[tuple[int, Report]]:
        with suppress(queue.Empty):
            while True:
                yield 0, self._reports.get(timeout=seconds)
                seconds = 0.0

    def close(self) -> None:
        self._part.close()
