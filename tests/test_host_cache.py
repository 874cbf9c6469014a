"""Which units of a file are in which host place: never another than was read there, and those that are used most."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from nanovllm.features.streamed_weights.host_cache import HALF_LIFE, HostCache
from nanovllm.features.streamed_weights.uses import MOST_WEIGHT, Unit

TIMES = int(os.environ.get("NANOVLLM_FUZZ_TIMES", "1"))  # as many examples
LAYERS = 6
EXPERTS = 32
CHOSEN = 4


class Contents(RuleBasedStateMachine):
    """The places beside a model of what was read into them. A unit that is held is not overwritten, and is there."""

    @initialize(places=st.integers(1, 12), data=st.data())
    def begin(self, places: int, data: st.DataObject) -> None:
        self.cache = HostCache(places, data.draw(st.integers(1, places)))
        self.content: dict[int, Unit] = {}  # by place
        self.held = set[Unit]()
        self.num_places = places

    def read(self, unit: Unit, place: int) -> None:
        assert self.content.get(place) not in self.held, "it is used, or being read"
        self.content[place] = unit

    @rule(layer=st.integers(0, 3), chosen=st.sets(st.integers(0, 7), max_size=5))
    def use(self, layer: int, chosen: set[int]) -> None:
        units = [(layer, number) for number in chosen]
        self.cache.use(layer, units)
        assert self.cache.likely(layer) == units

    @rule(layer=st.integers(0, 3), chosen=st.sets(st.integers(0, 7), max_size=5))
    def need(self, layer: int, chosen: set[int]) -> None:
        units = [(layer, number) for number in chosen]
        room = self.cache.num_free
        units = [unit for unit in units if unit in self.held or (room := room - 1) >= 0]
        places, missing = self.cache.need(units)
        assert list(places) == units and len(set(places.values())) == len(units)
        for unit in missing:
            self.read(unit, places[unit])
        assert all(self.content[place] == unit for unit, place in places.items())
        self.held.update(units)

    @rule(layer=st.integers(0, 3), chosen=st.sets(st.integers(0, 7), max_size=5))
    def ahead(self, layer: int, chosen: set[int]) -> None:
        units = [(layer, number) for number in chosen]
        there = set(self.content.values())
        self.held |= there & set(units)
        for unit, place in self.cache.ahead(units).items():
            assert unit not in there
            self.read(unit, place)
            self.held.add(unit)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        units = data.draw(st.sets(st.sampled_from(sorted(self.held)), min_size=1))
        self.cache.release(units)
        self.held -= units

    @rule(data=st.data())
    def reset(self, data: st.DataObject) -> None:
        lost = data.draw(st.sets(st.sampled_from(sorted(self.held)))) if self.held else set()
        self.content = {place: unit for place, unit in self.content.items() if unit not in lost}
        self.cache.reset({unit: place for place, unit in self.content.items()})
        self.held.clear()

    @invariant()
    def places_that_nobody_holds_are_counted(self) -> None:
        if hasattr(self, "cache"):
            assert self.cache.num_free == self.num_places - len(self.held)


TestContents = Contents.TestCase
TestContents.settings = settings(max_examples=50 * TIMES, stateful_step_count=30)


# ---- how often what is used is there


Pass = list[list[int]]  # by layer, the experts that are used


def misses(num_places: int, num_passing: int, passes: Iterable[Pass]) -> int:
    """Units that are read in passes, after the first tenth of them."""
    cache = HostCache(num_places, num_passing)
    counts = []
    for chosen in passes:
        counts.append(0)
        for layer, numbers in enumerate(chosen):
            units = [(layer, number) for number in numbers]
            cache.use(layer, units)
            for some in batched(units, num_passing):
                counts[-1] += len(cache.need(some)[1])
                cache.release(some)
    return sum(counts[len(counts) // 10 :])


def misses_of_last_used(num_places: int, passes: Iterable[Pass]) -> int:
    there: dict[Unit, None] = {}  # the least recently used first
    counts = []
    for chosen in passes:
        counts.append(0)
        for unit in ((layer, number) for layer, numbers in enumerate(chosen) for number in numbers):
            counts[-1] += unit not in there
            there.pop(unit, None)
            there[unit] = None
            if len(there) > num_places:
                del there[next(iter(there))]
    return sum(counts[len(counts) // 10 :])


def least_misses(num_places: int, passes: list[Pass]) -> int:
    """With the units that all passes together use most, which stay for good."""
    rest = passes[len(passes) // 10 :]
    uses = Counter((layer, number) for chosen in rest for layer, numbers in enumerate(chosen) for number in numbers)
    return uses.total() - sum(count for _, count in uses.most_common(num_places))


def batched(units: list[Unit], size: int) -> Iterator[list[Unit]]:
    return (units[begin : begin + size] for begin in range(0, len(units), size))


def topics(num_passes: int, exponent: float, stays: float = 1.0) -> list[Pass]:
    """Experts by Zipf's law in an order of each layer's, which changes with a probability of 1 - stays a pass."""
    random = Random(1)
    weights = [1 / (1 + rank) ** exponent for rank in range(EXPERTS)]
    orders: list[list[int]] = []
    passes = []
    for _ in range(num_passes):
        if not orders or random.random() > stays:
            orders = [random.sample(range(EXPERTS), EXPERTS) for _ in range(LAYERS)]
        drawn = [random.choices(range(EXPERTS), weights, k=CHOSEN) for _ in orders]
        passes.append([sorted({order[rank] for rank in ranks}) for order, ranks in zip(orders, drawn, strict=True)])
    return passes


PLACES = LAYERS * EXPERTS // 4
PASSING = PLACES // 8


def test_units_that_are_used_in_a_cycle_do_not_drive_each_other_out() -> None:
    cycle = [[list(range(EXPERTS))] * LAYERS] * 20
    used = LAYERS * EXPERTS * 18
    assert misses_of_last_used(PLACES, cycle) == used
    assert misses(PLACES, PASSING, cycle) == used - (PLACES - PASSING) * 18, "kept ones stay"
    assert misses(2, 2, [[[0]] * 5] * 20) == 5 * 18, "layers pass"


@pytest.mark.parametrize(
    ("passes", "of_last_used", "of_best"),
    [
        (topics(600, 1.2), 0.78, 1.16),
        (topics(600, 0.7), 0.84, 1.15),
        (topics(600, 1.2, stays=0.98), 0.94, 0.82),
        (topics(600, 0.0), 1.02, 1.10),
    ],
    ids=["few experts are used most", "some are used more", "topics change", "all are used alike"],
)
def test_what_is_used_most_is_there(passes: list[Pass], of_last_used: float, of_best: float) -> None:
    """With a quarter of the experts."""
    mine = misses(PLACES, PASSING, passes)
    assert mine <= of_last_used * misses_of_last_used(PLACES, passes)
    assert mine <= of_best * least_misses(PLACES, passes)


def test_a_prompt_that_reads_all_drives_no_unit_out_that_is_kept() -> None:
    cache = HostCache(PLACES, PASSING)
    everything = [(layer, number) for layer in range(LAYERS) for number in range(EXPERTS)]
    some = everything[: PLACES - PASSING]
    for read in (some, everything):
        for units in batched(read, PASSING):
            cache.need(units)
            cache.release(units)
    for units in batched(some, PASSING):
        assert cache.need(units)[1] == []
        cache.release(units)


def test_worth_is_counted_on_for_any_number_of_passes() -> None:
    cache = HostCache(2, 1)
    read = Counter[Unit]()
    for number in range(10_000):
        for unit in ((0, 0), (1, number % 5)):
            cache.use(unit[0], [unit])
            read.update(cache.need([unit])[1])
            cache.release([unit])
    assert read[0, 0] == 1 and read[1, 0] == 2_000
    assert cache._worth.weight <= MOST_WEIGHT < 2 ** (10_000 / HALF_LIFE) and len(cache._least) == 1
