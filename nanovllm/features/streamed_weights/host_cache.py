"""Which units of a file of weights are in which place of host memory. A policy of numbers.

What is read gets one of a few places in turn, the *passing* ones, so that a prompt, which reads all experts, and layers
that are used in a cycle drive nothing else out. A unit that would leave them is *kept* if it is worth more than the
least of those that are kept, which leaves in its stead. So a newcomer must have been used more often, as in W-TinyLFU
(Einziger, Friedman and Manes, 2017).

The worth of a unit is its score in `uses`, with a half-life of HALF_LIFE passes.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence

from nanovllm.features.streamed_weights.uses import Unit, Uses

HALF_LIFE = 16  # passes
MARGIN = 1.25  # times the least worth that a newcomer needs: one use later in the same pass is not enough


class HostCache:
    """The places. A unit is *held* from `need` or `ahead` until `release`, and does not give way meanwhile."""

    def __init__(self, num_places: int, num_passing: int) -> None:
        """num_passing: of the places, at least 1."""
        assert 1 <= num_passing <= num_places
        self.num_places = num_places
        self.num_passing = num_passing
        self._most_kept = num_places - num_passing
        self._free = list(range(num_places))
        self._places: dict[Unit, int] = {}
        self._held = set[Unit]()
        self._passing: dict[Unit, None] = {}  # the oldest first
        self._kept = set[Unit]()
        self._least: list[tuple[float, Unit]] = []  # a heap of those kept, each with its worth, which may have grown
        self._worth = Uses(HALF_LIFE)
        self._used: dict[int, Sequence[Unit]] = {}  # by layer, in the last pass

    # ---- what is used

    def use(self, layer: int, units: Sequence[Unit]) -> None:
        """A pass uses these units of a layer. Layers come in order, see `Uses`."""
        if self._worth.is_next_pass(layer) and self._worth.begin_pass():
            self._sort_kept()
        self._used[layer] = units
        for unit in units:
            self._worth.add(unit)

    def likely(self, layer: int) -> Sequence[Unit]:
        """The units that the last pass used of a layer."""
        return self._used.get(layer, ())

    # ---- places

    @property
    def num_free(self) -> int:
        """Places whose units nobody holds."""
        return len(self._free) + len(self._places) - len(self._held)

    def place_of(self, unit: Unit) -> int | None:
        """Where the unit is, or is being read; None: nowhere."""
        return self._places.get(unit)

    def need(self, units: Sequence[Unit]) -> tuple[dict[Unit, int], list[Unit]]:
        """The places of units that are used together, and which of them must be read there first.

        Of units that are not held, at most `num_free`. All are held now.
        """
        missing = [unit for unit in units if unit not in self._places]
        self._held.update(units)  # first, so that none of them gives way to another
        for unit in missing:
            place = self._passing_place()
            self._enter(unit, self._least_place() if place is None else place)
        return {unit: self._places[unit] for unit in units}, missing

    def ahead(self, units: Sequence[Unit]) -> dict[Unit, int]:
        """Which of the units that are not there are read before they are needed, each with its place.

        As many as there are passing places whose units nobody holds. They are held now, with those that are there.
        """
        self._held.update(unit for unit in units if unit in self._places)
        found: dict[Unit, int] = {}
        for unit in units:
            if unit not in self._places:
                place = self._passing_place()
                if place is None:
                    break
                self._held.add(unit)
                self._enter(unit, place)
                found[unit] = place
        return found

    def release(self, units: Iterable[Unit]) -> None:
        """The units may give way: nothing reads them, and they are not being read. Nobody needs to hold them."""
        self._held.difference_update(units)

    def reset(self, there: Mapping[Unit, int]) -> None:
        """Hold nothing. there: the units that are in places, with these."""
        self._places = dict(there)
        taken = set(there.values())
        self._free = [place for place in range(self.num_places) if place not in taken]
        self._held = set()
        self._kept = set(list(there)[: self._most_kept])
        self._passing = {unit: None for unit in there if unit not in self._kept}
        self._sort_kept()

    # ---- which unit gives way

    def _enter(self, unit: Unit, place: int) -> None:
        self._places[unit] = place
        self._passing[unit] = None

    def _passing_place(self) -> int | None:
        """The place of the oldest passing unit, or of the kept one that is worth less; None if all are held."""
        if self._free:
            return self._free.pop()
        for unit in [unit for unit in self._passing if unit not in self._held]:
            del self._passing[unit]
            if len(self._kept) < self._most_kept:
                self._begin_keeping(unit)
                continue
            least = self._least_kept()
            if least is not None and self._worth[unit] > MARGIN * self._worth[least]:
                self._end_keeping(least)
                self._begin_keeping(unit)
                unit = least
            return self._places.pop(unit)
        return None

    def _least_place(self) -> int:
        """The place of the kept unit that is worth least."""
        least = self._least_kept()
        assert least is not None, "more units are held than there are places"
        self._end_keeping(least)
        return self._places.pop(least)

    def _least_kept(self) -> Unit | None:
        """The first in `_least` that nobody holds. It is moved there to the front."""
        held = []
        found = None
        while self._least and found is None:
            worth, unit = self._least[0]
            if worth != self._worth[unit]:
                heapq.heapreplace(self._least, (self._worth[unit], unit))
            elif unit in self._held:
                held.append(heapq.heappop(self._least))
            else:
                found = unit
        for entry in held:
            heapq.heappush(self._least, entry)
        return found

    def _begin_keeping(self, unit: Unit) -> None:
        self._kept.add(unit)
        heapq.heappush(self._least, (self._worth[unit], unit))

    def _end_keeping(self, unit: Unit) -> None:
        self._kept.remove(unit)
        self._least.remove((self._worth[unit], unit))
        heapq.heapify(self._least)

    def _sort_kept(self) -> None:
        self._least = [(self._worth[unit], unit) for unit in self._kept]
        heapq.heapify(self._least)
