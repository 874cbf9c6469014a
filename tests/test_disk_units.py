"""Units in a file and their host places: what is used is what was written, whatever is read and copied meanwhile."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ordering_check import OrderingCheck, OrderingError
from torch import Tensor

from nanovllm.device import PitchedCopy
from nanovllm.device.cpu import CpuDevice
from nanovllm.errors import EngineError
from nanovllm.features.streamed_weights import disk_units
from nanovllm.features.streamed_weights.disk_units import DiskUnits
from nanovllm.features.streamed_weights.host_cache import HostCache
from nanovllm.features.streamed_weights.uses import Unit
from nanovllm.features.streamed_weights.weight_file import BLOCK, WeightFile

TIMES = int(os.environ.get("NANOVLLM_FUZZ_TIMES", "1"))  # as many examples
LAYERS = 3
NUMBERS = 4
UNITS = [(layer, number) for layer in range(LAYERS) for number in range(NUMBERS)]
SIZE = 2 * BLOCK


def content(unit: Unit) -> Tensor:
    words = torch.arange(SIZE // 8) * 64 + UNITS.index(unit)
    return words.view(torch.uint8)


class Made:
    """Units on a device whose accesses are checked, and a stream that copies them to memory of the device."""

    def __init__(self, directory: Path, num_places: int, num_passing: int) -> None:
        self.device = OrderingCheck(CpuDevice())
        self.file = WeightFile(directory, len(UNITS) * SIZE)
        spans = {unit: (self.file.append(disk_units.bytes_of(aligned(content(unit)))), SIZE) for unit in UNITS}
        self.units = DiskUnits(self.device, self.file, spans, HostCache(num_places, num_passing))
        self.stream = self.device.new_stream("copies")
        self.copied = self.device.empty("copies", (len(UNITS), SIZE), torch.uint8)

    def copy(self, unit: Unit, memory: Tensor) -> None:
        target = self.copied[UNITS.index(unit)]
        self.device.copy_2d(PitchedCopy(target, memory, SIZE, SIZE, SIZE, 1, "h2d"), self.stream)

    def close(self) -> None:
        self.device.close()
        self.file.close()


def aligned(values: Tensor) -> Tensor:
    memory = disk_units.rows_of_blocks(CpuDevice(), 1, values.nbytes)[0]
    return memory.copy_(values)


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Made]:
    opened = Made(tmp_path, 4, 2)
    yield opened
    opened.close()


@given(data=st.data())
@settings(max_examples=30 * TIMES, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_units_are_what_was_written(tmp_path: Path, data: st.DataObject) -> None:
    places = data.draw(st.integers(1, len(UNITS)), "places")
    made = Made(tmp_path, places, data.draw(st.integers(1, places), "passing"))
    some = st.lists(st.sampled_from(UNITS), max_size=places, unique=True)
    copied = set[Unit]()
    for _ in range(data.draw(st.integers(1, 20), "steps")):
        units = data.draw(some, "units")
        match data.draw(st.sampled_from(["need", "copy", "expect", "use", "reset"]), "what"):
            case "expect":
                made.units.expect(units)
            case "use":
                made.units.use(*((units[0][0], units[:1]) if units else (0, [])))
            case "reset":
                made.stream.synchronize()
                made.units.reset()
            case what:
                for unit, memory in made.units.need(units).items():
                    assert torch.equal(memory, content(unit))
                    if what == "copy":
                        made.copy(unit, memory)
                        copied.add(unit)
                used = made.device.new_event()
                made.stream.record(used)
                made.units.release(units, used if what == "copy" else None)
    made.stream.synchronize()
    assert all(torch.equal(made.copied[UNITS.index(unit)], content(unit)) for unit in copied)
    made.close()


def test_what_is_expected_is_read_before_it_is_needed(made: Made) -> None:
    made.units.need(UNITS[:1])
    made.units.expect(UNITS[1:])
    assert made.file.num_bytes_read == 4 * SIZE, "three are read ahead: there is no more room"
    made.units.release(UNITS[:1])
    made.units.need(UNITS[1:4])
    assert made.file.num_bytes_read == 4 * SIZE
    assert all(map(made.units.has, UNITS[:4])) and not made.units.has(UNITS[4])


def test_units_that_are_expected_in_vain_give_way(made: Made) -> None:
    made.units.expect(UNITS[:4])
    needed = made.units.need(UNITS[4:8])
    assert all(torch.equal(memory, content(unit)) for unit, memory in needed.items())
    assert made.file.num_bytes_read == 8 * SIZE
    made.units.release(UNITS[4:8])
    made.units.expect(UNITS[4:6])
    made.units.need(UNITS[6:10])
    assert made.file.num_bytes_read == 10 * SIZE, "two of them were still there"


def test_a_place_is_not_read_into_while_it_is_copied(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ordering check sees it, whether or not they meet."""
    for unit, memory in made.units.need(UNITS[:4]).items():
        made.copy(unit, memory)
    used = made.device.new_event()
    made.stream.record(used)
    made.units.release(UNITS[:4], used)
    monkeypatch.setattr(made.device, "wait_for", lambda event: None)
    with pytest.raises(OrderingError, match=r"host's 'read of weights' on stream host writes .* after the h2d copy"):
        made.units.need(UNITS[4:5])


def test_after_a_read_that_fails_the_others_are_there(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    preadv = os.preadv

    def broken(file: int, into: list[memoryview], begin: int) -> int:
        if begin == 2 * SIZE:
            raise OSError(errno.EIO, "Input/output error")
        return preadv(file, into, begin)

    made.units.need(UNITS[:1])
    with monkeypatch.context() as patched:
        patched.setattr(os, "preadv", broken)
        made.units.expect(UNITS[1:3])
        with pytest.raises(EngineError, match="Input/output error"):
            made.units.need(UNITS[1:3])
    made.units.reset()
    read = made.file.num_bytes_read
    needed = made.units.need(UNITS[:3])
    assert all(torch.equal(memory, content(unit)) for unit, memory in needed.items())
    assert made.file.num_bytes_read - read == SIZE, "the one that could not be read"


@pytest.mark.parametrize("stops_at", range(1, 20))
def test_after_an_interrupt_no_unit_is_taken_for_another(
    tmp_path: Path, stops_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Made(tmp_path, 4, 4)
    steps = iter(range(stops_at - 1))
    read, need = made.file.read, made.units._cache.need

    def interrupted(call: object) -> None:
        if next(steps, None) is None:
            raise KeyboardInterrupt

    def reading(*given: object) -> object:
        interrupted(read)
        result = read(*given)  # type: ignore[arg-type]
        result.wait()
        interrupted(read)
        return result

    def needing(units: list[Unit]) -> object:
        result = need(units)
        interrupted(need)
        return result

    with monkeypatch.context() as patched:
        patched.setattr(made.file, "read", reading)
        patched.setattr(made.units._cache, "need", needing)
        with suppress(KeyboardInterrupt):
            for units in (UNITS[:2], UNITS[2:4], UNITS[4:6]):
                made.units.expect(UNITS[6:8] if units == UNITS[:2] else [])  # in vain
                made.units.need(units)
                made.units.release(units)
    made.units.reset()
    for unit in (*UNITS[6:8], *UNITS):
        assert torch.equal(made.units.need([unit])[unit], content(unit))
        made.units.release([unit])
    made.close()
