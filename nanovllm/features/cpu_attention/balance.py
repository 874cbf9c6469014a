"""The share of CPU attention as a closed loop: it follows the measured times of decode steps. Without torch.

Measured bandwidths only say where it begins. A layer is shortest where the CPU's part and the device's part end
together (`shares.py` has the formula), and both ends are seen. The time by which one of them ended later corrects the
rate at which CPU attention seems to read. That rate then contains all that the formula leaves out: threads that wake
up, memory that the link reads as well, other work on the machine. A correction is bounded. The bound shrinks when the
sign changes and grows while it stays (as in Rprop: Riedmiller and Braun, 1993), so that neither a wrong beginning nor a
single late step leads it astray.

Where CPU attention does not pay at all, no share does. There are two ways of a step: to share the host blocks with the
CPU, or to stream all of them. Where shared steps are not clearly shorter than streaming would take, a few steps stream,
and the faster way goes on. The other way is tried again after a pause, which doubles each time that it loses.
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
# the ways of a step
_SHARED = "shared"
_STREAMED = "streamed"
_TRIAL = {_SHARED: 12, _STREAMED: 4}  # steps of a trial: sharing has to find its share
_SMOOTHING = 1 / 4  # weight of a step in the time of a way
_NO_DOUBT = 0.85  # of the time that the link would need alone
_HOPELESS = 2.0  # times the time of streaming: a shared step of a trial that ends it
_CLEARLY = 0.97  # of the time of sharing: streaming must be that much shorter
_BEGINNING = 16  # steps before the first doubt
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
        self._weight_bytes = weight_bytes
        self._bound = _FIRST  # of the next correction
        self._was_late = False  # the CPU's part, in the step before
        self._seconds: dict[str, float] = {}  # of each way, for a byte on the host
        self._way = _SHARED
        self._is_trial = False
        self._pause = _PAUSE  # steps
        self._left = _BEGINNING  # steps until a way is chosen

    def blocks_for_cpu_attention(self, load: LayerLoad) -> int:
        if self._way == _STREAMED:
            return 0
        load = replace(load, weight_bytes=self._weight_bytes)
        # Where one block is too many and none too few, both parts never end together. A trial shows what is faster.
        least = min(1, blocks_for_cpu_attention(load, self._at_start))
        return max(least, blocks_for_cpu_attention(load, self.rates))

    def observe(self, step: StepTimes) -> None:
        """Follow a step, which may have been planned some steps ago."""
        way = _SHARED if step.cpu_bytes else _STREAMED
        seconds = step.seconds / step.host_bytes
        smoothed = self._seconds.get(way, seconds)
        self._seconds[way] = smoothed + _SMOOTHING * (seconds - smoothed)
        if way == _SHARED:
            self._correct(step.late / step.cpu_bytes)
        self._left -= 1
        is_hopeless = way == _SHARED and seconds > _HOPELESS * self._seconds.get(_STREAMED, seconds)
        if self._left <= 0 or (self._is_trial and is_hopeless):
            self._choose_way()

    def _correct(self, late: float) -> None:
        """late: seconds for each byte that the CPU read."""
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
        shared = self._seconds.get(_SHARED)
        if self._is_trial:
            streams = shared is None or self._seconds.get(_STREAMED, shared) < _CLEARLY * shared
            faster = _STREAMED if streams else _SHARED
            self._pause = _PAUSE if faster == self._way else min(2 * self._pause, _LONGEST_PAUSE)
            self._way = faster
            self._is_trial = False
            self._left = self._pause
        elif self._way == _SHARED and shared is not None and shared * self._at_start.link < _NO_DOUBT:
            self._left = self._pause
            del self._seconds[_SHARED]  # so that it is that of the next steps when it is asked for again
        else:
            self._begin_trial(_STREAMED if self._way == _SHARED else _SHARED)

    def _begin_trial(self, way: str) -> None:
        self._way = way
        self._is_trial = True
        self._left = _TRIAL[way]
        self._seconds.pop(way, None)
        if way == _SHARED:
            host = math.sqrt(self.rates.host * self._at_start.host)  # it lost with the one or the other
            self.rates = replace(self.rates, host=host)
            self._bound = _FIRST
