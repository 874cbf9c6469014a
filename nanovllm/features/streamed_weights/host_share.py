"""Which streamed layers the host multiplies in a decode step, and which are copied to the device. Without torch.

The host multiplies a layer where it lies, while the link copies others. With W bytes per second of the link, H of the
products on the host, K bytes of KV on the link and D seconds of all else, a step takes about

    max((K + copied bytes) / W,  D + multiplied bytes / H)

since the device waits for the host, and for copies. K and the rates follow what steps take, H for each power of two of
rows: more rows take longer for the same bytes.

The formula only proposes. Copies and products share the memory of the host, so that their rates depend on the share; D
is not seen in steps that wait for copies; and two slots do not hide all copies. So another share is tried for a few
steps, and kept if they are clearly shorter. From each trial the formula learns, and may propose another one. Also tried
are the shares beside the kept one, and all or no layers if their rates, with nothing beside them, could make that
faster. Trials without success double the pause until the next ones; if steps take another time than before, it ends.
(`features.cpu_attention.balance` chooses between its two ways of a step in this manner. There the ends of both parts of
a layer are seen, so that the share follows them without trials.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median

_SMOOTHING = 1 / 4  # weight of a step in rates and times
_LATE = 1.3  # times the time of steps before: a longer step counts as so long
_IDLE = 0.9  # of a step: if the link was busy for less, the step did not wait for it all the time
# trials
_TRIAL = 3  # steps, whose median counts: in the first one copies for the share before are on the way
_HOPELESS = 2.0  # times the time with the kept share: a step that ends a trial
_CLEARLY = 0.97  # of the time with the kept share: one that is kept instead takes at most so long
_HOPE = 2.0  # by what factor rates may rise where only the link, or only the host, reads weights
_PRICE = 64  # a step of a trial may take 1 / _PRICE of the pause before it, whatever rates promise
_OF_FORMULA = 2  # trials before the formula proposes no more until the pause
# steps of a pause
_PAUSE = 16
_LONGEST_PAUSE = 4096
_CHANGED = 0.1  # of the time at the last trials: a difference that ends a pause


@dataclass(frozen=True, slots=True)
class StepCost:
    """What a decode step took."""

    rows: int
    seconds: float
    link_bytes: int  # copied to the device: weights, and KV if it is on the same link
    link_seconds: float  # in which they were copied
    host_bytes: int  # of weights that the host multiplied
    host_seconds: float  # in which it did, with the ways of activations there and back


@dataclass(frozen=True, slots=True)
class Share:
    """A way to divide the streamed layers."""

    host_layers: tuple[int, ...]  # ascending
    host_bytes: int
    link_bytes: int  # copied in a step


def shares_of(layer_bytes: Sequence[int]) -> list[Share]:
    """All ways to divide streamed layers, with more and more of them on the host.

    Layer i has the slot i % 2. Copied layers have the slots in turn, and lie spread, so that each is copied while
    others are computed. As many layers as there are slots are never multiplied on the host: copied once, they stay.
    """
    num_layers = len(layer_bytes)
    num_slots = min(2, num_layers - 1)
    shares = []
    for count in sorted({*range(num_slots, num_layers, 2), num_layers}, reverse=True):
        pairs = (num_layers - count) // 2  # of neighbours on the host, among the copied ones
        on_device = {index + 2 * (index * pairs // count) for index in range(count)}
        host_layers = tuple(layer for layer in range(num_layers) if layer not in on_device)
        host_bytes = sum(layer_bytes[layer] for layer in host_layers)
        shares.append(Share(host_layers, host_bytes, sum(layer_bytes) - host_bytes if count > num_slots else 0))
    return shares


@dataclass(slots=True)
class _Rate:
    """Bytes per second. A guess until it is measured."""

    value: float
    is_measured: bool = False

    def observe(self, num_bytes: int, seconds: float) -> None:
        if num_bytes and seconds:
            self.value += (_SMOOTHING if self.is_measured else 1.0) * (num_bytes / seconds - self.value)
            self.is_measured = True


@dataclass(slots=True)
class _Rows:
    """What is known of steps with about as many rows. Shares are indices."""

    host: _Rate
    rest: float = 0.0  # seconds of a step, without the host's products and waiting for copies
    kept: int = 0
    tried: int | None = None  # in a trial
    seconds: float = 0.0  # of a step with the kept share; 0 if none has counted
    counted: list[float] = field(default_factory=list)  # seconds of the trial's steps
    trials: set[int] = field(default_factory=set)  # since the pause
    was_better: bool = False  # any of them
    at_trials: float = 0.0  # `seconds` when they ended
    pause: int = _PAUSE // 2
    left: int = 0  # steps of the pause

    @property
    def current(self) -> int:
        return self.kept if self.tried is None else self.tried


class HostShare:
    """The closed loop: the host's layers in the next step, from the times of those before."""

    def __init__(self, layer_bytes: Sequence[int], link: float, host: float) -> None:
        """layer_bytes: of the streamed layers, of which there are at least two; link, host: rates at start, in bytes
        per second."""
        self.shares = shares_of(layer_bytes)
        self._link = _Rate(link)
        self._host = _Rate(host)
        self._kv_bytes = 0.0  # on the link in a step
        self._rows: dict[int, _Rows] = {}  # by the bits of the number of rows

    def layers(self, rows: int) -> tuple[int, ...]:
        """The streamed layers, by their indices, that the host multiplies in a step of so many rows."""
        return self.shares[self._of_rows(rows).current].host_layers

    def observe(self, step: StepCost) -> None:
        """Follow a step, which may have been planned some steps ago."""
        state = self._of_rows(step.rows)
        is_current = step.host_bytes == self.shares[state.current].host_bytes
        self._measure(step, state, is_current)
        if not is_current:  # a step between two shares, or of the one before
            return
        if state.tried is not None and step.seconds > _HOPELESS * state.seconds:
            self._try_next(state)
        else:
            self._count(step.seconds, state)

    # ---- the formula

    def _of_rows(self, rows: int) -> _Rows:
        bits = rows.bit_length()
        if bits not in self._rows:
            nearest = min(self._rows, key=lambda other: abs(other - bits), default=None)
            known = _Rows(self._host) if nearest is None else self._rows[nearest]
            state = _Rows(_Rate(known.host.value), known.rest)
            state.kept = self._best(state)
            self._rows[bits] = state
        return self._rows[bits]

    def _measure(self, step: StepCost, state: _Rows, is_current: bool) -> None:
        self._link.observe(step.link_bytes, step.link_seconds)
        state.host.observe(step.host_bytes, step.host_seconds)
        if is_current:
            kv_bytes = max(0, step.link_bytes - self.shares[state.current].link_bytes)
            self._kv_bytes += _SMOOTHING * (kv_bytes - self._kv_bytes)
        rest = step.seconds - step.host_seconds  # and what it waited for copies
        if rest < state.rest or step.link_seconds < _IDLE * step.seconds:
            state.rest += (_SMOOTHING if state.rest else 1.0) * (rest - state.rest)

    def _predicted(self, share: Share, state: _Rows) -> float:
        """Seconds of a step."""
        link, host = self._alone(share, state)
        return max(link, state.rest + host)

    def _alone(self, share: Share, state: _Rows) -> tuple[float, float]:
        """Seconds of the copies and of the products."""
        return (self._kv_bytes + share.link_bytes) / self._link.value, share.host_bytes / state.host.value

    def _best(self, state: _Rows) -> int:
        return min(range(len(self.shares)), key=lambda index: self._predicted(self.shares[index], state))

    # ---- trials

    def _count(self, seconds: float, state: _Rows) -> None:
        """Count a step with the current share."""
        if state.tried is None and state.seconds:
            state.seconds += _SMOOTHING * (min(seconds, _LATE * state.seconds) - state.seconds)
            state.left -= 1
            if abs(state.seconds - state.at_trials) > _CHANGED * state.at_trials:
                state.seconds = 0.0  # the next steps say what it is now
                state.pause = _PAUSE // 2
            elif state.left <= 0:
                self._try_next(state)
            return
        state.counted.append(seconds)
        if len(state.counted) == _TRIAL:
            found = median(state.counted)
            if not state.seconds or found <= _CLEARLY * state.seconds:
                state.was_better = True
                state.trials = {state.kept}
                state.kept = state.current
                state.seconds = found
            self._try_next(state)

    def _try_next(self, state: _Rows) -> None:
        """End a trial, and begin another one or a pause."""
        state.counted = []
        state.tried = None
        known = {state.kept, *state.trials}
        state.tried = next((share for share in self._proposals(state) if share not in known), None)
        if state.tried is not None:
            state.trials.add(state.tried)
            return
        state.pause = _PAUSE if state.was_better else min(2 * state.pause, _LONGEST_PAUSE)
        state.left = state.pause
        state.trials = set()
        state.was_better = False
        state.at_trials = state.seconds

    def _proposals(self, state: _Rows) -> Iterator[int]:
        """Shares that may be better than the kept one, the likeliest first."""
        best = self._best(state)
        last = len(self.shares) - 1
        is_first = len(state.trials) < _OF_FORMULA
        if is_first and self._predicted(self.shares[best], state) <= _CLEARLY * state.seconds:
            yield (best + state.kept) // 2
            yield best
        others = (min(state.kept + 1, last), max(state.kept - 1, 0), 0, last)
        yield from (share for share in others if self._may_pay(self.shares[share], state))

    def _may_pay(self, share: Share, state: _Rows) -> bool:
        """Whether rates that rise could make a share better, or finding out costs little beside the last pause."""
        link, host = self._alone(share, state)
        most = max(_HOPE, state.pause / _PRICE) * state.seconds
        return (link <= most or not self._link.is_measured) and (host <= most or not state.host.is_measured)
