"""Units of weights that lie in a file, and the host places into which they are read."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from nanovllm.device import Device, Event
from nanovllm.features.streamed_weights.host_cache import HostCache
from nanovllm.features.streamed_weights.uses import Unit
from nanovllm.features.streamed_weights.weight_file import BLOCK, Read, WeightFile
from nanovllm.ops.cpu_kernels import use_huge_pages


class DiskUnits:
    """Units that are used where they are in host memory, or copied from there to the device.

    A unit is used between `need` and `release`; before that it may be expected. Used by one thread.
    """

    def __init__(
        self, device: Device, file: WeightFile, spans: Mapping[Unit, tuple[int, int]], cache: HostCache
    ) -> None:
        """spans: where each unit begins in the file, and how many bytes it has there. cache: empty."""
        self._device = device
        self._file = file
        self._spans = spans
        self._cache = cache
        self._memory = rows_of_blocks(device, cache.num_places, max(size for _, size in spans.values()))
        self._found: dict[int, Unit] = {}  # by place, the unit that it has
        self._reads: dict[int, tuple[Unit, Read]] = {}  # by place, what it gets
        self._free_after: dict[int, Event] = {}  # by place, when it may be overwritten
        self._in_use = set[Unit]()
        self._expected = set[Unit]()  # that are there, or being read
        self._unwanted = set[Unit]()  # that were expected, and are being read

    @property
    def num_passing(self) -> int:
        """Units that may be used together without any other giving way that is worth keeping."""
        return self._cache.num_passing

    @property
    def first_place(self) -> Tensor:
        """Memory for any unit."""
        return self._memory[0]

    def use(self, layer: int, units: Sequence[Unit]) -> None:
        """Count a use in a pass of few rows; see `HostCache.use`."""
        self._cache.use(layer, units)

    def likely(self, layer: int) -> Sequence[Unit]:
        """The units of a layer that the last pass used."""
        return self._cache.likely(layer)

    def has(self, unit: Unit) -> bool:
        """Whether `need` of the unit would not wait."""
        place = self._cache.place_of(unit)
        return place is not None and (place not in self._reads or self._reads[place][1].is_done)

    def need(self, units: Sequence[Unit]) -> dict[Unit, Tensor]:
        """The memory of units that are used now, uint8 [bytes of each]. Waits for the disk.

        At most as many as there are places are used together. Raises EngineError if one cannot be read: then all of
        them must be `reset`.
        """
        self._make_room(units)
        self._expected.difference_update(units)
        self._unwanted.difference_update(units)
        self._in_use.update(units)
        places, missing = self._cache.need(units)
        for unit in missing:
            self._begin(unit, places[unit])
        for place in places.values():
            self._finish(place)
        return {unit: self._memory[place] for unit, place in places.items()}

    def release(self, units: Collection[Unit], used: Event | None = None) -> None:
        """The units are not used any more, or when `used` happens."""
        for unit in units:
            place = self._cache.place_of(unit)
            if used is not None and place is not None:
                self._free_after[place] = used
        self._in_use.difference_update(units)
        self._cache.release(units)

    def expect(self, units: Iterable[Unit]) -> None:
        """These are needed next, the first ones first, and those of earlier calls are not. As many are read as pass."""
        wanted = [unit for unit in units if unit not in self._in_use]
        self._unwanted |= self._expected.difference(wanted)
        self._unwanted.difference_update(wanted)
        self._let_go()
        for unit, place in self._cache.ahead(wanted).items():
            self._begin(unit, place)
        self._expected = {unit for unit in wanted if self._cache.place_of(unit) is not None}

    def reset(self) -> None:
        """Wait until nothing is read, and use nothing. What was read whole stays. Copies of units have ended before."""
        self._file.settle()
        for place, (unit, read) in self._reads.items():
            if read.has_succeeded:
                self._found[place] = unit
        self._reads.clear()
        self._free_after.clear()
        self._cache.reset({unit: place for place, unit in self._found.items()})
        self._in_use.clear()
        self._expected.clear()
        self._unwanted.clear()

    # ---- helpers

    def _make_room(self, units: Sequence[Unit]) -> None:
        """Units that are only expected give way, as soon as they have been read, if there is no other place."""
        self._let_go()
        held = self._in_use | self._expected | self._unwanted
        if len(set(units) - held) > self._cache.num_free:
            self._unwanted |= self._expected.difference(units)
            self._expected.intersection_update(units)
            for unit, read in list(self._reads.values()):
                if unit in self._unwanted:
                    read.wait_for_end()
            self._let_go()

    def _let_go(self) -> None:
        """Release what is not wanted any more and has been read."""
        ended = {unit for unit in self._unwanted if self.has(unit)}
        self._unwanted -= ended
        self._cache.release(ended)

    def _begin(self, unit: Unit, place: int) -> None:
        """Begin to read a unit into a place, which keeps what it has until it is free."""
        self._found.pop(place, None)
        self._reads.pop(place, None)  # of a unit that was expected in vain
        used = self._free_after.pop(place, None)
        begin, size = self._spans[unit]
        memory = self._memory[place, :size]
        device = self._device

        def before() -> None:
            if used is not None:
                device.wait_for(used)
            device.declare_host_access("read of weights", writes=(memory,))

        self._reads[place] = unit, self._file.read(begin, bytes_of(memory), before)

    def _finish(self, place: int) -> None:
        if place in self._reads:
            unit, read = self._reads[place]
            read.wait()
            self._found[place] = unit
            del self._reads[place]


class DiskLayer:
    """The units of one layer, which are called by their numbers: those of its experts, or 0."""

    def __init__(self, units: DiskUnits, index: int, num_units: int) -> None:
        self.units = units
        self._all = [(index, number) for number in range(num_units)]
        self._index = index

    @property
    def is_there(self) -> bool:
        """Whether all of them are in host memory."""
        return all(map(self.units.has, self._all))

    @property
    def everything(self) -> Sequence[Unit]:
        return self._all

    def units_of(self, numbers: Iterable[int]) -> list[Unit]:
        return [self._all[number] for number in numbers]

    def use(self, numbers: Iterable[int]) -> None:
        """See `HostCache.use`."""
        self.units.use(self._index, self.units_of(numbers))

    def likely(self) -> Sequence[Unit]:
        """The units that the last pass used."""
        return self.units.likely(self._index)

    def need(self, numbers: Iterable[int]) -> dict[int, Tensor]:
        """See `DiskUnits.need`."""
        found = self.units.need(self.units_of(numbers))
        return {number: memory for (_, number), memory in found.items()}

    def release(self, numbers: Iterable[int], used: Event | None = None) -> None:
        """See `DiskUnits.release`."""
        self.units.release(self.units_of(numbers), used)

    def in_turn(self, numbers: Iterable[int] | None = None) -> Iterator[dict[int, Tensor]]:
        """These units, or all, as `need` gives them: first those that are there, and the others as they are read.

        Each part is to be released before the next one.
        """
        wanted = self._all if numbers is None else self.units_of(numbers)
        wanted = sorted(wanted, key=lambda unit: not self.units.has(unit))
        size = max(1, self.units.num_passing // 2)  # so many are used, and as many read
        for begin in range(0, len(wanted), size):
            self.units.expect(wanted[begin:])
            yield self.need(number for _, number in wanted[begin : begin + size])


def bytes_of(memory: Tensor) -> memoryview:
    """Contiguous memory uint8, which the view keeps alive."""
    array: Any = memory.numpy()
    return memoryview(array)


def rows_of_blocks(device: Device, num_rows: int, num_bytes: int) -> Tensor:
    """Host memory uint8 [rows, bytes of one], each of which begins at a block."""
    name = "host_weights_bytes: places for weights that are read from disk"
    memory = device.empty_host(name, (num_rows, num_bytes), torch.uint8)
    if memory.data_ptr() % BLOCK:  # as ordinary memory may
        del memory
        longer = device.empty_host(name, (num_rows * num_bytes + BLOCK,), torch.uint8)
        begin = -longer.data_ptr() % BLOCK
        memory = longer[begin : begin + num_rows * num_bytes].view(num_rows, num_bytes)
    use_huge_pages(memory)
    return memory
