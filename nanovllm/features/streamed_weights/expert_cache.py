"""Which experts the device keeps: those that were used last. A policy of numbers."""

from __future__ import annotations

from collections.abc import Iterable

Expert = tuple[int, int]  # layer, number in the layer


class LastUsed:
    """Places for experts, of which the one that was used longest ago gives way to a new one."""

    def __init__(self, num_places: int) -> None:
        self._num_places = num_places
        self._free = list(range(num_places))
        self._places: dict[Expert, int] = {}  # the least recently used first

    def take(self, experts: Iterable[Expert]) -> tuple[dict[Expert, int], list[Expert]]:
        """The places of experts that are used together, at most as many as there are places, and which of them must be
        brought there."""
        places = {expert: self._places.pop(expert, None) for expert in experts}
        assert len(places) <= self._num_places
        # Those that are there count as used last, so that none of them gives way to another.
        self._places |= {expert: place for expert, place in places.items() if place is not None}
        missing = [expert for expert, place in places.items() if place is None]
        for expert in missing:
            self._places[expert] = self._place()
        return {expert: self._places[expert] for expert in places}, missing

    def _place(self) -> int:
        return self._free.pop() if self._free else self._places.pop(next(iter(self._places)))

    def clear(self) -> None:
        """Forget all experts."""
        self._free += self._places.values()
        self._places = {}
