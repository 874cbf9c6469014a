"""Which experts the device keeps: those that are used most. A policy of numbers.

The score of an expert is that of `uses`, with a half-life of HALF_LIFE passes.

A pass takes the layers in turn. Uses count from the next pass on, so that experts of all layers are compared by the
same passes. If uses counted at once, or the least recently used expert gave way, the experts of the next layers would
be the first to go, and a cache that is too small for a pass would never have what is asked for.

Where every expert must come to the device when it is chosen, a place costs nothing more, and the next token often
chooses the same experts again: a newcomer stays until its layer has had its next turn, whatever its score. Where
newcomers are copied behind, a copy has to pay: the score of the newcomer must be larger than could be by chance.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Set
from heapq import heapify, heappop, heappush, heapreplace

from nanovllm.features.streamed_weights.uses import Unit, Uses

Expert = Unit

HALF_LIFE = 64  # passes
NEWCOMERS_SHARE = 4  # of 1 / NEWCOMERS_SHARE of the places newcomers may stay whatever their scores are
CLEARLY = 1.5  # by how many roots of their sum one score must exceed the other: 2.1 standard deviations


class UsedMost:
    """Places for experts, of which the one with the least score gives way to another.

    Calls of a pass come in the order of layers, see `Uses`.
    """

    def __init__(self, num_places: int) -> None:
        self._num_places = num_places
        self._uses = Uses(HALF_LIFE)
        self._used: list[Expert] = []  # in this pass
        self._layer = -1  # of the last call
        self.clear()

    def clear(self) -> None:
        """No place has an expert now. How much each was used stays known."""
        self._free = list(range(self._num_places))
        self._places: dict[Expert, int] = {}
        self._coming: set[Expert] = set()  # of those with a place: whose copies are not done
        self._newcomers: dict[int, list[Expert]] = {}  # by layer, those that may stay
        # The others that have a place, each with its score or an earlier one.
        self._heap: list[tuple[float, Expert]] = []

    def take(self, experts: Iterable[Expert]) -> tuple[dict[Expert, int], list[Expert]]:
        """The places of experts that are used together, at most as many as there are places, and which of them must be
        brought there.

        Whoever uses the places waits for all copies that `follow` has asked for too: none is on its way any more.
        """
        used = dict.fromkeys(experts)
        assert len(used) <= self._num_places
        self._count(used.keys())
        self._coming.clear()
        missing = [expert for expert in used if expert not in self._places]
        for expert in missing:
            self._places[expert] = self._free.pop() if self._free else self._freed(used.keys())
            newcomers = self._newcomers.setdefault(expert[0], [])
            newcomers.append(expert)
            if sum(map(len, self._newcomers.values())) * NEWCOMERS_SHARE > self._num_places:
                self._rank(newcomers.pop())
        return {expert: self._places[expert] for expert in used}, missing

    def follow(self, experts: Iterable[Expert], most: int) -> tuple[dict[Expert, int], list[tuple[Expert, int]]]:
        """The places of those that are there, of experts that are used together; and new experts with their places.

        At most `most` new ones are to be copied to their places behind the pass. What was there is gone; they are on
        their way until `arrived`. No place of the used experts is taken, and none that waits for a copy.
        """
        used = dict.fromkeys(experts)
        self._count(used.keys())
        there = {expert: place for expert in used if (place := self._places.get(expert)) is not None}
        missing = sorted(used.keys() - there, key=lambda expert: (-self._uses[expert], expert))
        replacements = []
        for expert in missing[:most]:
            if not self._free and not self._gives_way_to(expert, used.keys()):
                break
            place = self._free.pop()
            self._places[expert] = place
            self._coming.add(expert)
            self._rank(expert)
            replacements.append((expert, place))
        return {expert: place for expert, place in there.items() if expert not in self._coming}, replacements

    def arrived(self, expert: Expert) -> None:
        """The copy of an expert that was on its way is done."""
        self._coming.discard(expert)

    # ---- scores

    def _count(self, used: Set[Expert]) -> None:
        self._layer = layer = min(used)[0]
        if self._uses.is_next_pass(layer):
            self._begin_pass()
        self._used += used
        for expert in self._newcomers.pop(layer, ()):
            self._rank(expert)

    def _begin_pass(self) -> None:
        for expert in self._used:
            self._uses.add(expert)
        self._used = []
        if self._uses.begin_pass():
            self._heap = [(self._uses[expert], expert) for _, expert in self._heap]
            heapify(self._heap)

    def _rank(self, expert: Expert) -> None:
        heappush(self._heap, (self._uses[expert], expert))

    # ---- places

    def _freed(self, used: Set[Expert]) -> int:
        """A place of another expert, which gives way."""
        least = self._pop_least(used)
        if least is None:  # all others are newcomers
            for layer in [layer for layer in self._newcomers if layer != self._layer]:
                for expert in self._newcomers.pop(layer):
                    self._rank(expert)
            least = self._pop_least(used)
        assert least is not None
        return self._places.pop(least)

    def _gives_way_to(self, expert: Expert, used: Set[Expert]) -> bool:
        """Whether the expert with the least score has given its place up for one that is used clearly more."""
        score = self._uses[expert]
        if not self._heap or not self._is_clearly_more(score, self._heap[0][0]):
            return False
        least = self._pop_least(used)
        if least is None:
            return False
        if self._is_clearly_more(score, self._uses[least]):
            self._free.append(self._places.pop(least))
            return True
        self._rank(least)
        return False

    def _is_clearly_more(self, score: float, other: float) -> bool:
        return score - other > CLEARLY * math.sqrt((score + other) * self._uses.weight)

    def _pop_least(self, kept: Set[Expert]) -> Expert | None:
        """The ranked expert with the least score, except those that are kept or on their way; None if there is none."""
        aside = []
        least = None
        while self._heap and least is None:
            known, expert = self._heap[0]
            score = self._uses[expert]
            if score > known:  # it was used since it was put here; scores never shrink
                heapreplace(self._heap, (score, expert))
                continue
            entry = heappop(self._heap)
            if expert in kept or expert in self._coming:
                aside.append(entry)
            else:
                least = expert
        for entry in aside:
            heappush(self._heap, entry)
        return least
