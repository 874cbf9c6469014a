"""Which experts the device keeps: those that were used last. A policy of numbers."""

from __future__ import annotations

from collections.abc import Iterable

Expert = tuple[int, int]  # layer, number in the layer


class LastUsed:
    """Places for experts, of which the one that was used longest ago gives way to a new one."""

    def __init__(self, num_places: int) -> None:
        self._free = list(range(num_places))
        self._places: dict[Expert, int] = {}  # the least recently used first

    def take(self, experts: Iterable[Expert]) -> tuple[dict[Expert, int], dict[Expert, int]]:
        """The places of experts that are used together, at most as many as there are places: of those that are there,
        and of those that must be brought there."""
        found: dict[Expert, int] = {}
        new: list[Expert] = []
        for expert in experts:
            if (place := self._places.pop(expert, None)) is None:
                new.append(expert)
            else:
                found[expert] = place
        self._places |= found  # used last, so that none of them gives way to another
        brought = {expert: self._place() for expert in new}
        self._places |= brought
        return found, brought

    def _place(self) -> int:
        return self._free.pop() if self._free else self._places.pop(next(iter(self._places)))

    def clear(self) -> None:
        """Forget all experts."""
        self._free += self._places.values()
        self._places = {}
