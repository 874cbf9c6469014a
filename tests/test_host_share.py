"""How streamed layers are divided between link and host: the closed loop on a simulated machine with its own clock."""

from __future__ import annotations

import os
from collections import deque
from dataclasses import dataclass, field, replace
from itertools import pairwise, product
from random import Random
from statistics import fmean

import pytest
from fast import fast_only
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.features.streamed_weights.host_share import HostShare, StepCost, shares_of

TIMES = int(os.environ.get("NANOVLLM_FUZZ_TIMES", "1"))  # as many examples
GIB = 1 << 30
LAYER = GIB // 4
LAYERS = 32
FOUND = 60  # steps after which the share has been found


@dataclass
class Machine:
    """Decode steps, one after the other, as `WeightStream` orders them: copies run ahead as far as slots are free.

    link, host: bytes per second, alone. shared: rates of both are multiplied by it where they read weights at the same
    time. rest: seconds of a step on the device; kv: its bytes on the link. noise: relative, of each copy and product.
    """

    link: float
    host: float
    rest: float
    kv: int = 0
    shared: float = 1.0
    noise: float = 0.0
    layer_bytes: list[int] = field(default_factory=lambda: [LAYER] * LAYERS)
    random: Random = field(default_factory=lambda: Random(1))

    def __post_init__(self) -> None:
        self.held: list[int | None] = [None, None]  # the layer of each slot
        self.used = [0.0, 0.0]  # when its layer was computed
        self.ready = [0.0, 0.0]  # when it was copied
        self.now = 0.0
        self.link_free = 0.0
        self.kv_ready = 0.0

    def step(self, host_layers: tuple[int, ...], rows: int = 1) -> StepCost:
        copied = [layer for layer in range(len(self.layer_bytes)) if layer not in host_layers]
        both = self.shared if host_layers and len(copied) > 2 else 1.0
        self.rate = self.link * both
        self.copies: list[tuple[int, float]] = []
        begin = self.now
        multiplying = 0.0
        for layer, num_bytes in enumerate(self.layer_bytes):
            self.now = max(self.now, self.kv_ready)
            self.kv_ready = self._copy(self.kv // len(self.layer_bytes), self.now)
            if layer in copied:
                self._load(layer)
            following = [*(one for one in copied if one > layer), *copied]
            for ahead in following[: 1 if layer in copied else 2]:
                if layer not in copied or ahead % 2 != layer % 2:
                    self._load(ahead)
            if layer in copied:
                self.now = max(self.now, self.ready[layer % 2])
            else:
                seconds = num_bytes / (self.host * both) * self._late()
                multiplying += seconds
                self.now += seconds
            self.now += self.rest / len(self.layer_bytes)
            if layer in copied:
                self.used[layer % 2] = self.now
        host_bytes = sum(self.layer_bytes[layer] for layer in host_layers)
        link_bytes = sum(num_bytes for num_bytes, _ in self.copies)
        link_seconds = sum(seconds for _, seconds in self.copies)
        return StepCost(rows, self.now - begin, link_bytes, link_seconds, host_bytes, multiplying)

    def _load(self, layer: int) -> None:
        slot = layer % 2
        if self.held[slot] != layer:
            self.held[slot] = layer
            self.ready[slot] = self._copy(self.layer_bytes[layer], max(self.now, self.used[slot]))

    def _copy(self, num_bytes: int, earliest: float) -> float:
        if num_bytes:
            seconds = num_bytes / self.rate * self._late()
            self.link_free = max(self.link_free, earliest) + seconds
            self.copies.append((num_bytes, seconds))
        return self.link_free if num_bytes else 0.0

    def _late(self) -> float:
        return 1 + self.noise * abs(self.random.gauss(0, 1))

    def seconds(self, host_layers: tuple[int, ...]) -> float:
        """Of a step, on average, once its layers are on the way."""
        return fmean([self.step(host_layers).seconds for _ in range(20 if self.noise else 6)][3:])

    def best(self) -> tuple[int, ...]:
        return min((share.host_layers for share in shares_of(self.layer_bytes)), key=self.seconds)


def policy_for(machine: Machine, wrong: float = 1.0) -> HostShare:
    """wrong: by what factor the host's rate at start is wrong."""
    return HostShare(machine.layer_bytes, machine.link, machine.host * wrong)


def run(machine: Machine, policy: HostShare, steps: int, rows: int = 1, late: int = 0) -> tuple[list[float], list[int]]:
    """The seconds of each step, and how many layers the host multiplied. late: steps until the policy knows of one."""
    seconds = []
    counts = []
    costs: deque[StepCost] = deque()
    for _ in range(steps):
        host_layers = policy.layers(rows)
        costs.append(machine.step(host_layers, rows))
        seconds.append(costs[-1].seconds)
        if len(costs) > late:
            policy.observe(costs.popleft())
        counts.append(len(host_layers))
    return seconds, counts


# ---- shares


@given(st.lists(st.integers(1, 9), min_size=2, max_size=60))
def test_copied_layers_have_the_slots_in_turn_and_lie_spread(layer_bytes: list[int]) -> None:
    shares = shares_of(layer_bytes)
    num_layers = len(layer_bytes)
    assert shares[0].host_layers == () and len(shares[-1].host_layers) == max(1, num_layers - 2)
    for fewer, more in pairwise(shares):
        assert 1 <= len(more.host_layers) - len(fewer.host_layers) <= 2
    for share in shares[1:]:
        copied = [layer for layer in range(num_layers) if layer not in share.host_layers]
        assert [layer % 2 for layer in copied] == [index % 2 for index in range(len(copied))]
        assert len(copied) % 2 == 0 or num_layers == 2
        of_copied = sum(layer_bytes[layer] for layer in copied)
        assert share.link_bytes == (of_copied if len(copied) > 2 else 0), "two layers keep their slots"
        distances = [after - before for before, after in pairwise(copied)]
        for width in range(1, len(distances)):
            sums = [sum(distances[begin : begin + width]) for begin in range(len(distances) - width + 1)]
            assert max(sums) - min(sums) <= 2


# ---- the closed loop


MACHINES = list(
    product(
        (6e9, 25e9, 50e9), (10e9, 40e9, 150e9), (2e-3, 30e-3, 200e-3), (0, 2 * GIB), (1.0, 0.6), (0.0, 0.05), (0.2, 5.0)
    )
)


@pytest.mark.parametrize(
    ("link", "host", "rest", "kv", "shared", "noise", "wrong"), fast_only(MACHINES[::31], MACHINES)
)
def test_the_share_is_found_in_some_steps(
    link: float, host: float, rest: float, kv: int, shared: float, noise: float, wrong: float
) -> None:
    """Trials cost a little more until their pauses are long."""
    machine = Machine(link, host, rest, kv, shared, noise)
    best = machine.seconds(machine.best())
    seconds, _ = run(machine, policy_for(machine, wrong), 300)
    assert fmean(seconds[FOUND:]) <= 1.15 * best


def test_most_machines_take_little_more_than_with_the_best_share() -> None:
    found = []
    for link, host, rest, kv, shared, noise, wrong in MACHINES[::13]:
        machine = Machine(link, host, rest, kv, shared, noise)
        best = machine.seconds(machine.best())
        seconds, _ = run(machine, policy_for(machine, wrong), 300)
        found.append(fmean(seconds[FOUND:]) / best)
    assert fmean(found) < 1.03


RATE = st.floats(9.5, 11.5).map(lambda exponent: 10**exponent)


@given(
    RATE,
    RATE,
    st.floats(1e-3, 0.3),
    st.integers(0, 4 * GIB),
    st.floats(0.5, 1.0),
    st.floats(0.1, 10),
    st.integers(3, 40),
)
@settings(max_examples=20 * TIMES)
def test_any_rates_are_followed(
    link: float, host: float, rest: float, kv: int, shared: float, wrong: float, num_layers: int
) -> None:
    machine = Machine(link, host, rest, kv, shared, layer_bytes=[LAYER] * num_layers)
    best = machine.seconds(machine.best())
    seconds, _ = run(machine, policy_for(machine, wrong), 300)
    assert fmean(seconds[200:]) <= 1.25 * best


@pytest.mark.parametrize(("link", "host", "layers"), [(1e9, 200e9, LAYERS - 2), (200e9, 1e9, 0)])
def test_a_way_that_does_not_pay_is_left_and_tried_rarely(link: float, host: float, layers: int) -> None:
    machine = Machine(link, host, 5e-3, noise=0.05)
    seconds, counts = run(machine, policy_for(machine), 2000)
    assert sum(count != layers for count in counts[100:]) < 60
    assert fmean(seconds[100:]) <= 1.1 * machine.seconds(machine.best())


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_the_share_keeps_still(noise: float) -> None:
    """But for trials, of which there are fewer and fewer."""
    machine = Machine(25e9, 60e9, 20e-3, noise=noise)
    policy = policy_for(machine)
    run(machine, policy, FOUND)
    _, counts = run(machine, policy, 1000)
    usual = max(set(counts), key=counts.count)
    assert counts.count(usual) > 900 and counts[-400:].count(usual) > 370


def test_other_load_and_its_end_are_followed() -> None:
    machine = Machine(25e9, 100e9, 20e-3, noise=0.03)
    policy = policy_for(machine)
    run(machine, policy, 300)
    for host in (15e9, 100e9):  # other processes take the cores, and end
        machine.host = host
        run(machine, policy, FOUND)
        seconds, _ = run(machine, policy, 100)
        assert fmean(seconds) <= 1.15 * machine.seconds(machine.best())


def test_one_slow_step_changes_nothing() -> None:
    machine = Machine(25e9, 60e9, 20e-3)
    policy = policy_for(machine)
    _, counts = run(machine, policy, 200)
    (usual,) = set(counts[-20:])
    cost = machine.step(policy.layers(1))
    policy.observe(replace(cost, seconds=100 * cost.seconds))
    _, counts = run(machine, policy, 20)
    assert counts.count(usual) == 20


def test_steps_may_be_known_late() -> None:
    machine = Machine(25e9, 60e9, 20e-3, noise=0.03)
    seconds, _ = run(machine, policy_for(machine, 5.0), 400, late=4)
    assert fmean(seconds[150:]) <= 1.1 * machine.seconds(machine.best())


def test_numbers_of_rows_have_rates_of_their_own() -> None:
    """16 rows take eight times as long on the host. What is known of one row is where 16 begin."""
    machine = Machine(25e9, 100e9, 20e-3)
    policy = policy_for(machine, 0.5)
    _, of_one = run(machine, policy, 200)
    assert len(policy.layers(2)) > 0.7 * of_one[-1]
    machine.host /= 8
    seconds, of_many = run(machine, policy, 200, rows=16)
    assert fmean(seconds[FOUND:]) <= 1.15 * machine.seconds(machine.best())
    machine.host *= 8
    assert of_many[-1] < of_one[-1] == len(policy.layers(1))


def test_layers_of_other_sizes_are_counted_by_their_bytes() -> None:
    sizes = [LAYER * (1 + layer % 3) for layer in range(LAYERS)]
    machine = Machine(25e9, 60e9, 20e-3, layer_bytes=sizes)
    seconds, _ = run(machine, policy_for(machine), 300)
    assert fmean(seconds[FOUND:]) <= 1.15 * machine.seconds(machine.best())
