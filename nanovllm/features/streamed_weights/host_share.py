"""Which streamed layers the host multiplies in a decode step, and which are copied to the device. Without torch.

The host multiplies a layer where it lies, while the link copies others. With W bytes per second of the link, H of the
products on the host, K bytes of KV on the link and D seconds of all else, a step takes about

    max((K + copied bytes) / W,  D + multiplied bytes / H)

as the device waits for the host, and both for copies. All rates follow what steps take: H for each power of two of
rows, since more rows take more time for the same bytes.

The formula only proposes. Copies and products share the memory of the host, so that rates differ with the share, and
where copies are what a step waits for, D cannot be seen. So another share is tried in a few steps and kept only if they
are clearly shorter (as `features.cpu_attention.balance` does with its two ways). From each trial the formula learns and
may propose another. Where none is better the pause until the next trial doubles, and a change of the time of steps
ends it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

_CLEARLY = 0.97  # of the time of steps: another share must be that much shorter
_CHANGED = 0.1  # by what share the time of steps differs from that of the last trials, if it has changed
_SMOOTHING = 1 / 4  # weight of a step in rates and times
_SETTLED = 1  # steps of a share before its times count: copies for the share before are on the way
_TRIAL = 3  # steps that count
_MOST_TRIALS = 5  # before the pause
# steps between trials
_PAUSE = 8
_LONGEST_PAUSE = 4096
_HOPELESS = 2.0  # times the time of the kept share: a step of a trial that ends it
_HOPE = 2.0  # by what factor rates may be higher where only the link or only the host reads
_LATE = 1.5  # times the time of steps: what one step counts for at most
_IDLE = 0.9  # of a step: if the link was busy for less, copies are not what it waited for


@dataclass(frozen=True, slots=True)
class StepCost:
    """What a decode step took."""

    rows: int
    seconds: float
    link_bytes: int  # copied to the device: weights, and KV if it shares the link
    link_seconds: float  # in which they were copied
    host_bytes: int  # of weights that the host multiplied
    host_seconds: float  # in which it did, with the ways of activations there and back


@dataclass(frozen=True, slots=True)
class Share:
    """A way to divide the layers. Bytes in a step."""

    host_layers: tuple[int, ...]
    host_bytes: int
    link_bytes: int


@dataclass(slots=True)
class _Rows:
    """What is known of steps with about so many rows."""

    host: float  # bytes per second
    rest: float  # seconds of a step without products on the host and without waiting for copies
    kept: int  # share
    tried: int | None = None  # share, in a trial
    seconds: float | None = None  # of a step with the kept share
    at_trials: float | None = None  # the same when the last trials ended
    counted: list[float] = field(default_factory=list)  # of steps in the trial, or before the first one
    trials: set[int] = field(default_factory=set)  # shares since the pause
    pause: int = _PAUSE
    left: int = 0  # steps of the pause


def shares_of(layer_bytes: Sequence[int]) -> list[Share]:
    """All ways to divide streamed layers, with rising bytes on the host.

    Layer i has the slot i % 2. Copied layers take the slots in turn and lie spread, so that each is copied while others
    are computed. As many layers as there are slots are copied at least: they stay there, which costs nothing.
    """
    num_layers = len(layer_bytes)
    slots = min(2, num_layers - 1)
    shares = []
    for count in sorted({*range(slots, num_layers, 2), num_layers}, reverse=True):
        pairs = (num_layers - count) // 2
        copied = {index + 2 * (index * pairs // count) for index in range(count)}
        host = tuple(index for index in range(num_layers) if index not in copied)
        of_host = sum(layer_bytes[index] for index in host)
        shares.append(Share(host, of_host, 0 if count == slots else sum(layer_bytes) - of_host))
    return shares


class HostShare:
    """The closed loop: which layers the host multiplies, by the times of steps before."""

    def __init__(self, layer_bytes: Sequence[int], link: float, host: float) -> None:
        """layer_bytes: of at least two streamed layers; link, host: the rates at start, bytes per second."""
        self.shares = shares_of(layer_bytes)
        self._link = link
        self._host = host
        self._kv_bytes = 0.0  # on the link in a step
        self._rows: dict[int, _Rows] = {}  # by the number of bits of rows
        self._last: tuple[int, int] | None = None  # rows and share of the last step
        self._same = 0  # steps before it with the same

    def layers(self, rows: int) -> tuple[int, ...]:
        """Indices of the streamed layers, ascending, that the host multiplies in a step of so many rows."""
        state = self._of_rows(rows)
        return self.shares[state.kept if state.tried is None else state.tried].host_layers

    def observe(self, step: StepCost) -> None:
        """Follow a step, which may have been planned some steps ago."""
        state = self._of_rows(step.rows)
        share = min(range(len(self.shares)), key=lambda index: abs(self.shares[index].host_bytes - step.host_bytes))
        here = (step.rows.bit_length(), share)
        self._same = self._same + 1 if here == self._last else 0
        self._last = here
        self._measure(step, state, share)
        if share != (state.kept if state.tried is None else state.tried):
            return
        is_hopeless = state.tried is not None and state.seconds and step.seconds > _HOPELESS * state.seconds
        if self._same < _SETTLED and not is_hopeless:
            return
        if state.tried is None and state.seconds is not None:
            self._stay(step.seconds, state)
        else:
            self._count(step.seconds, state)

    def _of_rows(self, rows: int) -> _Rows:
        bits = rows.bit_length()
        if bits not in self._rows:
            nearest = min(self._rows, key=lambda other: abs(other - bits), default=None)
            known = None if nearest is None else self._rows[nearest]
            state = _Rows(self._host if known is None else known.host, 0.0 if known is None else known.rest, 0)
            state.kept = self._best(state)
            self._rows[bits] = state
        return self._rows[bits]

    def _measure(self, step: StepCost, state: _Rows, share: int) -> None:
        if step.link_bytes and step.link_seconds:
            self._link += _SMOOTHING * (step.link_bytes / step.link_seconds - self._link)
        if step.host_bytes and step.host_seconds:
            state.host += _SMOOTHING * (step.host_bytes / step.host_seconds - state.host)
        kv_bytes = max(0, step.link_bytes - self.shares[share].link_bytes)
        self._kv_bytes += _SMOOTHING * (kv_bytes - self._kv_bytes)
        rest = step.seconds - step.host_seconds  # and waiting for copies
        if rest < state.rest or step.link_seconds < _IDLE * step.seconds:
            state.rest = rest if state.rest == 0.0 else state.rest + _SMOOTHING * (rest - state.rest)

    def _predicted(self, share: Share, state: _Rows, faster: float = 1.0) -> float:
        """Seconds of a step, if rates were that much faster than they are now."""
        link = (self._kv_bytes + share.link_bytes) / (faster * self._link)
        return max(link, state.rest + share.host_bytes / (faster * state.host))

    def _best(self, state: _Rows) -> int:
        return min(range(len(self.shares)), key=lambda index: self._predicted(self.shares[index], state))

    # ---- trials

    def _stay(self, seconds: float, state: _Rows) -> None:
        assert state.seconds is not None and state.at_trials is not None
        seconds = min(seconds, _LATE * state.seconds)
        state.seconds += _SMOOTHING * (seconds - state.seconds)
        if abs(state.seconds / state.at_trials - 1.0) > _CHANGED:
            state.left = 0
            state.pause = _PAUSE
        state.left -= 1
        if state.left <= 0:
            self._try_next(state)

    def _count(self, seconds: float, state: _Rows) -> None:
        state.counted.append(seconds)
        is_hopeless = state.seconds is not None and seconds > _HOPELESS * state.seconds
        if len(state.counted) < _TRIAL and not is_hopeless:
            return
        found = median(state.counted)
        state.counted = []
        if state.seconds is None or found < _CLEARLY * state.seconds:
            state.seconds = found
            state.kept = state.kept if state.tried is None else state.tried
            state.pause = _PAUSE // 2
        self._try_next(state)

    def _try_next(self, state: _Rows) -> None:
        """Begin a trial, or end the trials."""
        state.tried = self._proposal(state)
        if state.tried is not None:
            state.trials.add(state.tried)
            return
        state.trials = set()
        state.at_trials = state.seconds
        state.pause = min(2 * state.pause, _LONGEST_PAUSE)
        state.left = state.pause

    def _proposal(self, state: _Rows) -> int | None:
        """The share that the formula says is best, or the next one if what the formula lacks could make that better."""
        assert state.seconds is not None
        tried = state.trials | {state.kept}
        if len(state.trials) == _MOST_TRIALS:
            return None
        best = self._best(state)
        if best not in tried and self._predicted(self.shares[best], state) < _CLEARLY * state.seconds:
            return best
        for extreme in (0, len(self.shares) - 1):
            if extreme not in tried and self._predicted(self.shares[extreme], state, _HOPE) < _CLEARLY * state.seconds:
                return extreme
        share = self.shares[state.kept]
        waits = (self._kv_bytes + share.link_bytes) / self._link > _IDLE * state.seconds
        following = state.kept + 1 if waits else state.kept - 1
        is_unknown = waits or not share.link_bytes
        return following if is_unknown and 0 <= following < len(self.shares) and following not in tried else None
