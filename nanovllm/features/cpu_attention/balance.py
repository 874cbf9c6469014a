"""The share of CPU attention as a closed loop: it follows the measured times of decode steps. Without torch.

Measured bandwidths only say where it begins. A layer is shortest where the CPU's part and the device's part end
together (`shares.py` has the formula), and both ends are seen. The time by which one of them ended later corrects the
rate at which CPU attention seems to read from outside, with all that the formula leaves out: threads that wake up,
memory that the link reads as well, other work on the machine. A correction is bounded, by less after its sign has
changed and by more as long as it stays (as in Rprop: Riedmiller and Braun, 1993), so that neither a wrong beginning nor
a single late step leads it astray.

Where CPU attention does not pay at all, no share does. So where steps are not clearly shorter than loading everything
would take, a few of them load everything, and the faster way goes on. The other way is tried again after a while, and
after twice as long each time that it loses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from nanovllm.features.cpu_attention.shares import Bandwidths, LayerLoad, blocks_for_cpu_attention

_GAIN = 0.5  # of the correction that would make both parts end together
# bounds of a correction, relative to the rate
_LEAST = 1 / 32
_FIRST = 1 / 4
_MOST = 1 / 2
_FARTHEST = 16.0  # a rate stays within this factor of the one measured at start
_SMOOTHING = 1 / 4  # weight of a step in the time of a way
_NO_DOUBT = 0.85  # of the time that the link would need alone
_HOPELESS = 2.0  # times the time of loading everything: a step of a trial that ends it
_CLEARLY = 0.97  # of the other way's time: loading everything must be that much shorter
_BEGINNING = 16  # steps before the first doubt
_TRIAL = {True: 4, False: 12}  # steps of a trial: of loading everything; of CPU attention, which has to find its share
# steps between trials
_PAUSE = 128
_LONGEST_PAUSE = 4096


@dataclass(frozen=True, slots=True)
class StepTimes:
    """What a decode step took, by the device's clock."""

    seconds: float  # from the first layer's queries to the end of the last layer's attention
    host_bytes: int  # KV on the host, of all layers: loaded, or attended there
    cpu_bytes: int  # that CPU attention read in the layer of `late`; 0 without CPU attention
    late: float = 0.0  # seconds by which the CPU's part of a layer ended after the device's; negative if before


class BalancedShare:
    """The share of a layer's host blocks for the CPU that minimises the layer's time."""

    def __init__(self, rates: Bandwidths, weight_bytes: int) -> None:
        """rates: measured at start; weight_bytes: of a layer."""
        self.rates = rates  # of which `host` is corrected
        self._at_start = rates
        self._link_alone = rates.link_alone or rates.link
        self._weight_bytes = weight_bytes
        self._bound = _FIRST
        self._was_late = False
        self._seconds: dict[bool, float] = {}  # per byte on the host: with CPU attention, and loading everything
        self._loads_all = False
        self._is_trial = False
        # steps
        self._pause = _PAUSE
        self._left = _BEGINNING

    def blocks_for_cpu_attention(self, load: LayerLoad) -> int:
        if self._loads_all:
            return 0
        load = replace(load, weight_bytes=self._weight_bytes)
        # Where one block is too many and none too few, both parts never end together. A trial shows what is faster.
        least = min(1, blocks_for_cpu_attention(load, self._at_start))
        return max(least, blocks_for_cpu_attention(load, self.rates))

    def observe(self, step: StepTimes) -> None:
        """Follow a step, which may have been planned some steps ago."""
        way = step.cpu_bytes > 0
        seconds = step.seconds / step.host_bytes
        smoothed = self._seconds.get(way, seconds)
        self._seconds[way] = smoothed + _SMOOTHING * (seconds - smoothed)
        if step.cpu_bytes:
            self._correct(step.late / step.cpu_bytes)
        self._left -= 1
        if self._left <= 0 or (self._is_trial and way and seconds > _HOPELESS * self._seconds.get(False, seconds)):
            self._choose_way()

    def _correct(self, late: float) -> None:
        """late: of each byte that the CPU read."""
        is_late = late > 0
        self._bound = min(self._bound * 1.25, _MOST) if is_late == self._was_late else max(self._bound / 2, _LEAST)
        self._was_late = is_late
        factor = 1 + _GAIN * late * self.rates.host  # of the seconds of a byte
        factor = min(max(factor, 1 / (1 + self._bound)), 1 + self._bound)
        start = self._at_start.host
        host = min(max(self.rates.host / factor, start / _FARTHEST), start * _FARTHEST)
        self.rates = replace(self.rates, host=host)

    def _choose_way(self) -> None:
        """End a trial with the faster way, or begin one if there is doubt."""
        with_cpu = self._seconds.get(True)
        if self._is_trial:
            loads_all = with_cpu is None or self._seconds.get(False, with_cpu) < _CLEARLY * with_cpu
            self._pause = _PAUSE if loads_all == self._loads_all else min(2 * self._pause, _LONGEST_PAUSE)
            self._loads_all = loads_all
            self._is_trial = False
            self._left = self._pause
        elif not self._loads_all and with_cpu is not None and with_cpu * self._link_alone < _NO_DOUBT:
            self._left = self._pause
            del self._seconds[True]  # so that it is that of the next steps when it is asked for again
        else:
            self._loads_all = not self._loads_all
            self._is_trial = True
            self._left = _TRIAL[self._loads_all]
            self._seconds.pop(not self._loads_all, None)
            if not self._loads_all:
                host = math.sqrt(self.rates.host * self._at_start.host)  # it lost with the one or the other
                self.rates = replace(self.rates, host=host)
                self._bound = _FIRST
