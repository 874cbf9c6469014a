"""How often experts and other units of weights were used, where old uses count less. Numbers alone.

    sum over the uses of 2 ** -(passes since then / half-life)

Source: Lee et al., "LRFU: A Spectrum of Policies that Subsumes the Least Recently Used and Least Frequently Used
Policies" (2001). All sums shrink alike, so none is computed again until its unit is used: instead a use weighs more in
each next pass, and the sums are *scores*, times that weight (Cormode et al., "Forward Decay", 2009).
"""

from __future__ import annotations

Unit = tuple[int, int]  # layer, number in the layer

MOST_WEIGHT = 1e100  # of a use, beyond which all scores are divided by it


class Uses:
    """Calls of a pass come in the order of layers: one with a layer that is not behind the last one's begins a pass."""

    def __init__(self, half_life: int) -> None:
        """half_life: in passes."""
        self._growth = 2.0 ** (1.0 / half_life)
        self._scores: dict[Unit, float] = {}
        self._layer = -1  # of the last call
        self.weight = 1.0  # of a use in this pass

    def __getitem__(self, unit: Unit) -> float:
        """Its score."""
        return self._scores.get(unit, 0.0)

    def add(self, unit: Unit) -> None:
        """It is used in this pass."""
        self._scores[unit] = self[unit] + self.weight

    def is_next_pass(self, layer: int) -> bool:
        """Whether a call with this layer, which is noted, begins a pass."""
        is_next = layer <= self._layer
        self._layer = layer
        return is_next

    def begin_pass(self) -> bool:
        """Let a use weigh more. Returns whether all scores have been divided by a number."""
        self.weight *= self._growth
        if self.weight <= MOST_WEIGHT:
            return False
        self._scores = {unit: score / self.weight for unit, score in self._scores.items()}
        self.weight = 1.0
        return True
