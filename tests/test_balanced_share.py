"""The closed loop of CPU attention's share, on a simulated machine with a clock of its own."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product
from random import Random
from statistics import fmean

import pytest
from fast import fast_only

from nanovllm.features.cpu_attention.balance import BalancedShare, StepTimes
from nanovllm.features.cpu_attention.shares import Bandwidths, HostRead, LayerLoad

BLOCK = 4 << 20  # bytes of one layer
LAYERS = 12
DEVICE = 3e12  # bytes per second of attention on the device
WEIGHTS = 100e-6 * DEVICE  # bytes of a layer
LAUNCH = 20e-6
FOUND = 40  # steps after which the share has been found


@dataclass
class Machine:
    """Link and CPU read the same memory, which divides its rate where both want more than it has.

    The link loads ahead of computation by one layer, as the ring lets it. Rates in bytes per second, times in seconds.
    """

    link: float
    host: float
    memory: float
    round_trip: float
    noise: float = 0.0  # relative, of the time of each part of a layer
    blocks: int = 29
    random: Random = field(default_factory=lambda: Random(1))

    def step(self, for_cpu: int) -> StepTimes:
        """A decode step that leaves so many blocks of each layer to the CPU."""
        streamed = (self.blocks - for_cpu) * BLOCK
        attended = for_cpu * BLOCK
        loading, attending = self._beside_each_other(streamed, attended)
        ends = [0.0]
        loaded = 0.0
        begun = 0.0
        late = []
        for _ in range(LAYERS):
            queries = ends[-1] + WEIGHTS / DEVICE
            loaded = max(loaded, begun) + loading * self._late()
            begun = queries
            device = max(loaded, queries) + LAUNCH + streamed / DEVICE
            cpu = queries + self.round_trip * self._late() + attending * self._late()
            late.append(cpu - device)
            ends.append(max(device, cpu) if for_cpu else device)
        host_bytes = LAYERS * self.blocks * BLOCK
        return StepTimes(ends[-1], host_bytes, attended, self.random.choice(late[1:]) if for_cpu else 0.0)

    def seconds(self, for_cpu: int) -> float:
        """Of a step, on average."""
        return fmean(self.step(for_cpu).seconds for _ in range(20 if self.noise else 1))

    def best(self) -> int:
        return min(range(self.blocks + 1), key=self.seconds)

    def _late(self) -> float:
        return 1 + self.noise * abs(self.random.gauss(0, 1))

    def _beside_each_other(self, streamed: int, attended: int) -> tuple[float, float]:
        """Seconds of loading and of attending, of which the longer one ends alone."""
        share = min(1.0, self.memory / (self.link + self.host))
        loading = streamed / (self.link * share)
        attending = attended / (self.host * share)
        both = min(loading, attending)
        return both + (loading - both) * share, both + (attending - both) * share


def policy_for(machine: Machine, wrong: float = 1.0) -> BalancedShare:
    """wrong: by what factor the CPU's rate at start is wrong."""
    rates = Bandwidths(machine.link, machine.host * wrong, DEVICE)
    return BalancedShare(rates, int(WEIGHTS))


def run(machine: Machine, policy: BalancedShare, steps: int) -> tuple[list[float], list[int]]:
    """The seconds of each step, and the blocks that it left to the CPU."""
    seconds = []
    shares = []
    for _ in range(steps):
        shares.append(policy.blocks_for_cpu_attention(LayerLoad([HostRead(BLOCK)] * machine.blocks)))
        times = machine.step(shares[-1])
        policy.observe(times)
        seconds.append(times.seconds)
    return seconds, shares


MACHINES = list(
    product((25e9, 50e9), (20e9, 60e9, 150e9), (20e-6, 200e-6), (1.0, 1.3, 9.0), (0.0, 0.1), (0.25, 1.0, 4.0))
)


@pytest.mark.parametrize(
    ("link", "host", "round_trip", "shared", "noise", "wrong"), fast_only(MACHINES[::17], MACHINES)
)
def test_the_share_is_found_in_some_steps(
    link: float, host: float, round_trip: float, shared: float, noise: float, wrong: float
) -> None:
    """Within a tenth of the best time, and of the best share where shares differ; shared: memory rate / CPU's."""
    machine = Machine(link, host, max(link, host * shared), round_trip, noise)
    best = machine.best()
    streamed = machine.seconds(0)
    seconds, shares = run(machine, policy_for(machine, wrong), 250)
    found = fmean(seconds[FOUND:])
    assert found <= 1.1 * machine.seconds(best) and found <= 1.05 * streamed
    if machine.seconds(best) < 0.9 * streamed:
        assert abs(fmean(shares[FOUND:]) - best) <= 0.1 * machine.blocks


@pytest.mark.parametrize(("host", "round_trip"), [(4e9, 60e-6), (150e9, 5e-3)])
def test_cpu_attention_that_does_not_pay_is_left_and_tried_rarely(host: float, round_trip: float) -> None:
    machine = Machine(50e9, host, 400e9, round_trip, noise=0.05)
    policy = policy_for(machine, 50e9 / host)
    seconds, shares = run(machine, policy, 2000)
    assert fmean(seconds[100:]) <= 1.05 * machine.seconds(0)
    assert 0 < sum(share > 0 for share in shares[100:]) <= 0.1 * 1900


def test_a_memory_that_both_wear_out_is_left_to_the_link() -> None:
    """Both parts end together, and loading everything is faster still: only steps without CPU attention show it."""
    machine = Machine(50e9, 50e9, 40e9, 60e-6, noise=0.02)
    machine._beside_each_other = lambda streamed, attended: (  # type: ignore[method-assign]
        (streamed / 15e9, attended / 15e9) if streamed and attended else (streamed / 50e9, attended / 15e9)
    )
    seconds, shares = run(machine, policy_for(machine), 2000)
    assert machine.seconds(machine.best()) >= 0.99 * machine.seconds(0)
    assert fmean(seconds[100:]) <= 1.05 * machine.seconds(0) and shares.count(0) > 1500


def test_other_load_and_its_end_are_followed() -> None:
    machine = Machine(50e9, 150e9, 400e9, 60e-6, noise=0.05)
    policy = policy_for(machine)
    run(machine, policy, 100)
    machine.host = 30e9  # other processes take the cores
    run(machine, policy, FOUND)
    seconds, _ = run(machine, policy, 100)
    assert fmean(seconds) <= 1.1 * machine.seconds(machine.best())
    machine.host = 150e9
    run(machine, policy, FOUND)
    seconds, _ = run(machine, policy, 100)
    assert fmean(seconds) <= 1.1 * machine.seconds(machine.best())


@pytest.mark.parametrize("blocks", [4, 12, 200])
def test_longer_and_shorter_contexts_are_followed(blocks: int) -> None:
    machine = Machine(50e9, 100e9, 150e9, 120e-6, noise=0.05)
    policy = policy_for(machine)
    run(machine, policy, 100)
    machine.blocks = blocks
    run(machine, policy, FOUND)
    seconds, _ = run(machine, policy, 100)
    assert fmean(seconds) <= 1.1 * machine.seconds(machine.best())


def test_one_late_step_moves_the_share_little() -> None:
    machine = Machine(50e9, 100e9, 400e9, 60e-6)
    policy = policy_for(machine)
    _, shares = run(machine, policy, 100)
    policy.observe(StepTimes(1.0, LAYERS * machine.blocks * BLOCK, shares[-1] * BLOCK, late=1.0))
    _, after = run(machine, policy, 20)
    assert max(abs(share - shares[-1]) for share in after) <= 3
