"""The store of an engine: prompts' units on disk, read and written behind the steps."""

from __future__ import annotations

import json
import logging
import os
import queue
import struct
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from nanovllm.data.batch import Adapter, BlockMove, StateMove
from nanovllm.data.kv_groups import KVGroups
from nanovllm.device.base import Busy
from nanovllm.engine.input_processor import salt_of_content
from nanovllm.engine.request import Sequence as TokenSequence
from nanovllm.features.kv_disk.identity import digest, file_digest
from nanovllm.features.kv_disk.inspect import ABOUT
from nanovllm.features.kv_disk.loading import Load, Reads, Record
from nanovllm.features.kv_disk.policy import UNIT, ReadOrCompute, longest_end, needed_units, wanted_units
from nanovllm.features.kv_disk.segments import SegmentReader, SegmentWriter
from nanovllm.features.kv_disk.units import StateTarget, UnitCopier, UnitTarget, bytes_of
from nanovllm.features.lora.adapter_files import CONFIG, WEIGHTS, stamp_of

logger = logging.getLogger(__name__)

QUEUE_BYTES = 256 << 20  # copied out of the KV cache and not written yet
CLOSE_SECONDS = 60.0  # for what is in the queue at the end
STALL_SECONDS = 5.0  # of these, without a record written
SCAN_SECONDS = 1.0  # between two looks at the directory for a request that waits, and the most that one is waited for


@dataclass(slots=True)
class _Chain:
    """The keys of a sequence's units, as far as they were asked for.

    root: what comes before the tokens. was_sought: whether it was looked for on disk. last_state: of recurrent layers,
    in the output, with its key. reads: whether it is faster to read than to compute; None until something is found.
    """

    root: bytes
    keys: list[bytes]
    was_sought: bool = False
    last_state: tuple[bytes, Tensor] | None = None
    reads: bool | None = None


class DiskStore:
    """Implements `engine.stored_blocks.BlockStore` over a directory. Whatever is wrong with that is a miss.

    Used by the engine's thread, which never waits for the disk after the start; those that read and write are its own.
    """

    unit = UNIT

    def __init__(self, root: Path, identity: bytes, model: str, space: int, copier: UnitCopier) -> None:
        """identity: of what decides bits besides the tokens; space: bytes of all models. Raises OSError."""
        self.directory = root / identity.hex()
        self.directory.mkdir(0o700, parents=True, exist_ok=True)
        self._identity = identity
        self._copier = copier
        self._groups: KVGroups = copier.pools.layout.groups
        self._states = len(self._groups)  # the group of records of states
        self._reader = SegmentReader(self.directory)
        self._chains: weakref.WeakKeyDictionary[TokenSequence, _Chain] = weakref.WeakKeyDictionary()
        self._adapters: dict[int, bytes | None] = {}  # digests by number
        self._warned: set[str] = set()
        self._reads = Reads(self._reader.read)
        self._measured = Busy()  # of the reads
        self.choice = ReadOrCompute()
        self._writer = _WriterThread(SegmentWriter(self.directory, space), self._reader, model)
        self._scanned = threading.Event()  # set but while a look at the directory is under way
        self._scanned_at = time.monotonic()
        self._scan()

    # ---- reading

    def reach(self, seq: TokenSequence, begin: int) -> int:
        """Up to which token the sequence could go on if what is on disk were read; `begin` if that does not help."""
        limit = seq.num_cacheable
        if limit // UNIT * UNIT <= begin or self._reads.are_stuck or (chain := self._chain(seq)) is None:
            return begin
        end = self._longest(seq, chain, begin, limit)
        is_due = not chain.was_sought or time.monotonic() - self._scanned_at > SCAN_SECONDS
        if end < limit // UNIT * UNIT and is_due:  # others may have written since
            self._look_again()
            end = self._longest(seq, chain, begin, limit)
        chain.was_sought = True
        if end > begin and chain.reads is None:
            num_bytes = sum(self._copier.num_bytes(group) for _, group in self._needed(begin, end))
            chain.reads = self.choice.reads(end - begin, num_bytes + self._copier.state_bytes)
        return end if chain.reads else begin

    def _longest(self, seq: TokenSequence, chain: _Chain, begin: int, limit: int) -> int:
        def is_stored(unit: int, group: int) -> bool:
            return (self._key(seq, chain, unit), group) in self._reader

        end = longest_end(self._groups, begin, limit, is_stored)
        while self._copier.state_bytes and end > begin:
            with_state = next((at for at in range(end, begin, -UNIT) if is_stored(at // UNIT - 1, self._states)), begin)
            if with_state == end:
                break
            end = longest_end(self._groups, begin, with_state, is_stored)  # a window may lack what is needed there
        return end

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
        settled = self._copier.begin(moves, state_moves)
        records = [
            Record(
                self._key(seq, chain, unit),
                group,
                UnitTarget(self._copier, unit, group, begin, tables[group], settled),
                self._copier.num_bytes(group),
            )
            for unit, group in self._needed(begin, end)
        ]
        if state_slot is not None:
            key, target = self._key(seq, chain, end // UNIT - 1), StateTarget(self._copier, state_slot, settled)
            records.insert(0, Record(key, self._states, target, self._copier.state_bytes))
        return self._reads.start(records, self._end_load)

    def _end_load(self, load: Load) -> None:
        self._reads.forget(load)
        busy = self._reads.busy()
        self.choice.reading.add(busy.num_bytes - self._measured.num_bytes, busy.seconds - self._measured.seconds)
        self._measured = busy
        if load.wrong is None:
            used = [(record.key, record.group) for record in load.records]
            self._reads.submit(lambda: self._reader.used(used))
            return
        record, why = load.wrong
        if record is not None:
            self._reader.discard(record.key, record.group)
        self._warn("a record cannot be read, and its tokens are computed", why)

    def measured(self, prompt_tokens: float, seconds: float) -> None:
        self.choice.prefill.add(prompt_tokens, seconds)

    def await_loading(self, seconds: float) -> None:
        self._reads.wait(seconds)

    def cancel_all(self) -> None:
        self._reads.cancel_all()

    def _needed(self, begin: int, end: int) -> Iterator[tuple[int, int]]:
        for index, group in enumerate(self._groups):
            for unit in needed_units(group, begin, end):
                yield unit, index

    def _look_again(self) -> None:
        """Look into the directory. A look that takes longer than SCAN_SECONDS is not waited for, and counts later."""
        self._scanned_at = time.monotonic()
        if not self._scanned.is_set():  # one is under way
            return
        self._scanned.clear()
        self._reads.submit(self._scan)
        self._scanned.wait(SCAN_SECONDS)

    def _scan(self) -> None:
        try:
            self._reader.scan()
        except OSError as error:
            self._warn("the directory cannot be read", f"{self.directory}: {error.strerror}")
        finally:
            self._scanned.set()

    # ---- writing

    def keep(
        self, seq: TokenSequence, begin: int, tables: Sequence[Sequence[int]], state_slot: int | None = None
    ) -> None:
        """Hand over what the sequence has computed since token `begin`. Never waits for the disk.

        tables: physical ids; state_slot: of the state after these tokens, if it is worth keeping. What the queue has no
        room for is left out.
        """
        if self._writer.has_failed:
            return
        chain, settled = self._chain(seq), None
        for index, group in enumerate(self._groups if chain is not None else ()):
            for unit in wanted_units(group, seq.prompt_len, begin, seq.num_computed):
                assert chain is not None
                key = self._key(seq, chain, unit)
                if (key, index) in self._reader or not self._writer.has_room:
                    continue
                settled = settled or self._copier.begin()
                if (content := self._copier.copy_out(unit, index, tables[index], settled)) is not None:
                    self._writer.put(key, index, content)
        if chain is not None and state_slot is not None and seq.num_computed % UNIT == 0:
            self._keep_state(seq, chain, state_slot)

    def _keep_state(self, seq: TokenSequence, chain: _Chain, slot: int) -> None:
        """Of a prompt its states are written; of an output the last one, when the sequence ends."""
        key = self._key(seq, chain, seq.num_computed // UNIT - 1)
        if (key, self._states) in self._reader or not self._writer.has_room:
            return
        content = self._copier.copy_state_out(slot, self._copier.begin())
        if seq.num_computed > seq.prompt_len:
            chain.last_state = (key, content)
        else:
            self._writer.put(key, self._states, content)

    def release(self, seq: TokenSequence) -> None:
        """The sequence ends, or is computed anew later."""
        chain = self._chains.get(seq)
        if chain is not None and chain.last_state is not None:
            (key, content), chain.last_state = chain.last_state, None
            if self._writer.has_room:
                self._writer.put(key, self._states, content)

    def close(self) -> None:
        """End reading, write what was handed over, and end the threads. Safe to call twice."""
        self._reads.close()
        self._writer.close()

    # ---- keys

    def _chain(self, seq: TokenSequence) -> _Chain | None:
        """The keys of a sequence; None if its adapter's files are not the ones that it was made with any more."""
        adapter, content = seq.request.adapter, bytes(0)
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

    def _warn(self, what: str, why: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            logger.warning("kv_cache_dir: %s: %s (said once)", what, why)


def adapter_digest(adapter: Adapter) -> bytes | None:
    """Of the bytes of an adapter's files; None if they have changed since the adapter was found."""
    directory = Path(adapter.request.lora_path)
    try:
        found = digest(*(file_digest(directory / name) for name in (CONFIG, WEIGHTS)))
        return found if stamp_of(directory) == adapter.stamp else None
    except Exception:  # whatever is wrong with the files, the request itself will say
        return None


class _WriterThread:
    """Writes what is put, in order, in a thread of its own that starts with the first of it."""

    def __init__(self, writer: SegmentWriter, reader: SegmentReader, model: str) -> None:
        self.has_failed = False
        self._writer, self._reader, self._model = writer, reader, model
        self._queue: queue.SimpleQueue[tuple[bytes, int, Tensor] | None] = queue.SimpleQueue()
        self._bytes = 0  # in the queue
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    @property
    def has_room(self) -> bool:
        return self._bytes < QUEUE_BYTES and not self.has_failed

    def put(self, key: bytes, group: int, content: Tensor) -> None:
        with self._lock:
            self._bytes += content.nbytes
        self._queue.put((key, group, content))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kv-disk-writer", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            key, group, content = item
            try:
                if not self.has_failed and (key, group) not in self._reader:
                    self._write(key, group, bytes_of(content))
            except Exception as error:
                self.has_failed = True
                logger.warning("kv_cache_dir: nothing more is written by this engine: %s", error)
            with self._lock:
                self._bytes -= content.nbytes
        self._writer.close()

    def _write(self, key: bytes, group: int, content: memoryview) -> None:
        about = self._writer.directory / ABOUT
        if not about.exists():
            fd = os.open(about, os.O_WRONLY | os.O_CREAT, 0o600)
            with open(fd, "w") as file:
                json.dump({"model": self._model}, file)
        place = self._writer.append(key, group, content)
        if place is not None:
            self._reader.add(*place)

    def close(self) -> None:
        if self._thread is not None:
            thread, self._thread = self._thread, None
            self._queue.put(None)
            left, deadline = -1, time.monotonic() + CLOSE_SECONDS
            while thread.is_alive() and self._bytes != left and time.monotonic() < deadline:
                left = self._bytes
                thread.join(STALL_SECONDS)
            if thread.is_alive():
                logger.warning("kv_cache_dir: %d bytes are not written: the disk is too slow", self._bytes)
