"""The file of weights: what was written is read again, by threads, and what goes wrong becomes a sentence."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanovllm.errors import ConfigError, EngineError
from nanovllm.features.streamed_weights import weight_file
from nanovllm.features.streamed_weights.weight_file import BLOCK, READERS, WeightFile, whole_blocks

SIZES = [1, BLOCK, 3 * BLOCK + 5, 40 * BLOCK]


def memory(num_bytes: int) -> memoryview:
    """Whole blocks that begin at a block."""
    return memoryview(mmap.mmap(-1, whole_blocks(num_bytes)))


def unit(num_bytes: int, seed: int) -> memoryview:
    made = memory(num_bytes)
    made[:num_bytes] = Random(seed).randbytes(num_bytes)
    return made


UNITS = [unit(size, size) for size in SIZES]


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WeightFile]:
    monkeypatch.setattr(weight_file, "PIECE_BYTES", 2 * BLOCK)
    opened = WeightFile(tmp_path / "made" / "dir", sum(map(len, UNITS)))
    for content in UNITS:
        opened.append(content)
    yield opened
    opened.close()


def assert_set(event: threading.Event) -> None:
    assert event.wait()


def begin_of(index: int) -> int:
    return sum(map(len, UNITS[:index]))


@given(order=st.lists(st.sampled_from(range(len(UNITS))), max_size=20))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_units_are_read_as_they_were_written(file: WeightFile, order: list[int]) -> None:
    before = file.num_bytes_read
    into = [memory(SIZES[index]) for index in order]
    reads = [file.read(begin_of(index), buffer) for index, buffer in zip(order, into, strict=True)]
    for index, buffer, read in zip(order, into, reads, strict=True):
        read.wait()
        assert buffer == UNITS[index] and read.is_done
    assert file.num_bytes_read - before == sum(len(UNITS[index]) for index in order)


def test_nothing_of_the_file_is_seen_in_the_directory(file: WeightFile, tmp_path: Path) -> None:
    assert list((tmp_path / "made" / "dir").iterdir()) == []


@pytest.mark.parametrize("direct", [True, False])
def test_a_file_system_without_direct_reads_serves_too(
    tmp_path: Path, direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = []
    open_file = os.open

    def opening(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT and not direct:
            raise OSError(errno.EINVAL, "no direct reads")
        opened.append(flags)
        return open_file(path, flags, mode)

    monkeypatch.setattr(os, "open", opening)
    file = WeightFile(tmp_path, len(UNITS[2]))
    assert len(opened) == 1 + direct
    file.append(UNITS[2])
    into = memory(SIZES[2])
    file.read(0, into).wait()
    file.close()
    assert into == UNITS[2] and list(tmp_path.iterdir()) == []


def test_short_reads_and_writes_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preadv, pwrite = os.preadv, os.pwrite
    monkeypatch.setattr(os, "preadv", lambda file, into, begin: preadv(file, [into[0][:BLOCK]], begin))
    monkeypatch.setattr(os, "pwrite", lambda file, data, begin: pwrite(file, data[:BLOCK], begin))
    file = WeightFile(tmp_path, len(UNITS[2]))
    file.append(UNITS[2])
    into = memory(SIZES[2])
    file.read(0, into).wait()
    file.close()
    assert into == UNITS[2]


def test_a_read_that_fails_says_so_and_others_go_on(file: WeightFile, monkeypatch: pytest.MonkeyPatch) -> None:
    preadv = os.preadv

    def broken(number: int, into: list[memoryview], begin: int) -> int:
        if begin == begin_of(2) + 2 * BLOCK:  # the second piece of the third unit
            raise OSError(errno.EIO, "Input/output error")
        return preadv(number, into, begin)

    monkeypatch.setattr(os, "preadv", broken)
    reads = [file.read(begin_of(index), memory(SIZES[index])) for index in range(len(UNITS))]
    for index, read in enumerate(reads):
        if index == 2:
            with pytest.raises(EngineError, match=r"read from weights_dir='.*dir': .*Input/output error$"):
                read.wait()
            assert read.is_done
        else:
            read.wait()
    monkeypatch.undo()
    file.read(begin_of(2), memory(SIZES[2])).wait()


def test_a_file_that_was_cut_says_so(file: WeightFile) -> None:
    os.ftruncate(file._file, begin_of(3))
    with pytest.raises(EngineError, match="the file has become shorter"):
        file.read(begin_of(3), memory(SIZES[3])).wait()


def test_a_directory_that_cannot_hold_the_weights_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^weights_dir='.*': the weights .* take 8388608.00 GiB of it, and it has"):
        WeightFile(tmp_path, 2**53)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"^weights_dir='.*/file/below': .*; name a directory on a local disk"):
        WeightFile(tmp_path / "file" / "below", BLOCK)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_write_that_fails_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*given: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "pwrite", broken)
    with pytest.raises(ConfigError, match=r"^weights_dir=.*Input/output error"):
        WeightFile(tmp_path, BLOCK).append(UNITS[0])


def test_closing_ends_reads_that_are_under_way_and_begins_no_more(
    file: WeightFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Readers are held in front of their memory until the file is being closed."""
    begun = threading.Semaphore(0)
    goes_on = threading.Event()

    def hold() -> None:
        begun.release()
        goes_on.wait()

    reads = [file.read(begin_of(3), memory(SIZES[3]), hold) for _ in range(3)]
    for _ in range(READERS):
        begun.acquire()
    settle = file.settle

    def settling() -> None:
        settle()
        goes_on.set()

    monkeypatch.setattr(file, "settle", settling)
    file.close()
    assert all(read.is_done for read in reads)
    with pytest.raises(EngineError, match="weights are not read: "):
        reads[-1].wait()
    assert not any(thread.name.startswith("weight-reader") for thread in threading.enumerate())
    with pytest.raises(EngineError, match="the file of weights is closed"):
        file.read(0, memory(1))
    assert not file._close_file.alive
    file.close()


def test_nobody_writes_into_memory_after_reads_are_settled(file: WeightFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread is in the middle of a read, and the others wait for what comes before."""
    reading = threading.Event()
    goes_on = threading.Event()
    preadv = os.preadv
    written = []

    def slow(number: int, into: list[memoryview], begin: int) -> int:
        reading.set()
        goes_on.wait()
        written.append(begin)
        return preadv(number, into, begin)

    monkeypatch.setattr(os, "preadv", slow)
    first = file.read(0, memory(SIZES[0]))
    reading.wait()
    late = threading.Event()
    second = file.read(begin_of(1), memory(SIZES[1]), lambda: assert_set(late))
    threading.Timer(0.0, goes_on.set).start()
    file.settle()
    assert written == [0] and first.has_succeeded and not second.is_done
    late.set()
    with pytest.raises(EngineError, match="weights are not read: a step has failed"):
        second.wait()
    assert written == [0] and not second.has_succeeded
    file.read(begin_of(1), memory(SIZES[1])).wait()


def test_an_error_of_what_comes_before_is_one_of_the_read(file: WeightFile) -> None:
    def fail() -> None:
        raise EngineError("the copy has failed")

    into = memory(SIZES[1])
    with pytest.raises(EngineError, match="the copy has failed"):
        file.read(begin_of(1), into, fail).wait()
    assert not any(into), "nothing is written before it has succeeded"
